"""Callers of the nine calls that map spaces and copy by themselves (shared/mempool/direct.py). No I/O.

A caller attaches for each space that it maps. It is no rank: engines' pages do not wait for it, and it writes only
pages that its connection to the nine calls has allocated. What counts is which processes may still write such pages:
those of engines and ranks until they are dead, a caller's until it has said Detach for every space, or is dead.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from services.mempool.core.actions import Action, Disconnect, KeepCaller, Send
from services.mempool.core.api_spaces import ApiSpaces
from services.mempool.core.engines import CALLER
from services.mempool.core.pool import Pool
from services.mempool.core.space import Memory
from shared.kv.words import u32_bytes
from shared.wire import mempool as wire
from shared.wire.mempool_callers import AttachCaller, CallerAttached, Detached

MAX_SPACES_OF_PROCESS = 64  # attachments of one process: each is a connection


@dataclass(frozen=True, slots=True)
class _Caller:
    process: int
    space: int
    writes: bool


class Callers:
    """Of one mempool. `in`: whether a process may write pages that it allocated by the nine calls.

    Args:
        pools: of all spaces, a view.
        api: of the nine calls.
    """

    def __init__(self, pools: Mapping[int, Pool], api: Callable[[], ApiSpaces]) -> None:
        self._pools, self._api = pools, api
        self._computing: set[int] = set()  # processes of engines and ranks
        self._open: dict[int, _Caller] = {}  # by connection
        self._unended: set[tuple[int, int]] = set()  # process, space: a connection ended without Detach

    def __contains__(self, process: object) -> bool:
        return (
            process in self._computing
            or any(each.process == process and each.writes for each in self._open.values())
            or any(each == process for each, _ in self._unended)
        )

    def computes(self, processes: Iterable[int]) -> None:
        """They have the memory of an engine or rank from now on, or may have."""
        self._computing.update(processes)

    def adopt(self, space: int, processes: Iterable[int]) -> None:
        """Of an earlier mempool, which had a space. Negative: a caller that has not said yet that its copies ended."""
        self._computing.update(process for process in processes if process > 0)
        self._unended.update((-process, space) for process in processes if process < 0)

    def has(self, connection: int) -> bool:
        """Whether it is a caller's attachment."""
        return connection in self._open

    def use(self, space: int) -> bool:
        """Whether one has attached to a space, or may write there still."""
        return any(each.space == space for each in self._open.values()) or any(
            each == space for _, each in self._unended
        )

    def on_attach(self, connection: int, process: int, message: AttachCaller) -> list[Action]:
        """A connection's first message.

        With `memory_id` the process had attached to an earlier mempool, and none of its copies of then runs any more.
        """
        pool = self._pools.get(message.space)
        resumes = message.memory_id != 0  # the instance may not be back yet
        if pool is None or not (resumes or self._api().has_home(message.pages_of, message.space)):
            reason = f"space {message.space} is not of {message.pages_of} in this mempool"
            return refusal(connection, "caller.unsupported", reason)
        if message.memory_id not in (0, pool.memory_id):
            self._unended.discard((process, pool.number))
            return refusal(connection, "memory.replaced", "the pool's memory is another by now")
        reason = self._obstacle(process, pool.memory)
        if not message.reads_only and self._api().has_home(message.instance, message.space):
            reason = "it is the caller's own space, into which others may be told to copy"
        if reason:
            return refusal(connection, "caller.unsupported", reason)
        self._open[connection] = _Caller(process, pool.number, not message.reads_only)
        assert pool.memory is not None
        pool.memory.engines.attach_rank(connection, process, CALLER, 0)
        if pool.releases is not None and pool.memory.pages_per_slab:
            pool.releases.attached(process)
        if message.memory_id:
            pool.report(-process)
        # the keeper knows the process before it has the memory
        return [KeepCaller(process, self._spaces(process)), _welcome(connection, pool, message.reads_only)]

    def _obstacle(self, process: int, memory: Memory | None) -> str:
        if memory is None or memory.is_loan:
            return "the space has no memory of its own"
        if memory.num_ranks != 1:
            return f"a page lies on {memory.num_ranks} ranks"
        if memory.pages_per_slab and (
            memory.num_slabs * memory.pages_per_slab != memory.table.num_pages or not memory.devices
        ):
            return "parts of a page lie apart, or its GPU is not known yet"
        if sum(each.process == process for each in self._open.values()) >= MAX_SPACES_OF_PROCESS:
            return f"one process attaches {MAX_SPACES_OF_PROCESS} times at most"
        return ""

    def on_detach(self, connection: int) -> list[Action]:
        """The caller has no copy under way and maps the space no more: as if it had never mapped it."""
        mine = self._open.pop(connection)
        pool = self._pools[mine.space]
        self._unended.discard((mine.process, mine.space))
        self._forget(pool, connection, mine.process)
        if mine.process not in self:
            self._api().on_process_unmapped(mine.process)
        said = Send(connection, Detached(), space=mine.space)
        return [
            KeepCaller(mine.process, self._spaces(mine.process)),
            said,
            Disconnect(connection, "detached"),
        ]

    def _forget(self, pool: Pool, connection: int, process: int) -> None:
        assert pool.memory is not None
        ranks = pool.memory.engines.ranks
        ranks.pop(connection, None)
        if pool.releases is not None:
            pool.releases.forget(connection)
            if all(rank.process != process for rank in ranks.values()):
                pool.releases.buried(process)  # it maps nothing here

    def on_closed(self, connection: int) -> None:
        """Without Detach: the process may write until it is dead."""
        mine = self._open.pop(connection, None)
        if mine is not None and mine.writes:
            self._unended.add((mine.process, mine.space))

    def on_process_dead(self, process: int) -> None:
        """Proof of death."""
        self._computing.discard(process)
        self._unended = {each for each in self._unended if each[0] != process}
        self._open = {c: each for c, each in self._open.items() if each.process != process}

    def _spaces(self, process: int) -> list[int]:
        """What the keeper has to know of: those that the process maps, read-only ones too."""
        found = {each.space for each in self._open.values() if each.process == process}
        return sorted(found | {space for each, space in self._unended if each == process})


def _welcome(connection: int, pool: Pool, reads_only: bool) -> Send:
    memory = pool.memory
    assert memory is not None
    absent = pool.releases.absent if memory.pages_per_slab and pool.releases is not None else []
    attached = CallerAttached(
        boot_generation=pool.boot_generation, num_pages=memory.table.num_pages,
        page_bytes=memory.page_bytes, pages_per_slab=memory.pages_per_slab, memory_id=pool.memory_id,
        absent_slabs=u32_bytes(absent), device=memory.devices.get(0, "cpu"), content_key=memory.content_key,
    )  # fmt: skip
    return Send(connection, attached, True, pool.number, reads_only)


def refusal(connection: int, code: str, reason: str) -> list[Action]:
    """Answer, and end the connection."""
    return [Send(connection, wire.AttachRefused(code=code, reason=reason)), Disconnect(connection, code)]
