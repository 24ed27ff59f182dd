"""Parked requests' blocks leave and come back among the loans of test_mempool_lending_model.py: right bytes, or none.

An engine swaps blocks out that it has, unpins what it was told is kept, gives pages for what is to come back, drops
swaps and dies, at any moment: while copies end late, fail, and write on after failing, while lent pages are reclaimed.
"""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, precondition, rule

from shared.ids import BlockHash
from shared.kv.page import PageState
from shared.kv.words import u32_list, u64_list
from shared.wire import mempool as wire
from shared.wire.mempool_swap import NO_PAGE, SwapDrop, SwapIn, SwapOut, SwappedIn, SwappedOut
from tests.property.test_mempool_lending_model import LendingModel, own_prompt
from tests.property.test_mempool_spaces_model import Worker, workers
from tests.unit.mempool_harness import Owned, page_lists


class Parked:
    """One swap as its engine sees it. `away`: kept elsewhere, and unpinned here."""

    def __init__(self, hashes: list[BlockHash]) -> None:
        self.hashes = hashes
        self.away: list[BlockHash] = []
        self.is_answered = False
        self.coming: list[BlockHash] = []


class SwapModel(LendingModel):
    def __init__(self) -> None:
        super().__init__()
        self.swaps: dict[int, dict[int, Parked]] = {}  # by connection of the engine
        self.doubles: dict[int, list[tuple[BlockHash, Owned]]] = {}  # pages of blocks that it has twice
        self.swap_number = 0

    def parked(self, worker: Worker) -> dict[int, Parked]:
        return self.swaps.setdefault(worker.engine, {})

    # -- what engines say -------------------------------------------------------------------------

    @rule(slot=workers, count=st.integers(1, 4))
    def swap_out(self, slot: int, count: int) -> None:
        worker = self.workers[slot]
        hashes = list(worker.pinned)[:count]
        self.swap_number += 1
        self.parked(worker)[self.swap_number] = Parked(hashes)
        self.spaces.say(worker.engine, SwapOut(swap=self.swap_number, hashes=b"".join(hashes)))
        self.hear()

    @rule(slot=workers, name=st.integers(1, 3), done=st.booleans())
    def leave(self, slot: int, name: int, done: bool) -> None:
        """A prompt of its own is computed and parked; perhaps it is gone before anything else happens."""
        self.compute(slot, own_prompt(slot, name), handoff=False)
        self.swap_out(slot, 4)
        if done and self.spaces.copies:
            self.all_copies_end_well()

    @rule(slot=workers, to=st.integers(1, 2), count=st.integers(1, 3), name=st.integers(1, 3))
    def leave_for_lent_pages(self, slot: int, to: int, count: int, name: int) -> None:
        self.lend_what_is_idle(slot, to, count, 0)
        self.leave((slot + to) % 3, name, True)

    @precondition(lambda self: any(p.away for parked in self.swaps.values() for p in parked.values()))
    @rule(pick=st.integers(0, 3), short=st.sampled_from([0, 0, 0, 1]), ends=st.booleans())
    def come_back(self, pick: int, short: int, ends: bool) -> None:
        for slot in range(3):
            self.swap_in(slot, pick, short)
        if ends and self.spaces.copies:
            self.all_copies_end_well()

    @rule(slot=workers, pick=st.integers(0, 3), short=st.integers(0, 1))
    def swap_in(self, slot: int, pick: int, short: int) -> None:
        """Sometimes with fewer pages than blocks."""
        worker = self.workers[slot]
        ready = [n for n, p in self.parked(worker).items() if p.away and not p.coming]
        if not ready:
            return
        number = ready[pick % len(ready)]
        parked = self.parked(worker)[number]
        stock = self.spaces.granted[worker.engine]
        given = [stock.pop() for _ in range(min(len(stock), len(parked.away) - short))]
        parked.coming, parked.away = parked.away, []
        call = SwapIn(swap=number, hashes=b"".join(parked.coming), **page_lists(given))
        self.spaces.say(worker.engine, call)
        self.hear()

    @rule(slot=workers, pick=st.integers(0, 3))
    def swap_drop(self, slot: int, pick: int) -> None:
        worker = self.workers[slot]
        if numbers := list(self.parked(worker)):
            number = numbers[pick % len(numbers)]
            self.spaces.say(worker.engine, SwapDrop(swap=number))
            self.parked(worker)[number].away.clear()
            self.hear()

    @rule(slot=workers)
    def unpin_doubles(self, slot: int) -> None:
        worker = self.workers[slot]
        for _, page in self.doubles.pop(worker.engine, []):
            self.spaces.say(worker.engine, wire.Unpin(**page_lists([page])))

    # -- what they hear ---------------------------------------------------------------------------

    def collect(self) -> None:
        super().collect()
        self.hear()

    def hear(self) -> None:
        for worker in self.workers.values():
            said, self.spaces.sent[worker.engine] = self.spaces.sent[worker.engine], []
            for message in said:
                if isinstance(message, SwappedOut):
                    self.on_swapped_out(worker, message)
                elif isinstance(message, SwappedIn):
                    self.on_swapped_in(worker, message)

    def on_swapped_out(self, worker: Worker, message: SwappedOut) -> None:
        parked = self.parked(worker)[message.swap]
        assert not parked.is_answered, "answered twice"
        parked.is_answered = True
        for block_hash, is_kept in zip(parked.hashes, message.kept, strict=True):
            if is_kept and block_hash in worker.pinned:
                self.spaces.say(worker.engine, wire.Unpin(**page_lists([worker.pinned.pop(block_hash)])))
                parked.away.append(block_hash)

    def on_swapped_in(self, worker: Worker, message: SwappedIn) -> None:
        parked = self.parked(worker).pop(message.swap)
        pages = zip(u32_list(message.pages), u64_list(message.epochs), strict=True)
        for block_hash, page in zip(parked.coming, pages, strict=True):
            if page[0] == NO_PAGE:
                continue
            if block_hash in worker.pinned:
                self.doubles.setdefault(worker.engine, []).append((block_hash, page))
            else:
                worker.pinned[block_hash] = page

    # -- what must hold ---------------------------------------------------------------------------

    @invariant()
    def what_came_back_is_right_and_sealed(self) -> None:
        for worker in self.workers.values():
            space = self.space(worker)
            found = [*worker.pinned.items(), *self.doubles.get(worker.engine, [])]
            for block_hash, (page, epoch) in found:
                assert self.bytes[space, page] == block_hash
                assert self.spaces.words_of[space, page] == epoch << 8 | PageState.SEALED
            pages = [page for _, (page, _) in found] + [
                page for page, _ in self.spaces.granted[worker.engine]
            ]
            assert len(set(pages)) == len(pages), "a page has two uses"

    @invariant()
    def what_is_away_is_kept_or_on_its_way(self) -> None:
        core = self.spaces.core
        for worker in self.workers.values():
            for number, parked in self.parked(worker).items():
                swap = core.swaps._swaps.get((worker.engine, number))
                for block_hash in parked.away:
                    assert swap is not None
                    assert block_hash in swap.kept or block_hash in swap.adrift
                    if block_hash in swap.kept:
                        place, entry = swap.kept[block_hash]
                        assert place.index.get(block_hash) is entry
                        assert entry.pins > 0

    def teardown(self) -> None:
        super().teardown()
        swaps = self.spaces.core.swaps
        assert (swaps.num_kept, swaps._jobs, swaps._copies) == (0, [], {})
        assert not +swaps._in_flight


SwapModel.TestCase.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSwaps = SwapModel.TestCase
