"""`quire up` where a cluster runs, begins or stops already, and what else `up` and `down` say of homes and ends.

The other cluster is this process: it has the run's lock, and answers at the control socket as a supervisor does.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from deploy.local import cmd_down, cmd_up, config, config_digest, plan, run_supervisor
from deploy.local.cli import app
from deploy.local.control import ControlServer
from shared.errors import PeerGone, SettingsError

MOCK = ("--engine", "mock")
MOMENT_S = 0.4


class Cluster:
    """What a supervisor shows of itself; the test says in which state it is."""

    def __init__(self, home, *words):
        self.paths = config.paths_of(home)
        config.make_folders(self.paths)
        found = config.load(words)
        self.start = run_supervisor.Start(
            settings=found, model=plan.find_model(found), services=config_digest.digests()
        )
        self.status = {
            "url": "http://127.0.0.1:8000", "model": "quire-demo", "device": "cpu", "topology": "disaggregated",
            "services": [{"name": "gateway", "state": "starting"}], "authenticated": False, "trace_endpoint": "",
            "traces": "t", "logs": "l", "stopping": False, "was_ready": True, "ready": True, "gave_up": "",
        }  # fmt: skip
        self.num_asked = 0
        self.server = ControlServer(self.paths.control, self.answer)
        self.lock = None

    def answer(self, _):
        self.num_asked += 1
        return self.status

    async def __aenter__(self):
        self.lock = run_supervisor.take_lock(self.paths)
        run_supervisor.write_start(self.paths, self.start)
        await self.server.start()
        return self

    async def __aexit__(self, *_):
        await asyncio.sleep(0.05)  # connections that came and went are seen
        await self.server.close()
        self.lock.close()


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("QUIRE_CONFIG", "")  # set by --config; what was before comes back after the test
    monkeypatch.delenv("QUIRE_CONFIG")
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def started(monkeypatch):
    """Homes of clusters that were started in the foreground; each ends at once."""
    found = []

    async def supervise(start):
        assert run_supervisor.take_lock(config.paths_of(start.settings.home)) is None
        found.append(start)
        return 0

    monkeypatch.setattr(run_supervisor, "supervise", supervise)
    monkeypatch.setattr(run_supervisor, "prepare", lambda _: None)
    return found


async def up(*words):
    return await asyncio.to_thread(CliRunner().invoke, app, ["up", *MOCK, *map(str, words)])


async def is_watched(cluster, task):
    while not cluster.server.num_watchers and not task.done():
        await asyncio.wait([task], timeout=0.01)


async def is_done(task):
    await asyncio.wait([task], timeout=MOMENT_S)
    return task.done()


@pytest.mark.parametrize(
    ("env", "toml", "name"),
    [
        ({"QUIRE_GATEWAY_API_KEYS": "sk-secret"}, "", "gateway.api_keys"),
        ({"QUIRE_WORKER_MAX_NUM_SEQS": "3"}, "", "worker.max_num_seqs"),
        ({}, '[gateway]\napi_keys = ["sk-secret"]\n', "gateway.api_keys"),
        ({}, "[cluster]\nnum_decode = 2\n", "cluster.num_decode"),
    ],
)
async def test_other_settings_of_a_service_are_not_called_running(
    home, tmp_path, monkeypatch, env, toml, name
):
    async with Cluster(home, *MOCK):
        assert "already running" in (await up()).stdout
        for key, value in env.items():
            monkeypatch.setenv(key, value)
        (tmp_path / "quire.toml").write_text(toml)
        told = await up(*(("--config", tmp_path / "quire.toml") if toml else ()))
        monkeypatch.delenv("QUIRE_CONFIG", raising=False)
    said = " ".join(told.stderr.split())
    assert (told.exit_code, told.stdout) == (1, "")
    assert (
        f"other settings is running (http://127.0.0.1:8000 serves quire-demo); not the same: {name};" in said
    )
    assert "quire down` first" in said
    assert "sk-secret" not in said


async def test_settings_of_a_service_that_run_already_are_found_running_and_keys_of_theirs_are_hashed(
    home, monkeypatch
):
    monkeypatch.setenv("QUIRE_GATEWAY_API_KEYS", "sk-secret")
    async with Cluster(home, *MOCK) as cluster:
        assert "already running" in (await up()).stdout
        kept = cluster.paths.settings.read_text()
        assert "gateway.api_keys" in kept
        assert "sk-secret" not in kept
        monkeypatch.delenv("QUIRE_GATEWAY_API_KEYS")
        assert "gateway.api_keys" in (await up()).stderr


async def test_a_default_that_is_said_is_no_other_setting(home, monkeypatch):
    async with Cluster(home, *MOCK):
        monkeypatch.setenv("QUIRE_GATEWAY_LOG_LEVEL", "info")
        assert (await up()).exit_code == 0


async def test_the_same_relative_path_in_another_folder_is_another_model(home, tmp_path, monkeypatch):
    for folder in ("a", "b"):
        (tmp_path / folder / "m").mkdir(parents=True)
        (tmp_path / folder / "m" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "a")
    async with Cluster(home, *MOCK, "--model", "m"):
        assert (await up("--model", "m")).exit_code == 0
        monkeypatch.chdir(tmp_path / "b")
        told = await up("--model", "m")
        assert (told.exit_code, "cluster.model;" in told.stderr) == (1, True)


async def test_settings_that_cannot_be_read_count_as_others(home):
    async with Cluster(home, *MOCK) as cluster:
        cluster.paths.settings.write_text('{"settings": 1}')
        told = await up()
    assert told.exit_code == 1
    assert "quire down` first" in " ".join(told.stderr.split())
    assert "quire up" not in told.stderr


@pytest.mark.parametrize("name", ["lock", "settings"])
async def test_a_file_of_the_run_that_cannot_be_written_is_named(home, started, name):
    paths = config.paths_of(home)
    config.make_folders(paths)
    getattr(paths, name).mkdir()
    told = await up("--foreground")
    assert isinstance(told.exception, SettingsError)
    assert f"cannot write {getattr(paths, name)}: Is a directory" in told.exception.message
    if name == "lock":
        assert run_supervisor.main(["--home", str(home)]) == 1


async def test_up_waits_for_a_cluster_that_stops_and_starts_then(home, started):
    async with Cluster(home, *MOCK, "--num-decode", "2") as cluster:  # whatever it ran with
        cluster.status["stopping"] = True
        second = asyncio.create_task(up("--foreground"))
        while not cluster.num_asked:
            assert not await is_done(second)
        assert not await is_done(second)
        assert not started
    told = await second
    assert (told.exit_code, len(started)) == (0, 1), told.output
    assert "still stopping" in told.stdout
    assert run_supervisor.read_start(cluster.paths).settings.num_decode == 1


@pytest.mark.parametrize(("event", "code"), [("all_ready", 0), ("give_up", 1)])
async def test_up_is_not_done_before_the_start_of_another_is(home, event, code):
    async with Cluster(home, *MOCK) as cluster:
        cluster.status["was_ready"] = False
        second = asyncio.create_task(up())
        await is_watched(cluster, second)
        assert not await is_done(second)
        cluster.server.publish({"event": event, "name": "gateway", "text": "of the test"})
        await asyncio.sleep(MOMENT_S)
    told = await second
    assert told.exit_code == code, told.output
    assert ("Quire serves" in told.stdout) == (code == 0)


async def test_up_does_not_call_a_cluster_well_that_is_not_ready(home):
    async with Cluster(home, *MOCK) as cluster:
        cluster.status["ready"] = False
        told = await up()
    assert (told.exit_code, told.stdout) == (1, "")
    assert "is not ready; `quire status`" in told.stderr


async def test_who_begins_while_another_up_prepares_waits_for_it_and_leaves_its_files_alone(home, started):
    cluster = Cluster(home, *MOCK)
    held = run_supervisor.take_lock(cluster.paths)  # by the first, until its supervisor has it
    (cluster.paths.logs / "gateway.log").write_text("of the first")
    second = asyncio.create_task(up("--decode", 2, "--foreground"))
    assert not await is_done(second)
    run_supervisor.write_start(cluster.paths, cluster.start)
    await cluster.server.start()
    told = await second
    await cluster.server.close()
    held.close()
    assert (told.exit_code, started) == (1, []), told.output
    assert "cluster.num_decode" in told.stderr
    assert run_supervisor.read_start(cluster.paths) == cluster.start
    assert (cluster.paths.logs / "gateway.log").read_text() == "of the first"


async def test_up_starts_when_the_other_up_was_refused(home, started):
    config.make_folders(config.paths_of(home))
    held = run_supervisor.take_lock(config.paths_of(home))
    second = asyncio.create_task(up("--foreground"))
    assert not await is_done(second)
    held.close()
    assert ((await second).exit_code, len(started)) == (0, 1)


def wanted_at(home):
    config.make_folders(config.paths_of(home))
    return cmd_up.Wanted(config.load(), config.paths_of(home), "quire")


def test_the_supervisor_has_the_lock_before_up_lets_go_of_it(home):
    wanted = wanted_at(home)
    os.mkfifo(wanted.paths.settings)  # it reads them when it has the lock
    with run_supervisor.take_lock(wanted.paths) as lock:
        supervisor = cmd_up._start(wanted, lock)
    try:
        assert run_supervisor.take_lock(wanted.paths) is None
        told = None
        while told is None and supervisor.poll() is None:
            with contextlib.suppress(OSError):  # nobody reads yet
                told = os.open(wanted.paths.settings, os.O_WRONLY | os.O_NONBLOCK)
        assert told is not None, "it ended without its lock"
        os.close(told)  # they are empty
        assert supervisor.wait(timeout=60) == 1
    finally:
        supervisor.kill()
        supervisor.wait()
    with run_supervisor.take_lock(wanted.paths) as lock:
        assert lock is not None


async def test_up_does_not_take_another_supervisor_for_its_own(home, monkeypatch):
    async with Cluster(home, *MOCK):
        mine = SimpleNamespace(pid=os.getpid(), poll=lambda: None)
        (await asyncio.to_thread(cmd_up._wait_for_control, wanted_at(home), mine)).close()
        monkeypatch.setattr(cmd_up, "SUPERVISOR_START_S", MOMENT_S)
        other = SimpleNamespace(pid=os.getppid(), poll=lambda: None)
        with pytest.raises(SystemExit):
            await asyncio.to_thread(cmd_up._wait_for_control, wanted_at(home), other)


async def test_up_says_how_to_end_a_supervisor_that_does_not_answer(home, monkeypatch):
    async with Cluster(home, *MOCK):
        monkeypatch.setattr(cmd_up.ControlClient, "call", _closed)
        told = await up()
    assert (told.exit_code, "quire down` ends it" in told.stderr) == (1, True)


def _closed(*_, **__):
    raise PeerGone("the supervisor closed the connection")


@pytest.mark.parametrize("by", ["flag", "file", "flag over a file"])
async def test_a_home_that_only_up_was_told_of_is_named_in_what_is_printed(home, tmp_path, monkeypatch, by):
    there = tmp_path / "a home"
    (tmp_path / "quire.toml").write_text(f'[cluster]\nhome = "{there if by == "file" else tmp_path / "b"}"\n')
    words = ("--config", tmp_path / "quire.toml") if by == "file" else ("--set", f"home={there}")
    if by == "flag over a file":  # of which other commands hear, too; it goes before QUIRE_HOME
        monkeypatch.setenv("QUIRE_CONFIG", str(tmp_path / "quire.toml"))
    prefix = f"QUIRE_{'CLUSTER_' if by == 'flag over a file' else ''}HOME='{there}' quire"
    async with Cluster(there, *MOCK, "--home", str(there)) as cluster:
        said = (await up(*words)).stdout
        assert f"(`{prefix} status`, `{prefix} down`)" in said
        cluster.status["was_ready"] = False
        if by == "file":
            monkeypatch.delenv("QUIRE_CONFIG")
        second = asyncio.create_task(up(*words))
        await is_watched(cluster, second)
        assert not await is_done(second)
        cluster.server.publish({"event": "all_ready", "name": "", "text": ""})
        said = (await second).stdout
    assert f"try     {prefix} chat 'What is" in said
    for word in ("logs", "status", "down", "trace REQUEST_ID"):
        assert f"`{prefix} {word}`" in said


async def test_a_home_that_every_command_finds_is_not(home):
    async with Cluster(home, *MOCK):
        assert "(`quire status`, `quire down`)" in (await up("--set", f"home={home}")).stdout


def test_a_settings_file_beside_the_user_is_the_supervisors_too(home, tmp_path, monkeypatch, started):
    """It runs in another folder."""
    (tmp_path / "quire.toml").write_text("[cluster]\nnum_decode = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIRE_CONFIG", "quire.toml")
    assert CliRunner().invoke(app, ["up", *MOCK, "--foreground"]).exit_code == 0
    monkeypatch.chdir("/")
    assert config.load().num_decode == started[0].settings.num_decode == 3
    monkeypatch.chdir(tmp_path)
    assert config.load(["--lending-profiles", "a.json"]).lending_profiles == [str(tmp_path / "a.json")]


@pytest.mark.parametrize("is_gone", [False, True])
def test_down_bears_a_supervisor_that_ends_by_itself_and_waits_for_one_that_does_not(
    monkeypatch, capsys, is_gone
):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    if is_gone:
        child.kill()
        child.wait()
    monkeypatch.setattr(cmd_down, "connect", lambda: _Client(child.pid))
    cmd_down.down()
    said = capsys.readouterr().out
    assert ("killed" in said) != is_gone
    assert "stopped in" in said
    assert child.wait(timeout=10) == -signal.SIGKILL
    child.stdin.close()


class _Client(contextlib.nullcontext):
    """To a supervisor that closes the connection."""

    def __init__(self, pid):
        super().__init__()
        self.supervisor_pid, self.call = pid, _closed
