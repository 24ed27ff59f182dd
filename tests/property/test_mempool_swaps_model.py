"""Parked requests' blocks leave and come back among the loans of test_mempool_lending_model.py: right bytes, or none.

An engine swaps blocks out that it has, unpins what it was told is kept, gives pages for what is to come back, drops
swaps and dies, at any moment: while copies end late, fail, and write on after failing, while lent pages are reclaimed.
"""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, precondition, rule

from shared.fair.away import Absences, Block, SwapState
from shared.ids import BlockHash
from shared.kv.page import PageState
from shared.kv.words import u32_list, u64_list
from shared.wire import mempool as wire
from shared.wire.mempool_swap import NO_PAGE, SwapDrop, SwapIn, SwapOut, SwappedIn, SwappedOut
from tests.property.test_mempool_lending_model import LendingModel, own_prompt
from tests.property.test_mempool_spaces_model import Worker, workers
from tests.support.examples import examples
from tests.unit.mempool_harness import SEED, Owned, page_lists


class SwapModel(LendingModel):
    def __init__(self) -> None:
        super().__init__()
        self.books: dict[int, Absences] = {}  # what each engine knows, by its connection
        self.doubles: dict[int, list[tuple[BlockHash, Owned]]] = {}  # pages of blocks that it has twice
        self.request_number = 0

    def book(self, worker: Worker) -> Absences:
        return self.books.setdefault(worker.engine, Absences())

    # -- what engines say -------------------------------------------------------------------------

    @rule(slot=workers, count=st.integers(1, 4))
    def swap_out(self, slot: int, count: int) -> None:
        """A request with some of the engine's blocks is parked."""
        worker = self.workers[slot]
        blocks = {i: Block(h, SEED) for i, h in enumerate(list(worker.pinned)[:count])}
        self.request_number += 1
        swap = self.book(worker).leave(f"r{self.request_number}", blocks, 0.0)
        self.spaces.say(worker.engine, SwapOut(swap=swap.number, hashes=b"".join(swap.hashes())))
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

    @precondition(
        lambda self: any(book.may_come(s.request_id) for book in self.books.values() for s in book.all())
    )
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
        book = self.book(worker)
        away = [swap.request_id for swap in book.all() if book.may_come(swap.request_id)]
        if not away:
            return
        swap = book.come(away[pick % len(away)], 0.0)
        stock = self.spaces.granted[worker.engine]
        given = [stock.pop() for _ in range(min(len(stock), len(swap.blocks) - short))]
        self.spaces.say(
            worker.engine, SwapIn(swap=swap.number, hashes=b"".join(swap.hashes()), **page_lists(given))
        )
        self.hear()

    @rule(slot=workers, pick=st.integers(0, 3))
    def forget(self, slot: int, pick: int) -> None:
        """A request that is not wholly here is aborted, or goes on with what was leaving."""
        worker = self.workers[slot]
        if swaps := self.book(worker).all():
            number = self.book(worker).forget(swaps[pick % len(swaps)].request_id)
            self.spaces.say(worker.engine, SwapDrop(swap=number))
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
        book = self.book(worker)
        swap, positions = book.left(message.swap, message.kept)
        assert swap is not None, "answered twice"
        if swap.is_forgotten:
            return
        stay = [p for p in positions if swap.blocks[p].block_hash not in worker.pinned]
        for position in set(positions) - set(stay):
            page = worker.pinned.pop(swap.blocks[position].block_hash)
            self.spaces.say(worker.engine, wire.Unpin(**page_lists([page])))
        book.stays(swap, stay)

    def on_swapped_in(self, worker: Worker, message: SwappedIn) -> None:
        swap = self.book(worker).came(message.swap)
        assert swap is not None, "answered twice"
        pages = zip(u32_list(message.pages), u64_list(message.epochs), strict=True)
        for block, page in zip(swap.blocks.values(), pages, strict=True):
            if page[0] == NO_PAGE:
                continue
            if block.block_hash in worker.pinned or swap.is_forgotten:
                self.doubles.setdefault(worker.engine, []).append((block.block_hash, page))
            else:
                worker.pinned[block.block_hash] = page

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
            for swap in self.book(worker).all():
                if swap.state is not SwapState.AWAY:
                    continue
                theirs = core.swaps._swaps.get((worker.engine, swap.number))
                assert theirs is not None
                for block_hash in swap.hashes():
                    assert block_hash in theirs.kept or block_hash in theirs.adrift
                    if block_hash in theirs.kept:
                        place, entry = theirs.kept[block_hash]
                        assert place.index.get(block_hash) is entry
                        assert entry.pins > 0

    @invariant()
    def every_call_is_answered_once_nothing_is_on_its_way(self) -> None:
        if self.spaces.copies or self.in_doubt:
            return
        for worker in self.workers.values():
            assert not self.book(worker).is_waiting

    def teardown(self) -> None:
        super().teardown()
        swaps = self.spaces.core.swaps
        assert (swaps.num_kept, swaps._jobs, swaps._copies) == (0, [], {})
        assert not +swaps._in_flight


SwapModel.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSwaps = SwapModel.TestCase
