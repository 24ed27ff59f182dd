"""A real keeper process, clients of it, and a process that creates memory and dies; driven by tests."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

from services.mempool import takeover
from services.mempool.memory import PoolMemory
from services.mempool.takeover import ProcessMeta, SpaceMeta
from shared.errors import ClusterError
from shared.ids import Epoch
from shared.kv.page import PageState, pack_word
from shared.mempool.keeper_client import KeeperClient
from shared.transport.unix_framing import pack_message
from shared.wire import keeper as wire
from tests.integration.mempool_rig import DESCRIPTION, ROOT, until

NUM_PAGES, PAGE_BYTES = 16, 8192
META = SpaceMeta(description=DESCRIPTION, num_pages=NUM_PAGES, page_bytes=PAGE_BYTES)


class KeeperProcess:
    """`python -m services.mempool.keeper`; start() again after kill(), perhaps with more flags."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.socket = folder / "keeper.sock"
        self.log = folder / "keeper.log"
        self._flags = flags
        self.process: subprocess.Popen | None = None
        self._clients: list[KeeperClient] = []
        self._peers: list[RawPeer] = []
        self.start()

    def start(self, *more: str) -> None:
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "services.mempool.keeper"),
                    *("--socket", str(self.socket), "--expected-fds", "1", *self._flags, *more),
                ],
                stderr=log,
                cwd=ROOT,
            )
        until(lambda: "keeper_listening" in self.log.read_text(), "the keeper listens", 60)

    def client(self, generation: int, **more) -> KeeperClient:
        client = KeeperClient(self.socket, Epoch(generation), **{"timeout_ms": 30_000} | more)
        client.connect()
        self._clients.append(client)
        return client

    def peer(self) -> "RawPeer":
        self._peers.append(RawPeer(self.socket))
        return self._peers[-1]

    def num_open(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def pss_bytes(self, kind: str = "Pss") -> int:
        """Of it; `kind` "Pss_Anon": of what it made itself, whoever else has the same program in memory."""
        lines = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) * 1024

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for client in self._clients:
            client.close()
        for peer in self._peers:
            peer.sock.close()


class RawPeer:
    """Sends whatever bytes and descriptors a test likes."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(30)
        try:
            self.sock.connect(str(path))
        except OSError:
            self.sock.close()
            raise

    def send(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
        self.sock.sendmsg([data], rights)

    def say(self, message: wire.ToKeeper, fds: tuple[int, ...] = (), announced: int | None = None) -> None:
        number = len(fds) if announced is None else announced
        self.send(pack_message(wire.TO_KEEPER.pack(message), num_fds=number, max_fds=wire.MAX_FDS), fds)

    def ended(self) -> bool:
        """Whether the keeper closed the connection, whatever it said before."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            return True
        return True


def pattern(page: int) -> bytes:
    """What page `page` holds."""
    return struct.pack("<Q", page * 2654435761 + 1) * (PAGE_BYTES // 8)


def creator(keeper_socket: str, generation: int) -> None:
    """A mempool of few words: creates memory, hands it over, writes pages, then waits to be killed."""
    client = KeeperClient(keeper_socket, Epoch(generation), timeout_ms=30_000)
    client.connect()
    memory = PoolMemory(NUM_PAGES, PAGE_BYTES, Epoch(generation))
    takeover.keep_myself(client, "mempool-0")
    takeover.keep_space(client, "demo@cpu", memory, META)
    pidfd = os.pidfd_open(os.getppid())
    takeover.keep_process(client, os.getppid(), pidfd, ProcessMeta(kind="engine", instance="prefill-0"))
    for page in range(NUM_PAGES):
        os.pwrite(memory.page_fd, pattern(page), page * PAGE_BYTES)
    states = [PageState.SEALED, PageState.WRITING, PageState.FREE, PageState.GRANTED]
    memory.write_words(
        (page, pack_word(Epoch(generation + page), states[page % 4])) for page in range(NUM_PAGES)
    )
    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:  # asked to write on, as a mempool that was only asleep would
        memory.write_words([(0, pack_word(Epoch(generation), PageState.FREE))])
        try:
            client.keep("demo@cpu", "pages", 0, [memory.page_fd], count=NUM_PAGES)
            print(json.dumps("kept"), flush=True)
        except ClusterError as error:
            print(json.dumps(type(error).__name__), flush=True)


class Creator:
    """creator() in a process of its own."""

    def __init__(self, keeper: KeeperProcess, generation: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.keeper_rig", str(keeper.socket), str(generation)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert json.loads(self.process.stdout.readline()) == "ready"

    def write_on(self) -> str:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


if __name__ == "__main__":
    creator(sys.argv[1], int(sys.argv[2]))
