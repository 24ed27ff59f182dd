"""The supervisor's control socket, without a supervisor."""

import asyncio
import json
import socket
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy.local import control
from deploy.local.config import paths_of
from deploy.local.control import ControlClient, ControlServer
from deploy.local.supervisor import Supervisor
from shared.errors import PeerGone


async def test_a_control_socket_has_its_name_only_once_it_answers(tmp_path, monkeypatch):
    path, named = tmp_path / "control.sock", []
    path.touch()  # of a supervisor that was killed
    replace = Path.replace

    def answers_already(self, target):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self))
        named.append(target)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", answers_already)
    server = ControlServer(path, lambda request: {"said": request["op"]})
    await server.start()
    assert named == [path]
    assert [each.name for each in tmp_path.iterdir()] == ["control.sock"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await server.close()
    assert not list(tmp_path.iterdir())


async def test_a_client_is_answered(tmp_path):
    server = ControlServer(tmp_path / "control.sock", lambda request: {"said": request["op"]})
    await server.start()

    def ask():
        with ControlClient(tmp_path / "control.sock") as client:
            return client.call(op="status")

    assert await asyncio.to_thread(ask) == {"said": "status"}
    await server.close()


@pytest.mark.parametrize(
    ("me", "owner", "is_believed"),
    [
        (1000, None, False),
        (1000, 4242, False),
        (4242, 0, True),
        (0, None, False),
        (0, 1000, False),
        (0, 4242, True),
    ],
)
async def test_nobody_talks_to_a_supervisor_of_another_user(tmp_path, monkeypatch, me, owner, is_believed):
    """Root talks to the one of the home's owner, who is uid 4242 here or is not."""
    server = ControlServer(tmp_path / "control.sock", lambda request: {"said": request["op"]})
    await server.start()
    home = owner and SimpleNamespace(stat=lambda: SimpleNamespace(st_uid=owner))
    monkeypatch.setattr(control, "peer_credentials", lambda _: SimpleNamespace(pid=1, uid=4242, gid=4242))
    monkeypatch.setattr(control.os, "getuid", lambda: me)

    def ask():
        with ControlClient(tmp_path / "control.sock", home=home) as client:
            return client.call(op="status")

    if is_believed:
        assert await asyncio.to_thread(ask) == {"said": "status"}
    else:
        with pytest.raises(PeerGone, match="belongs to another user"):
            await asyncio.to_thread(ask)
    await asyncio.sleep(0.05)  # a connection that came and went is seen
    await server.close()


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"op":"status","deep":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\xff",
        b"1",
        b'{"op":[]}',
        *(
            b'{"op":"%s","name":%s}' % (op, name)
            for op in (b"kill", b"restart")
            for name in (b"[]", b"{}", b"null")
        ),
    ],
)
async def test_a_bad_request_is_answered(tmp_path, line):
    supervisor = Supervisor([], paths_of(tmp_path))
    server = ControlServer(tmp_path / "control.sock", supervisor._handle)
    await server.start()
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "control.sock"))
    async with asyncio.timeout(30):
        for asked in (line, b'{"op":"status"}'):
            writer.write(asked + b"\n")
            told = json.loads(await reader.readline())
            assert ("error" in told) == (asked is line)
    writer.close()
    await asyncio.sleep(0.05)  # its end is seen
    await server.close()
