"""The mempool's dealings with the keeper: what is handed over, what is found after a crash.

Calls are blocking and short (about 0.1 ms): they happen when memory is made, when a process attaches or dies, and
at start. Without a keeper every call does nothing.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence

import msgspec

from services.mempool import takeover
from services.mempool.memory import PoolMemory, runs
from services.mempool.slabs import DeviceSlabs, KeptSlabs
from shared.errors import ClusterError
from shared.ids import Epoch
from shared.kv.layout import num_slabs
from shared.mempool.keeper_client import KeeperClient, KeeperStale
from shared.observe.log import get_logger
from shared.transport.unix_socket import OutOfDescriptors, close_fds, duplicates, opened

SPACE = "pages"  # the first one's name; the others have their number behind it
SLABS_PER_CALL = 128
RESTORE_INTERVAL_S = 0.5
MAX_RESTORE_INTERVAL_S = 10.0  # after tries that were waited for: a keeper that hangs

log = get_logger("mempool.kept")


def name_of(number: int) -> str:
    """Under which a space is kept."""
    return f"{SPACE}-{number}" if number else SPACE


class Kept:
    """One per mempool. A keeper that is lost gets everything again as soon as it is back.

    Raises (every method): KeeperStale when a newer mempool has the keeper: this one must end.
    """

    def __init__(self, socket: str, generation: Epoch) -> None:
        self.client = KeeperClient(socket, generation, self._hand_over_all)
        self._spaces: dict[int, tuple[PoolMemory, takeover.SpaceMeta]] = {}
        self._slabs: dict[tuple[int, int], DeviceSlabs | KeptSlabs] = {}  # by space and rank
        self._processes: dict[int, tuple[int, takeover.ProcessMeta]] = {}  # pid -> own pidfd, meta
        self._timer: asyncio.TimerHandle | None = None
        self._restore_pause_s = RESTORE_INTERVAL_S
        self._forgets_all = False  # what an earlier mempool left, and could not be taken over
        self._found_dead: list[int] = []
        self._ended: set[int] = set()  # spaces that the keeper has not been heard to forget
        self._lacks = False  # the keeper came back and has not got everything: it was full, say
        self._watches = False
        self._watched: tuple[int, int] | None = None  # connection number and descriptor under a reader

    def take_over(self) -> takeover.Takeover:
        """At start: what an earlier mempool left. Raises: takeover.TakeoverFailed."""
        found = takeover.take_over(self.client, self.client.generation)
        self._forgets_all = found.is_given_up
        self._try(lambda: takeover.keep_myself(self.client, "mempool"))
        return found

    def watch(self) -> None:
        """From now on notice when the keeper goes. Call on the running loop."""
        self._watches = self.client.enabled
        self._watch_now()
        if self._watches and self._watched is None:
            self._restore_later()

    def _watch_now(self) -> None:
        """Have a reader on the connection that there is. A call may have ended one, and made another."""
        if not self._watches:
            return
        if self._lacks:
            self._restore_later()
        loop = asyncio.get_running_loop()
        now = (self.client.num_reconnects, self.client.fileno()) if self.client.connected else None
        if now == self._watched:
            return
        if self._watched is not None:
            loop.remove_reader(self._watched[1])
            log.warning("keeper_lost")
        self._watched = now
        if now is not None:
            loop.add_reader(now[1], self._gone)
            if now[0]:
                log.info("keeper_restored", num_reconnects=now[0], has_everything=not self._lacks)
        else:
            self._restore_later()

    def space(self, memory: PoolMemory, meta: takeover.SpaceMeta) -> None:
        """Memory was made, or adopted: before the first page of it is granted."""
        self._spaces[meta.number] = (memory, meta)
        self._try(lambda: takeover.keep_space(self.client, name_of(meta.number), memory, meta))

    def owes(self, number: int, is_owed: bool) -> None:
        """Whether newcomers to a space, which is kept already, are owed the memory that it lacks."""
        memory, meta = self._spaces[number]
        self.space(memory, msgspec.structs.replace(meta, is_owed=is_owed))

    def slabs(
        self, number: int, rank: int, device: str, slabs: DeviceSlabs | KeptSlabs, num_slabs: int
    ) -> None:
        """One rank's pages on a GPU, of a space that is kept already."""
        self._slabs[number, rank] = slabs
        memory, meta = self._spaces[number]
        devices = [*meta.devices, *[""] * meta.num_ranks][: meta.num_ranks]
        devices[rank] = device
        self.space(memory, msgspec.structs.replace(meta, devices=devices))
        self._try(lambda: self._keep_slabs(number, rank, slabs, num_slabs))

    def _keep_slabs(self, number: int, rank: int, slabs: DeviceSlabs | KeptSlabs, num_slabs: int) -> None:
        self._keep_some(number, rank * num_slabs, slabs, [i for i in range(num_slabs) if slabs.is_present(i)])

    def _keep_some(
        self, number: int, base: int, slabs: DeviceSlabs | KeptSlabs, which: Sequence[int]
    ) -> None:
        for first, count in runs(which):
            for begin in range(first, first + count, SLABS_PER_CALL):
                fds = opened(slabs.export, range(begin, min(begin + SLABS_PER_CALL, first + count)))
                try:
                    takeover.keep_slabs(self.client, name_of(number), base + begin, fds)
                finally:
                    close_fds(fds)

    def slabs_changed(self, number: int, which: Sequence[int], *, has_memory: bool) -> None:
        """These slabs (sorted) of every rank of a space have no memory any more, or have some again."""
        for (space, rank), slabs in self._slabs.items():
            if space == number:
                meta = self._spaces[number][1]
                base = rank * num_slabs(meta.description, meta.num_pages, meta.pages_per_slab)
                self._try(lambda b=base, s=slabs: self._change(number, b, s, which, has_memory=has_memory))

    def _change(
        self,
        number: int,
        base: int,
        slabs: DeviceSlabs | KeptSlabs,
        which: Sequence[int],
        *,
        has_memory: bool,
    ) -> None:
        if has_memory:
            self._keep_some(number, base, slabs, which)
            return
        for first, count in runs(which):
            self.client.forget(name_of(number), "cuda-page", base + first, count)

    def end(self, number: int) -> None:
        """A space is over: no successor shall find it. A process that was there too, and lives, is elsewhere by now."""
        self._spaces.pop(number, None)
        for key in [key for key in self._slabs if key[0] == number]:
            del self._slabs[key]
        self._ended.add(number)
        self._try(self._forget_ended)
        for pid, (pidfd, meta) in list(self._processes.items()):
            others = [each for each in meta.spaces if each != number]
            if number in meta.spaces and others:  # none would mean all
                self._keep_process(pid, pidfd, msgspec.structs.replace(meta, spaces=others))

    def _forget_ended(self) -> None:
        for number in sorted(self._ended):
            self.client.forget_space(name_of(number))
            self._ended.discard(number)

    def process(
        self, pid: int, pidfd: int, kind: takeover.ProcessKind, instance: str, spaces: Sequence[int] = ()
    ) -> None:
        """A process is about to get memory of these spaces: the next mempool must be able to see its death."""
        known = self._processes.get(pid)
        before = [] if known is None else known[1].spaces
        maps = kind == "rank" or (known is not None and known[1].maps)
        kind = "engine" if known is not None and known[1].kind == "engine" else kind
        meta = takeover.ProcessMeta(
            kind=kind, instance=instance, spaces=sorted({*before, *spaces}), maps=maps,
            called=[] if known is None else known[1].called,
        )  # fmt: skip
        self._keep_process(pid, pidfd, meta)

    def _keep_process(self, pid: int, pidfd: int, meta: takeover.ProcessMeta) -> None:
        """By a copy of `pidfd`, the first time."""
        if pid in self._processes:
            own = self._processes[pid][0]
        else:
            try:
                (own,) = duplicates([pidfd])
            except OutOfDescriptors as error:
                log.warning("not_kept", code=error.code, reason=error.message)
                return
        self._processes[pid] = (own, meta)
        self._try(lambda: takeover.keep_process(self.client, pid, own, meta))

    def adopted(self, pid: int, pidfd: int, meta: takeover.ProcessMeta) -> None:
        """A process that an earlier mempool had kept."""
        self._keep_process(pid, pidfd, meta)

    def found_dead(self, pid: int, pidfd: int) -> None:
        """As adopted(), but it is dead. Closes `pidfd`."""
        os.close(pidfd)
        self._found_dead.append(pid)

    def forget_found_dead(self) -> None:
        """No successor has to know of these any more: ranks that such an engine left have reported, or are dead."""
        for pid in self._found_dead:
            if pid not in self._processes:  # its number may be another's by now
                self._try(lambda pid=pid: takeover.forget_process(self.client, pid))
        self._found_dead.clear()

    def caller(self, pid: int, pidfd: int, called: Sequence[int]) -> None:
        """A process maps these spaces as a caller of the nine calls, or is about to, and no others so."""
        known = self._processes.get(pid)
        if known is None and called:
            meta = takeover.ProcessMeta(kind="caller", maps=False, called=list(called))
            self._keep_process(pid, pidfd, meta)
        elif known is not None and known[1].kind == "caller" and not called:
            self.dead(pid)  # no other mempool has to ask after it
        elif known is not None:
            self._keep_process(pid, pidfd, msgspec.structs.replace(known[1], called=list(called)))

    def dead(self, pid: int) -> None:
        """A process is proven dead."""
        found = self._processes.pop(pid, None)
        if found is not None:
            os.close(found[0])
            self._try(lambda: takeover.forget_process(self.client, pid))

    def close(self) -> None:
        """End the connection; what is kept stays kept."""
        if self._timer is not None:
            self._timer.cancel()
        self._watches = False
        self._found_dead.clear()
        if self._watched is not None:
            with contextlib.suppress(RuntimeError, ValueError, OSError):
                asyncio.get_running_loop().remove_reader(self._watched[1])
        self.client.close()

    # -- a keeper that comes back ---------------------------------------------------------------------

    def _hand_over_all(self, _client: KeeperClient) -> None:
        """Processes first: a successor that finds a space must know of all that may still write there."""
        self._lacks = True
        if self._forgets_all:
            if names := self.client.forget_all():
                log.error("kept_memory_forgotten", spaces=names)
            self._forgets_all = False
        takeover.keep_myself(self.client, "mempool")
        self._forget_ended()
        for pid, (pidfd, meta) in self._processes.items():
            takeover.keep_process(self.client, pid, pidfd, meta)
        for number, (memory, meta) in self._spaces.items():
            takeover.keep_space(self.client, name_of(number), memory, meta)
        for (number, rank), slabs in self._slabs.items():
            meta = self._spaces[number][1]
            count = num_slabs(meta.description, meta.num_pages, meta.pages_per_slab)
            self._keep_slabs(number, rank, slabs, count)
        self._lacks = False

    def _try(self, keep: Callable[[], None]) -> None:
        if not self.client.enabled:
            return
        try:
            keep()
        except KeeperStale:
            raise
        except ClusterError as error:
            log.warning("not_kept", code=error.code, reason=error.message)
        self._watch_now()

    def _gone(self) -> None:
        assert self._watched is not None
        asyncio.get_running_loop().remove_reader(self._watched[1])
        self._watched = None
        log.warning("keeper_lost")
        self._restore_later()

    def _restore_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._restore_pause_s, self._restore)

    def _restore(self) -> None:
        self._timer = None
        if self._watched is not None and not self._lacks:  # a call was faster
            return
        began = time.monotonic()
        try:
            is_back = self._hand_over_the_rest() if self._watched is not None else self.client.restore()
        except KeeperStale:
            raise
        except ClusterError as error:
            log.warning("not_kept", code=error.code, reason=error.message)
            is_back = False
        if is_back:
            self._restore_pause_s = RESTORE_INTERVAL_S
            self._watch_now()
            return
        # a keeper that hangs, or takes all but the last slabs, holds the whole mempool up at each try; one that is gone
        # costs nothing
        was_waited_for = time.monotonic() - began >= RESTORE_INTERVAL_S
        is_costly = was_waited_for or (self._lacks and self.client.connected)
        longer_s = min(2 * self._restore_pause_s, MAX_RESTORE_INTERVAL_S)
        self._restore_pause_s = longer_s if is_costly else RESTORE_INTERVAL_S
        self._restore_later()
        self._watch_now()

    def _hand_over_the_rest(self) -> bool:
        """Everything again, over the connection that there is."""
        self._hand_over_all(self.client)
        log.info("keeper_has_everything")
        return True
