"""The supervisor's control socket: unix stream, 0600, one JSON object per line each way.

{"op":"status"}; {"op":"watch"}: status, then every notice as it happens; {"op":"stop"}: answered at once, the
connection closes when everything is down; with "now":true, or asked again, it waits for nothing that is under way;
{"op":"kill","name":N,"signal":S}; {"op":"restart","name":N}.
An answer that refuses has the key "error".
"""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from shared.errors import PeerGone
from shared.transport.unix_socket import peer_credentials

MAX_LINE_BYTES = 1 << 20
MAX_WATCHERS = 16
REPLY_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 1.0


class ControlServer:
    """Serves `handle(request) -> answer`; `watch` and `stop` keep their connection open."""

    def __init__(self, path: Path, handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._path = path
        self._handle = handle
        self._server: asyncio.Server | None = None
        self._watchers: set[asyncio.StreamWriter] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises: OSError when the socket cannot be made."""
        listening = _listen(self._path)
        self._server = await asyncio.start_unix_server(self._serve, sock=listening, limit=MAX_LINE_BYTES)

    @property
    def num_watchers(self) -> int:
        """Connections that hear of every notice now."""
        return len(self._watchers)

    def publish(self, event: dict[str, Any]) -> None:
        """To every watcher; one that does not read is dropped."""
        line = json.dumps(event).encode() + b"\n"
        for writer in list(self._watchers):
            if writer.transport.get_write_buffer_size() > MAX_LINE_BYTES:
                writer.close()
                self._watchers.discard(writer)
            else:
                writer.write(line)

    async def close(self) -> None:
        """Ends every connection: who asked for the stop sees the end of file."""
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.close()
        if self._tasks:  # each sees the end of its connection
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            while line := await reader.readline():
                self._answer(line, writer)
                await writer.drain()
        except (OSError, ValueError):
            pass  # a client that went away or sent an endless line
        finally:
            self._open.discard(writer)
            self._watchers.discard(writer)
            writer.close()

    def _answer(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):  # nested too deep, the latter
            request = None
        if not isinstance(request, dict):
            answer: dict[str, Any] = {"error": "not a JSON object"}
        elif request.get("op") == "watch" and len(self._watchers) >= MAX_WATCHERS:
            answer = {"error": f"already {MAX_WATCHERS} watchers"}
        else:
            answer = self._handle(request)
            if request.get("op") in ("watch", "stop"):
                self._watchers.add(writer)
        writer.write(json.dumps(answer).encode() + b"\n")


def _listen(path: Path) -> socket.socket:
    """It has its name when it listens, not before: whoever waits for the name is answered."""
    unnamed = path.with_suffix(".new")
    unnamed.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_mask = os.umask(0o177)
    try:
        listening.bind(str(unnamed))
        listening.listen()
        unnamed.replace(path)
    except OSError:
        listening.close()
        raise
    finally:
        os.umask(old_mask)
    return listening


def _believed(home: Path | None) -> set[int]:
    """Users whose supervisor this one talks to."""
    found = {os.getuid()}
    if home is not None and found == {0}:
        with contextlib.suppress(OSError):
            found.add(home.stat().st_uid)
    return found


class ControlClient:
    """A blocking client, for commands."""

    def __init__(self, path: Path, *, home: Path | None = None, timeout_s: float = REPLY_TIMEOUT_S) -> None:
        """Args: home: of the cluster; root believes its owner too.
        Raises: PeerGone when no supervisor answers there, or one of another user: anybody can listen in /tmp, and
            would be sent API keys.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise PeerGone("no cluster is running here; `quire up` starts one") from error
        if (uid := peer_credentials(self._socket).uid) not in _believed(home):
            self._socket.close()
            raise PeerGone(
                f"what listens on {path} belongs to another user (uid {uid}); set QUIRE_HOME elsewhere"
            )
        self._lines = self._socket.makefile("rb")

    @property
    def supervisor_pid(self) -> int:
        """As the kernel knows it."""
        return peer_credentials(self._socket).pid

    def call(self, **request: Any) -> dict[str, Any]:
        """One request, one answer. Raises: PeerGone on a lost connection or after the timeout."""
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            line = self._lines.readline()
        except OSError as error:
            raise PeerGone(f"the supervisor does not answer: {error}") from error
        if not line:
            raise PeerGone("the supervisor closed the connection")
        return json.loads(line)

    def events(self, *, timeout_s: float | None) -> Iterator[dict[str, Any]]:
        """After `watch` or `stop`: notices until the supervisor is gone. Raises: TimeoutError between two."""
        self._socket.settimeout(timeout_s)
        with contextlib.suppress(ConnectionError):
            for line in self._lines:
                yield json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self._lines.close()
        self._socket.close()
