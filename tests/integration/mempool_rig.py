"""A real mempool process and real engine processes, driven by tests."""

import hashlib
import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from shared.ids import BlockHash
from shared.kv.layout import EngineDescription
from shared.mempool.client import CALL_TIMEOUT_MS, Call, MempoolClient
from shared.wire import mempool as wire

ROOT = Path(__file__).parents[2]
BLOCK_BYTES = 6000
PATIENCE_MS = 30_000
SEED = BlockHash(b"\0" * 32)
DESCRIPTION = EngineDescription(
    model="m", fingerprint="f", dtype="float32", layout="layers-blocks", backend="none", block_tokens=4,
    block_bytes=BLOCK_BYTES,
)  # fmt: skip


def chain(*names: str) -> list[BlockHash]:
    """Hashes of a chain; equal leading names give equal leading hashes."""
    out, link = [], SEED
    for name in names:
        link = BlockHash(hashlib.sha256(link + name.encode()).digest())
        out.append(link)
    return out


def content(block_hash: bytes) -> bytes:
    """The bytes that a test's block holds."""
    return (block_hash * (BLOCK_BYTES // 32 + 1))[:BLOCK_BYTES]


def until(condition, what: str, timeout_s: float = 60.0) -> float:
    """Seconds until the condition held."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > timeout_s:
            raise AssertionError(f"{what}: not within {timeout_s} s")
        time.sleep(0.005)
    return time.monotonic() - started


class PatientClient(MempoolClient):
    """A client whose calls wait for a mempool that the machine keeps from its cores, where no shorter time is named."""

    async def _ask(self, message: Call, timeout_ms: int) -> wire.FromMempool | None:
        is_usual = timeout_ms >= CALL_TIMEOUT_MS
        return await super()._ask(message, max(timeout_ms, PATIENCE_MS) if is_usual else timeout_ms)


class MempoolProcess:
    """`python -m services.mempool` on a socket in `folder`; start() again after kill() for the next boot."""

    def __init__(
        self,
        folder: Path,
        *,
        env: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        **settings: object,
    ) -> None:
        """`prefix`: words before the command, such as `ip netns exec NAME`; then /status is not reached from here."""
        self._prefix = prefix
        self.socket = folder / "mempool.sock"
        self._env = env
        self._log = folder / "mempool.log"
        flags = {"socket": self.socket, "admin-listen": "127.0.0.1:0", "capacity-bytes": 64 * 8192} | settings
        self._flags = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        self.process: subprocess.Popen | None = None
        self.admin = ""
        self.start()

    def start(self) -> None:
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*self._prefix, sys.executable, "-m", "services.mempool", *self._flags],
                stderr=log,
                cwd=ROOT,
                env=self._env,
            )
        until(lambda: self._event("settings") or self.process.poll() is not None, "mempool starts", 60)
        assert self.process.poll() is None, self._log.read_text()
        self.admin = self._event("settings")["admin"]

    def log_lines(self) -> list[dict]:
        whole = self._log.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]  # UCX may speak too

    def _event(self, name: str) -> dict | None:
        return next((line for line in self.log_lines() if line["event"] == name), None)

    def status(self) -> dict:
        return json.loads(self.get("/status"))

    def settled(self) -> dict:
        """The status once no copy is under way and nothing is held, or as it is after a while."""
        until_s = time.monotonic() + 20
        while True:
            found = self.status()
            held = found["num_pinned"] - found["num_kept"] + found["num_leases"] + found["num_handoffs"]
            is_settled = not held and not found["pages_by_state"]["writing"]
            if is_settled or time.monotonic() > until_s:
                return found
            time.sleep(0.05)

    def counts(self) -> dict[str, int]:
        """Non-zero counts by state."""
        return {name: count for name, count in self.status()["pages_by_state"].items() if count}

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.admin}{path}", timeout=30) as answer:
            return answer.read().decode()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.kill()


class EngineProcess:
    """tests/integration/mempool_engine.py: one JSON command a line, one JSON answer a line."""

    def __init__(self, socket: Path, instance: str, quota: int = 8) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.mempool_engine", str(socket), instance, str(quota)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        try:
            assert self.read() == "attached"
        except BaseException:
            self.kill()
            raise

    def read(self) -> object:
        line = self.process.stdout.readline()
        assert line, f"engine ended with {self.process.wait()}"
        return json.loads(line)

    def do(self, command: str, *args: object) -> object:
        self.process.stdin.write(json.dumps([command, *args]) + "\n")
        self.process.stdin.flush()
        return self.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
