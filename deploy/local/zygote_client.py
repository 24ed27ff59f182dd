"""The supervisor's side of the engine zygote: one connection, workers forked instead of executed.

The protocol is described in shared/engine/zygote.py: one JSON object per line over a unix socket.
"""

import asyncio
import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from deploy.local.launch import kill_group
from deploy.local.supervision import Health
from shared.background_task import begin_task

CONNECT_RETRY_S = 0.05
MAX_LINE_BYTES = 1 << 20
CANNOT_SPAWN = 127  # a shell's exit code for what it cannot start
EXIT_WAIT_S = 0.5  # for the zygote's word about a worker's end, then for its answer to a ping
SILENT_PINGS = 2  # not one: if this process stood still, the answer is there, and not yet read


class ForkedProcess:
    """A worker forked by the zygote, which reports its exit and, when asked to, reaps it: its number stays its own."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # gone, and so is the zygote
            self._pidfd = -1

    def send(self, signum: int) -> None:
        """Signal it; SIGKILL goes to its whole process group."""
        if self._pidfd < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signum)
            if signum == signal.SIGKILL:
                kill_group(self.pid)

    def watch(self, on_end: Callable[[], None]) -> None:
        """Call it, once, when the process has ended, also while nobody reaps it."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().add_reader(self._pidfd, self._ended, on_end)

    def _ended(self, on_end: Callable[[], None]) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        on_end()

    def close(self) -> None:
        """Its exit is known."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


class ZygoteClient:
    """Spawns through the zygote behind `socket_path`.

    Args:
        on_spawned: (name, process), once per spawn that worked.
        on_exited: (name, returncode), once per spawn that is not disowned, also when it failed or the zygote is lost,
            or hangs: of a worker that ends then, the status is not known, and said to be SIGKILL's.
    """

    def __init__(
        self,
        socket_path: Path,
        *,
        on_spawned: Callable[[str, ForkedProcess], None],
        on_exited: Callable[[str, int], None],
    ) -> None:
        self.ready = False
        self._socket_path = socket_path
        self._on_spawned = on_spawned
        self._on_exited = on_exited
        self._children: dict[str, ForkedProcess | None] = {}  # None: asked for, not yet answered
        self._disowned: Counter[str] = Counter()  # answers, the next ones of each name, that nobody waits for
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._unsaid: set[asyncio.Task[None]] = set()  # each waits for the word about one end
        self._num_pings = 0
        self._pinged: asyncio.Future[None] | None = None  # done at the answer to the last ping

    def connect(self) -> None:
        """Follow a zygote process that is about to be started."""
        self.close()
        with contextlib.suppress(FileNotFoundError):
            self._socket_path.unlink()
        self._task = asyncio.get_running_loop().create_task(self._follow())

    def close(self) -> None:
        """The zygote process is gone (or will be): its children are killed and reported."""
        self.ready = False
        self._pinged = None
        if self._task is not None:
            self._task.cancel()
            self._task = None
        for waiting in self._unsaid:
            waiting.cancel()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for name, child in list(self._children.items()):
            if child is not None:
                child.send(signal.SIGKILL)
            self._ended(name, -signal.SIGKILL)
        self._disowned.clear()

    def disown(self, name: str) -> None:
        """Nobody waits for this spawn's answer any more: a process that comes of it is killed, not reported."""
        if name in self._children and self._children[name] is None:
            del self._children[name]
            self._disowned[name] += 1

    def spawn(
        self, name: str, *, module: str, argv: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> None:
        """Ask for a worker. Its exit is reported at once if there is no zygote to ask."""
        self._children[name] = None
        if self._writer is None or not self.ready:
            self._ended(name, -signal.SIGKILL)
            return
        self._ask(op="spawn", name=name, module=module, argv=list(argv), log=str(log), env=dict(env))

    async def health(self, timeout_s: float) -> Health:
        """Whether it would answer a spawn now. One that hangs gets one ping, not one for each time it is looked at."""
        if self._writer is None or not self.ready:
            return Health.NOT_READY
        if self._pinged is None:
            self._num_pings += 1
            self._pinged = asyncio.get_running_loop().create_future()
            self._ask(op="ping", number=self._num_pings)
        answered, _ = await asyncio.wait([self._pinged], timeout=timeout_s)
        return Health.OK if answered else Health.SILENT

    def _ask(self, **message: object) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _follow(self) -> None:
        """Connect as soon as the socket is there, then hear events until the connection ends."""
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(
                    str(self._socket_path), limit=MAX_LINE_BYTES
                )
                self._writer = writer
                break
            except OSError:  # still starting; the start deadline of the zygote's own service bounds this
                await asyncio.sleep(CONNECT_RETRY_S)
        try:
            while line := await reader.readline():
                self._hear(json.loads(line))
        except OSError:
            pass  # the same as end of file: the zygote's exit is seen by its own process
        finally:
            # After an error of whoever hears us, too: a zygote whose connection stayed open would live on, unheard, and
            # no worker start again. It ends at the end of file, and is started anew.
            self.ready = False
            writer.close()

    def _hear(self, event: dict[str, object]) -> None:
        kind, name = event.get("event"), str(event.get("name", ""))
        if kind == "ready":
            self.ready = True
        elif kind == "pong":
            if self._pinged is not None and event["number"] == self._num_pings:
                self._pinged.set_result(None)
                self._pinged = None
        elif kind == "spawned" and self._disowned[name]:  # answers come in the order of the asks
            self._disowned[name] -= 1
            process = ForkedProcess(int(str(event["pid"])))
            process.send(signal.SIGKILL)
            process.close()
        elif kind == "spawn_failed" and self._disowned[name]:
            self._disowned[name] -= 1
        elif kind == "spawn_failed" and name in self._children:  # its log says why
            self._ended(name, CANNOT_SPAWN)
        elif kind == "spawned" and name in self._children:
            process = ForkedProcess(int(str(event["pid"])))
            self._children[name] = process
            process.watch(lambda: self._await_word(name, process))
            self._on_spawned(name, process)
        elif kind == "exited":
            child = self._children.get(name)
            if child is not None and child.pid == event["pid"]:  # not a disowned one's
                self._ended(name, int(str(event["status"])))
            # now that nobody takes its number for a worker's, nor does the guard
            self._ask(op="reap", pid=event["pid"])

    def _await_word(self, name: str, process: ForkedProcess) -> None:
        task = begin_task(self._end_unsaid(name, process), f"end of {name}")
        self._unsaid.add(task)
        task.add_done_callback(self._unsaid.discard)

    async def _end_unsaid(self, name: str, process: ForkedProcess) -> None:
        """A worker has ended. A zygote that hangs does not say so, and nothing that waits for it would go on."""
        num_silent = 0
        await asyncio.sleep(EXIT_WAIT_S)
        while self._children.get(name) is process:
            if num_silent >= SILENT_PINGS:
                process.send(signal.SIGKILL)  # for what it had started itself
                self._ended(name, -signal.SIGKILL)
            elif await self.health(EXIT_WAIT_S) is Health.SILENT:
                num_silent += 1
            else:
                num_silent = 0
                await asyncio.sleep(EXIT_WAIT_S)

    def _ended(self, name: str, returncode: int) -> None:
        child = self._children.pop(name, None)
        if child is not None:
            child.close()
        self._on_exited(name, returncode)
