"""The supervisor's side of the zygote's connection, against a pretended zygote."""

import asyncio
import json
import os
import signal
import subprocess

import pytest

from deploy.local import zygote_client
from deploy.local.supervision import Health
from deploy.local.zygote_client import ZygoteClient

LIMIT_S = 30


class Zygote:
    """Says what the test tells it to say."""

    def __init__(self, path):
        self.path = path
        self.children = []

    async def start(self):
        self.connected = asyncio.Event()
        self.server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def _serve(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.connected.set()

    def say(self, **event):
        self.writer.write(json.dumps(event).encode() + b"\n")

    async def asked(self):
        return json.loads(await asyncio.wait_for(self.reader.readline(), LIMIT_S))

    def fork(self, name):
        """A process that sleeps, reported as spawned."""
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.children.append(child)
        self.say(event="spawned", name=name, pid=child.pid)
        return child


class Heard:
    """What the client reports. `error`: raised by on_spawned."""

    def __init__(self):
        self.error = None
        self.events = asyncio.Queue()

    def spawned(self, name, process):
        self.events.put_nowait((name, process.pid))
        if self.error is not None:
            raise self.error

    def exited(self, name, returncode):
        self.events.put_nowait((name, returncode))

    async def next(self):
        return await asyncio.wait_for(self.events.get(), LIMIT_S)


@pytest.fixture
async def rig(tmp_path):
    """(client that is ready, what it reports, its zygote)."""
    zygote, heard = Zygote(tmp_path / "zygote.sock"), Heard()
    client = ZygoteClient(zygote.path, on_spawned=heard.spawned, on_exited=heard.exited)
    client.connect()
    await zygote.start()
    await asyncio.wait_for(zygote.connected.wait(), LIMIT_S)
    zygote.say(event="ready")
    async with asyncio.timeout(LIMIT_S):
        while not client.ready:  # noqa: ASYNC110  told over a socket
            await asyncio.sleep(0.01)
    yield client, heard, zygote
    client.close()
    zygote.writer.close()
    zygote.server.close()
    for child in zygote.children:
        child.kill()
        child.wait()


def spawn(client, tmp_path):
    client.spawn("w", module="m", argv=[], log=tmp_path / "w.log", env={})


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("a bug")])
async def test_a_callback_that_raises_ends_the_zygote_for_it_would_not_be_heard_again(rig, tmp_path, error):
    client, heard, zygote = rig
    heard.error = error
    spawn(client, tmp_path)
    await zygote.asked()
    zygote.fork("w")
    await heard.next()
    assert await asyncio.wait_for(zygote.reader.read(), LIMIT_S) == b""  # end of file: a zygote exits at it
    assert not client.ready


async def test_a_process_that_comes_when_nobody_waits_for_it_any_more_is_killed(rig, tmp_path):
    client, heard, zygote = rig
    spawn(client, tmp_path)
    client.disown("w")
    spawn(client, tmp_path)
    await zygote.asked()
    await zygote.asked()
    late = zygote.fork("w")
    assert await asyncio.to_thread(late.wait, LIMIT_S) == -9
    zygote.say(event="exited", name="w", pid=late.pid, status=-9)
    wanted = zygote.fork("w")
    assert await heard.next() == ("w", wanted.pid)
    zygote.say(event="exited", name="w", pid=wanted.pid, status=3)
    assert await heard.next() == ("w", 3)
    assert heard.events.empty()


async def test_a_zygote_is_well_while_it_answers_and_one_that_hangs_is_pinged_once(rig):
    client, _, zygote = rig
    asking = asyncio.create_task(client.health(LIMIT_S))
    first = await zygote.asked()
    zygote.say(event="pong", number=first["number"])
    assert await asking is Health.OK
    for _ in range(3):
        assert await client.health(0.01) is Health.SILENT
    second = await zygote.asked()
    assert (second["op"], second["number"]) == ("ping", first["number"] + 1)
    zygote.say(event="pong", number=first["number"])  # no answer to this one
    asking = asyncio.create_task(client.health(LIMIT_S))
    zygote.say(event="pong", number=second["number"])
    assert await asking is Health.OK
    asking = asyncio.create_task(client.health(LIMIT_S))
    assert (await zygote.asked())["number"] == second["number"] + 1
    zygote.say(event="pong", number=second["number"] + 1)
    assert await asking is Health.OK


async def test_a_zygote_that_is_gone_is_not_ready(rig):
    client, _, _zygote = rig
    client.close()
    assert await client.health(LIMIT_S) is Health.NOT_READY


async def test_a_process_that_is_there_is_not_disowned(rig, tmp_path):
    client, heard, zygote = rig
    spawn(client, tmp_path)
    wanted = zygote.fork("w")
    assert await heard.next() == ("w", wanted.pid)
    client.disown("w")
    zygote.say(event="exited", name="w", pid=wanted.pid, status=0)
    assert await heard.next() == ("w", 0)


async def test_the_number_of_a_worker_that_has_ended_is_given_back_and_nothing_is_killed_by_it(rig, tmp_path):
    client, heard, zygote = rig
    spawn(client, tmp_path)
    await zygote.asked()
    worker = zygote.fork("w")
    await heard.next()
    zygote.say(event="exited", name="w", pid=worker.pid, status=3)  # which lives, as if it were another
    assert await zygote.asked() == {"op": "reap", "pid": worker.pid}
    assert heard.events.get_nowait() == ("w", 3), "first the guard, too, is told"
    assert worker.poll() is None


async def test_a_worker_that_ends_while_the_zygote_hangs_has_ended(rig, tmp_path, monkeypatch):
    client, heard, zygote = rig
    monkeypatch.setattr(zygote_client, "EXIT_WAIT_S", 0.05)
    spawn(client, tmp_path)
    old = zygote.fork("w")
    assert await heard.next() == ("w", old.pid)
    os.kill(old.pid, signal.SIGTERM)  # not reaped here: a zombie, as of a stopped zygote
    assert await heard.next() == ("w", -9)
    spawn(client, tmp_path)
    new = zygote.fork("w")
    assert await heard.next() == ("w", new.pid)
    zygote.say(event="exited", name="w", pid=old.pid, status=-15)  # after all
    zygote.say(event="exited", name="w", pid=new.pid, status=0)
    assert await heard.next() == ("w", 0)
    assert heard.events.empty()


async def test_the_word_of_a_zygote_that_answers_is_waited_for(rig, tmp_path, monkeypatch):
    client, heard, zygote = rig
    monkeypatch.setattr(zygote_client, "EXIT_WAIT_S", 0.4)
    spawn(client, tmp_path)
    await zygote.asked()
    worker = zygote.fork("w")
    assert await heard.next() == ("w", worker.pid)
    os.kill(worker.pid, signal.SIGTERM)
    for _ in range(5):
        ping = await zygote.asked()
        zygote.say(event="pong", number=ping["number"])
    zygote.say(event="exited", name="w", pid=worker.pid, status=3)
    assert await heard.next() == ("w", 3)
