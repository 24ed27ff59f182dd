"""The supervisor's control socket, without a supervisor."""

import asyncio
import socket
import stat
from pathlib import Path

from deploy.local.control import ControlClient, ControlServer


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
