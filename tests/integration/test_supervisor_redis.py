"""The own Redis under the supervisor: a journal that it cannot read, and a server that does not answer."""

import os
import signal

from deploy.local.plan import redis_folder
from shared.free_ports import free_port
from shared.prompttree.embedded import find_redis_server
from tests.integration.test_supervisor import eventually, run  # noqa: F401  a fixture


def add_redis(run):  # noqa: F811
    port, folder = free_port(), redis_folder(run.paths)
    folder.mkdir()
    command = [str(find_redis_server()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += ["--appendonly", "yes", "--dir", str(folder)]
    run.services.append({"name": "redis", "command": command, "port": port, "probe": "redis"})
    return folder


def test_a_redis_whose_journal_is_damaged_starts_empty_and_the_newest_damaged_one_is_kept(run):  # noqa: F811
    folder = add_redis(run)
    journal = folder / "appendonlydir"
    journal.mkdir()
    (journal / "appendonly.aof.manifest").write_text("file appendonly.aof.1.incr.aof seq 1 type i\n")
    (journal / "appendonly.aof.1.incr.aof").write_bytes(b"*1\r\nno journal\r\n" * 9)
    folder.with_name("redis.damaged-20000101T000000").mkdir()
    run.start().wait_ready()
    [kept] = folder.parent.glob("redis.damaged-*")
    assert (kept / "appendonlydir" / "appendonly.aof.1.incr.aof").read_bytes().startswith(b"*1\r\nno")
    status = run.call(op="status")
    assert str(kept) in status["journal"]
    assert status["services"][0]["restarts"] == 1
    assert "journal_damaged redis" in (run.home / "stderr").read_text()


def test_a_stopped_redis_is_not_called_well(run):  # noqa: F811
    add_redis(run)
    run.start().wait_ready()
    pid = run.service("redis")["pid"]
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: run.service("redis")["health"] == "silent", "silent")
    assert not run.call(op="status")["ready"]
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: run.service("redis")["health"] == "ok", "well again")
