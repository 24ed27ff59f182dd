"""Copies whole pages between spaces of this mempool: the I/O behind the action CopyPages.

    copy() -> waiting -(its spaces are ready, room)-> running -(every pull ended)-> on_done, once
                      -(deadline)-> on_done                    -(failed)-> on_done, and later on_settled

Every page has a part on each rank; a copy is done when all ranks have it. Until on_done the target pages belong to
the copy; those that it reports as quarantined may still be written and come back by on_settled, or never (a copy
engine that stands still). Spaces are mapped in the background when they are added, never in a copy (architecture,
section 4, rule 8): a copy that comes earlier waits, within its own deadline, and fails while that has failed. One also
waits while host memory of its spaces is on its way out of page-locking (mover_pinning.py).
Public methods and callbacks run on the event loop; nothing here waits, but for close().
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from services.mempool.mover_copies import (
    Copy,
    CopyDone,
    MoverBusy,
    MoverClosed,
    OnDone,
    OnSettled,
    Space,
    Totals,
    check_shape,
)
from services.mempool.mover_gpu import OpenGpu, SlabWindow, open_gpu
from services.mempool.mover_job import Job
from services.mempool.mover_layers import Feed
from services.mempool.mover_mapping import Mapping
from services.mempool.mover_paths import Parts, Paths
from services.mempool.mover_pinning import Pinning
from services.mempool.mover_regions import MAX_RANKS, RankRegion, SlabRegion, region_name, space_and_rank
from services.mempool.mover_spaces import Mapper
from services.mempool.mover_targets import Targets
from services.mempool.mover_thread import PullThread
from services.mempool.mover_uses import Uses
from shared.errors import ClusterError
from shared.kernels.copy_pages.copier import Copier
from shared.observe.log import get_logger
from shared.transfer.errors import TransferRefused, TransferTimeout
from shared.transfer.reslice import KvEnd

__all__ = ["CopyDone", "Mover", "MoverBusy", "MoverClosed"]

MAX_COPIES = 1024  # waiting and running
MAX_RUNNING_PULLS = 128  # more copies wait, unless they are alone
GRACE_S = 1.0  # after the deadline, for the transports to say how a copy ended
CLOSE_POLL_S = 0.002

log = get_logger("mempool.mover")


class Mover:
    """One per mempool; its threads start here and end in close()."""

    def __init__(
        self,
        on_settled: OnSettled,
        *,
        threads: int = 2,
        host_copier: Copier | None = None,
        max_copies: int = MAX_COPIES,
        pin_host: bool = False,
        floor_gb_per_s: float = 0.0,
        huge_pages: bool = False,
        open_gpu: OpenGpu = open_gpu,
        background: ThreadPoolExecutor | None = None,
    ) -> None:
        """Create it on the running loop.

        Args:
            threads: of the CPU, for copies between host spaces; host_copier: instead of those, the caller's.
            pin_host: page-lock host spaces once there is a GPU: all of it is taken, and none is punched unless the
                space rests (is_pinned(), mover_pinning.py). huge_pages: it is made of them first (shared/vmm).
            floor_gb_per_s: a pair of GPUs under it makes the space that brings it unusable (LinkTooSlow).
            background: one thread, for everything that maps; shut down by close().
        """
        self._loop = asyncio.get_running_loop()
        self._on_settled = on_settled
        self._max_copies = max_copies
        self._mapper = Mapper(
            open_gpu, pin_host=pin_host, floor_gb_per_s=floor_gb_per_s, huge_pages=huge_pages
        )
        self._paths = Paths(
            lambda region, pages: self._tell(self._settled, region, pages), self._mapper.pinned,
            threads=threads, host_copier=host_copier,
        )  # fmt: skip
        self._background = background or ThreadPoolExecutor(1, thread_name_prefix="mover-map")
        self.pinning = Pinning(
            self._mapper.pin_some, lambda: self._num_pulls > 0, self._background, self._loop,
            self._mapper.unpin, self._mapper.resting, self._pump_soon,
        )  # fmt: skip
        self._thread = PullThread()
        self._mapping = Mapping(
            self._mapper, self._paths, self._thread, self._background,
            on_mapped=self.pinning.begin, on_tried=self._tried,
        )  # fmt: skip
        self._spaces: dict[int, Space] = {}
        self._copies: dict[int, Copy] = {}
        self._waiting: deque[Copy] = deque()
        self._jobs: set[Job] = set()  # those whose end has not been heard of, whatever was answered
        self._targets = Targets()
        self.uses = Uses(self._spaces, lambda number: self._remove_if_unused(self._spaces.get(number)))
        self._num_pulls = 0
        self._pin_host = pin_host
        self._has_gpu = False
        self._host_spaces: set[int] = set()
        self._pumping = False
        self._closed = False
        self.totals = Totals()

    # -- spaces -----------------------------------------------------------------------------------

    def add_space(self, number: int, regions: Sequence[RankRegion], end: KvEnd | None = None) -> None:
        """Map the pages of every rank, in the background. Once per space, at its creation or adoption.

        What fails is tried again (mover_mapping.py). Descriptors and slabs of `regions` must live until is_mapped(),
        or the space is removed, or close().
        Args: end: how the space's engine cuts a block over its ranks; needed for copies between unequal TP or PP.
        Raises: TransferRefused for a number in use, or no rank at all.
        """
        if self._closed:
            raise MoverClosed("the mover is closed")
        if number in self._spaces or not 0 < len(regions) <= MAX_RANKS:
            raise TransferRefused(f"space {number} of {len(regions)} ranks: known already, or impossible")
        if end is not None and end.num_ranks != len(regions):
            raise TransferRefused(f"space {number}: {len(regions)} ranks, its engine has {end.num_ranks}")
        space = self._spaces[number] = Space(number, tuple(regions), end)
        if any(isinstance(region, SlabRegion) for region in regions):
            self._has_gpu = True
        else:
            self._host_spaces.add(number)
        self._mapping.begin(space)

    def is_mapped(self, number: int) -> bool:
        """Whether copies of this space may run."""
        return number in self._spaces and self._spaces[number].mapped is not None

    def is_pinned(self, number: int) -> bool:
        """Whether copy engines have its memory's addresses, or are about to: then no page of it may be punched."""
        return self._pin_host and self._has_gpu and number in self._host_spaces - self.pinning.resting

    def windows(self, number: int) -> list[SlabWindow]:
        """See Mapper.windows; on the background thread."""
        return self._mapper.windows(number)

    def failure(self, number: int) -> ClusterError | None:
        """Why a space cannot be copied from or to for now."""
        return self._spaces[number].failure if number in self._spaces else None

    def remove_space(self, number: int, on_removed: Callable[[], None] | None = None) -> None:
        """No new copies; when those on their way have ended and settled, unmap, then call `on_removed`: at once where
        it was never added."""
        on_removed = on_removed or (lambda: None)
        if (space := self._spaces.get(number)) is None:
            on_removed()
            return
        space.on_removed = on_removed
        self._mapping.give_up(number)
        self._remove_if_unused(space)

    def _tried(self, space: Space) -> None:
        self._pump_soon()
        self._remove_if_unused(space)

    def _remove_if_unused(self, space: Space | None) -> None:
        is_known = space is not None and self._spaces.get(space.number) is space
        if space is None or not is_known or space.on_removed is None or self._closed:
            return
        if space.num_copies or space.is_tried or self._targets.has_held(space.number):
            return
        del self._spaces[space.number]
        self._host_spaces.discard(space.number)
        if space.mapped is None:
            space.on_removed()
        else:
            self._mapping.undo(space.mapped, space.on_removed)

    # -- copies -----------------------------------------------------------------------------------

    def copy(
        self,
        copy_id: int,
        target: int,
        targets: Sequence[int],
        parts: Parts,
        timeout_ms: int,
        on_done: OnDone,
        feed: Feed | None = None,
        *,
        raw: bool = False,
    ) -> None:
        """Copy pages of other spaces into `targets` of space `target`, position by position, on every rank. With a
        `feed` layer by layer; the pages of the spaces are alike then. `raw`: never cut anew between unequal ends.

        `on_done` is called once, not before this returns, and GRACE_S behind the deadline at the latest.
        Raises: MoverBusy, MoverClosed, TransferRefused; then on_done is not called.
        """
        self._check(copy_id, target, targets, parts)
        self._targets.claim(target, targets)
        now_s = time.monotonic()
        copy = Copy(copy_id, target, targets, parts, on_done, now_s, now_s + timeout_ms / 1000, feed, raw=raw)
        self.uses.begin(copy)
        copy.timer = self._loop.call_later(timeout_ms / 1000, self._expire, copy)
        self._copies[copy_id] = copy
        self._waiting.append(copy)
        if not self._pumping:
            self._pump()

    def _check(self, copy_id: int, target: int, targets: Sequence[int], parts: Parts) -> None:
        if self._closed:
            raise MoverClosed("the mover is closed")
        if len(self._copies) >= self._max_copies:
            raise MoverBusy(f"{self._max_copies} copies are on their way")
        if copy_id in self._copies:
            raise TransferRefused(f"copy {copy_id} is on its way already")
        check_shape(targets, parts)
        for number in (target, *(source for source, _ in parts)):
            space = self._spaces.get(number)
            if space is None or space.on_removed is not None:
                raise TransferRefused(f"space {number} is not known to the mover")

    def _pump_soon(self) -> None:
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Start what can start, the oldest first."""
        self._pumping, waiting, self._waiting = False, self._waiting, deque()
        for copy in waiting:
            failure = next((each for n in copy.spaces if (each := self._spaces[n].failure)), None)
            if failure is not None:
                self._loop.call_soon(self._finish, copy, failure)
            elif not all(self._is_ready(number) for number in copy.spaces) or not self._run(copy):
                self._waiting.append(copy)

    def _is_ready(self, number: int) -> bool:
        return self.is_mapped(number) and not self.pinning.is_unlocking(number)

    def _run(self, copy: Copy) -> bool:
        """Whether there was room for it."""
        mapped = self._spaces[copy.target].mapped
        assert mapped is not None
        num_pulls = len(copy.parts) * len(mapped.ranks)
        if self._num_pulls and self._num_pulls + num_pulls > MAX_RUNNING_PULLS:
            return False
        copy.num_pulls, self._num_pulls = num_pulls, self._num_pulls + num_pulls
        job = copy.job = Job(
            self._paths, self._thread, copy.target, copy.targets, copy.parts, copy.deadline_s,
            lambda: self._tell(self._job_ended, copy), copy.feed, raw=copy.raw,
        )  # fmt: skip
        self._jobs.add(job)
        self._thread.post(job.run)
        return True

    def _expire(self, copy: Copy) -> None:
        """The deadline of a copy that waits. One that runs ends by its pulls' own deadlines, or by _overdue()."""
        if copy in self._waiting:
            self._waiting.remove(copy)
            self._finish(copy, TransferTimeout("the deadline passed before the copy could start"))
        elif copy.job is not None:
            copy.timer = self._loop.call_later(GRACE_S, self._overdue, copy)

    def _overdue(self, copy: Copy) -> None:
        """A thread hangs in a call: nobody knows what it writes until it comes back."""
        mapped = self._spaces[copy.target].mapped
        assert mapped is not None
        for rank in range(len(mapped.ranks)):
            self._hold(copy, rank, copy.targets)
        log.error("copy_overdue", copy=copy.copy_id, num_pages=len(copy.targets))
        self._finish(copy, TransferTimeout("the copy did not even fail by its deadline"), copy.targets)

    def _job_ended(self, copy: Copy) -> None:
        assert copy.job is not None
        self._jobs.discard(copy.job)
        book = self._paths.quarantine.held()
        if self._copies.get(copy.copy_id) is not copy:  # overdue, or close() has reported it
            for rank in range(MAX_RANKS):
                region = region_name(copy.target, rank)
                self._region_free(region, [page for page in copy.targets if page not in book.get(region, ())])
            return
        held: set[int] = set()
        for region, pages in copy.job.held:
            _, rank = space_and_rank(region)
            still = book.get(region, frozenset()).intersection(pages)  # some may have settled meanwhile
            self._hold(copy, rank, still)
            held |= still
        self._finish(copy, copy.job.error, held)

    def _hold(self, copy: Copy, rank: int, pages: Iterable[int]) -> None:
        self._targets.hold(copy.target, rank, pages)
        copy.in_doubt.update((rank, page) for page in pages)

    def _finish(self, copy: Copy, error: BaseException | None, quarantined: Iterable[int] = ()) -> None:
        if self._copies.pop(copy.copy_id, None) is None:
            return
        if copy.timer is not None:
            copy.timer.cancel()
        self._num_pulls -= copy.num_pulls
        self._targets.release(copy.target, copy.targets)
        if error is None:
            assert copy.job is not None
            done = self.totals.ok(copy, copy.job.moved)
        else:
            done = self.totals.failed(copy, error, tuple(quarantined))
        self.uses.end(copy)
        if self._waiting:
            self._pump_soon()
        copy.on_done(done)

    def _settled(self, region: str, pages: tuple[int, ...]) -> None:
        again = self._paths.quarantine.held().get(region, frozenset())  # by a later copy
        self._region_free(region, [p for p in pages if p not in again])

    def _region_free(self, region: str, pages: Sequence[int]) -> None:
        """Nothing writes to these pages of one rank any more."""
        number, rank = space_and_rank(region)
        free = self._targets.settle(number, rank, pages)
        self.uses.settle(number, rank, pages)
        self._remove_if_unused(self._spaces.get(number))
        if free:
            log.info("pages_settled", space=number, num_pages=len(free))
            self._on_settled(number, free)

    # -- the rest ---------------------------------------------------------------------------------

    def pair_rates(self) -> dict[tuple[str, str], float]:
        """GB/s between two GPUs, by (source, target) device, of the pairs that were measured."""
        found = dict(self._mapper.pairs.found)  # another thread adds to it
        return {pair: test.gb_per_s for pair, test in found.items()}

    def status(self) -> dict[str, Any]:
        """For /status and metrics."""
        return {
            "spaces": {number: space.state for number, space in self._spaces.items()},
            "copies": len(self._copies),
            "waiting": len(self._waiting),
            "quarantined_pages": self._targets.num_held,
            "pinned_bytes": self._mapper.pinned.num_bytes,
            "huge_bytes": self._mapper.huge_bytes,
            "pairs": {" to ".join(pair): rate for pair, rate in self.pair_rates().items()},
            "reasons": dict(self._paths.reasons),
            **self.totals.status(),
        }

    def close(self, timeout_s: float = 5.0) -> bool:
        """End everything. Every copy that is on its way gets its on_done before this returns.

        Waits up to `timeout_s`. False: something may still write to pages, the mappings stay until the process ends.
        """
        if self._closed:
            return self._is_idle()
        self._closed = True
        self._mapping.close()
        self._mapper.stop()
        self._background.shutdown(wait=False, cancel_futures=True)
        for job in self._jobs:
            job.stop_waiting()
        until_s = time.monotonic() + timeout_s
        while not (idle := self._is_idle()) and time.monotonic() < until_s:
            time.sleep(CLOSE_POLL_S)
        self._thread.close()
        for copy in list(self._copies.values()):
            if copy.job is not None and copy.job.ended:
                self._job_ended(copy)
            else:
                held = () if copy.job is None else copy.targets
                self._finish(copy, MoverClosed("the mempool ends"), held)
        if idle:
            self._background.shutdown(wait=True)  # a mapping under way
            self._paths.close()
            self._mapper.close()
        else:
            log.error("closed_while_copying", num_quarantined=self._targets.num_held)
        return idle

    def _is_idle(self) -> bool:
        """Nothing is being written here, and nothing will be."""
        return all(job.ended for job in self._jobs) and not self._paths.quarantine.held()

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        """From any thread. A loop that has ended needs to hear nothing."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)
