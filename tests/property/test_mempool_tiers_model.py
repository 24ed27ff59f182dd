"""HBM and DRAM tiers: no pinned block is lost, no page has two uses, pages add up, and no byte is wrong.

The model keeps the bytes of every page. Copies end whenever it likes, in any order: well, partly stale, failed, or
with targets that something writes garbage into until they are settled.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.mempool.core.own_pages import OwnPages
from services.mempool.core.page_table import PageTable
from services.mempool.core.radix import Index
from services.mempool.core.tiers import CopyPages, CopyResult, SwapDone, TierLimits, Tiers
from shared.ids import BlockHash, Epoch, PageId, SpaceId
from shared.kv.page import PageState
from tests.property.test_mempool_radix_model import check_tree
from tests.support.examples import examples
from tests.unit.mempool_harness import SEED, chain

FAST, SLOW = SpaceId(1), SpaceId(2)
NUM_FAST, NUM_SLOW = 10, 7
LIMITS = TierLimits(
    begin_free_ratio=0.2, end_free_ratio=0.4, max_pages_per_copy=2, max_pages_in_flight=5, max_tickets=4
)

paths = st.text("ab", min_size=1, max_size=6).map(lambda names: chain(*names))
picks = st.integers(0, 40)
outcomes = st.sampled_from(["well", "well", "well", "stale", "failed", "quarantined"])


class TiersModel(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.fast = OwnPages(FAST, PageTable(NUM_FAST, Epoch(100)), Index())
        self.slow = OwnPages(SLOW, PageTable(NUM_SLOW, Epoch(100)), Index())
        self.tiers = Tiers(self.fast, self.slow, LIMITS)
        self.now_ms = 0
        self.bytes: dict[tuple[int, int], object] = {}
        self.copies: list[CopyPages] = []
        self.open: set[int] = set()
        self.done: dict[int, SwapDone] = {}
        self.asked: dict[int, list[BlockHash]] = {}
        self.pinned: list[tuple[OwnPages, object, int]] = []
        self.epochs: dict[tuple[int, int], int] = {}

    def space(self, number: int) -> OwnPages:
        return self.fast if number == FAST else self.slow

    def perform(self, actions) -> None:
        for action in actions:
            if isinstance(action, CopyPages):
                self.copies.append(action)
                for page, epoch in zip(action.source_pages, action.source_epochs, strict=True):
                    assert self.space(action.source).is_current(page, epoch)
                for page in action.target_pages:
                    assert self.space(action.target).table.states[page] == PageState.WRITING
            else:
                assert isinstance(action, SwapDone)
                self.done[action.ticket] = action
        for ticket in self.open & self.done.keys():
            self.open.remove(ticket)
            self.finish(ticket)

    def finish(self, ticket: int) -> None:
        """Of a swap in: each block that was asked is there and pinned, or is not said to be."""
        done = self.done.pop(ticket)
        if ticket in self.asked:
            for name, entry in zip(self.asked.pop(ticket), done.entries, strict=True):
                assert entry is None or entry.block_hash == name
                if entry is not None:
                    assert self.fast.index.get(name) is entry
                    self.fast.index.unpin([entry])

    @rule(path=paths, waits=st.booleans())
    def compute(self, path, waits):
        """An engine seals the blocks of a prompt that are not there yet, as far as there are pages."""
        at = len(self.fast.index.prefix(path))
        for i in range(at, len(path)):
            if path[i] in self.fast.index:
                continue
            is_free = bool(self.fast.num_free)
            if not is_free:  # who waits prefers a copy to an eviction
                is_free = self.tiers.leave(len(path) - i, self.now_ms) if waits else self.tiers.make_room()
            if not is_free:
                break
            (page,), _ = self.fast.take(1)
            self.bytes[FAST, page] = path[i]
            new = self.fast.index.insert_path(path[i - 1] if i else SEED, [path[i]], [page], 4)
            self.fast.seal(new)
        self.perform(self.tiers.tick(self.now_ms))

    @rule(path=paths)
    def match(self, path):
        for entry in self.fast.index.prefix(path):
            assert self.bytes[FAST, entry.page] == entry.block_hash

    @rule(path=paths, slow=st.booleans())
    def pin(self, path, slow):
        space = self.slow if slow else self.fast
        for entry in space.index.prefix(path):
            space.index.pin([entry])
            self.pinned.append((space, entry, space.table.epochs[entry.page]))

    @rule(chosen=st.lists(picks, max_size=4))
    def unpin(self, chosen):
        for i in chosen:
            if self.pinned:
                space, entry, _ = self.pinned.pop(i % len(self.pinned))
                space.index.unpin([entry])
        self.perform(self.tiers.tick(self.now_ms))

    @rule(count=st.integers(0, 8))
    def swap_out(self, count):
        if len(self.open) < LIMITS.max_tickets:
            ticket, actions = self.tiers.swap_out(count, self.now_ms)
            self.open.add(ticket)
            self.perform(actions)

    @rule(chosen=st.lists(picks, min_size=1, max_size=6))
    def swap_in(self, chosen):
        there = sorted(self.slow.index.entries(), key=lambda entry: entry.page)
        if there and len(self.open) < LIMITS.max_tickets:
            entries = list({id(e): e for e in (there[i % len(there)] for i in chosen)}.values())
            ticket, actions = self.tiers.swap_in(entries, self.now_ms)
            self.open.add(ticket)
            self.asked[ticket] = [entry.block_hash for entry in entries]
            self.perform(actions)

    @rule(which=picks, outcome=outcomes, part=st.sets(st.integers(0, 1)))
    def end_any_copy(self, which, outcome, part):
        self.end_a_copy(which, outcome, part)

    def end_a_copy(self, which, outcome, part):
        if not self.copies:
            return
        copy = self.copies.pop(which % len(self.copies))
        for i, (source, target) in enumerate(zip(copy.source_pages, copy.target_pages, strict=True)):
            good = outcome == "well" or (outcome == "stale" and i not in part)
            self.bytes[copy.target, target] = self.bytes[copy.source, source] if good else "garbage"
        result = CopyResult()
        if outcome == "stale":
            result = CopyResult(stale=tuple(i for i in part if i < len(copy.target_pages)))
        elif outcome == "failed":
            result = CopyResult(failed=True)
        elif outcome == "quarantined":
            result = CopyResult(failed=True, quarantined=tuple(copy.target_pages[:1]))
        self.perform(self.tiers.on_copied(copy.copy_id, result, self.now_ms))

    @rule()
    def the_oldest_copies_end_well(self):
        for _ in range(len(self.copies)):
            self.end_a_copy(0, "well", set())

    @rule(space=st.sampled_from([FAST, SLOW]))
    def settle(self, space):
        pages = [*self.tiers.quarantined[space], PageId(0)]
        self.perform(self.tiers.on_settled(space, pages, self.now_ms))

    @rule(elapsed_ms=st.sampled_from([1, 60, 1500]))
    def time_passes(self, elapsed_ms):
        self.now_ms += elapsed_ms
        self.perform(self.tiers.tick(self.now_ms))

    @rule()
    def a_lost_writer_writes(self):
        for space, pages in self.tiers.quarantined.items():
            for page in pages:
                self.bytes[space, page] = "garbage"

    @invariant()
    def every_page_has_one_use(self):
        for space in (self.fast, self.slow):
            check_tree(space.index)
            by_state = space.table.by_state()
            assert sum(by_state.values()) == space.num_pages
            indexed = [entry.page for entry in space.index.entries()]
            targets = [p for copy in self.copies if copy.target == space.space for p in copy.target_pages]
            lost = self.tiers.quarantined[space.space]
            used = [*indexed, *targets, *lost]
            assert len(set(used)) == len(used)
            assert {p for p in range(space.num_pages) if space.table.states[p] == PageState.SEALED} == set(
                indexed
            )
            assert by_state["writing"] == len(targets) + len(lost)
            assert by_state["free"] == space.num_pages - len(used)
            for page in range(space.num_pages):
                assert space.table.epochs[page] >= self.epochs.get((space.space, page), 0)
                self.epochs[space.space, page] = space.table.epochs[page]

    @invariant()
    def bytes_are_what_their_names_say(self):
        for space in (self.fast, self.slow):
            for entry in space.index.entries():
                assert self.bytes[space.space, entry.page] == entry.block_hash

    @invariant()
    def what_is_pinned_stays(self):
        for space, entry, epoch in self.pinned:
            assert space.index.get(entry.block_hash) is entry
            assert space.is_current(entry.page, epoch)

    @invariant()
    def nobody_waits_for_nothing(self):
        in_flight = sum(len(copy.source_pages) for copy in self.copies)
        assert in_flight <= LIMITS.max_pages_in_flight
        assert self.copies or not self.open

    def teardown(self):
        """Everything ends: no pin, no page in flight is left behind."""
        for _ in range(200):
            if not self.copies:
                break
            copy = self.copies.pop()
            for source, target in zip(copy.source_pages, copy.target_pages, strict=True):
                self.bytes[copy.target, target] = self.bytes[copy.source, source]
            self.perform(self.tiers.on_copied(copy.copy_id, CopyResult(), self.now_ms))
        for space, entry, _ in self.pinned:
            space.index.unpin([entry])
        self.pinned = []
        assert not self.copies
        assert not self.open
        for space in (self.fast, self.slow):
            assert space.index.num_pinned == 0
            while space.evict() is not None:
                pass
            free = space.num_pages - len(self.tiers.quarantined[space.space])
            assert space.num_free == free
            assert space.index.num_branches == 0


TiersModel.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)
TestTiersModel = TiersModel.TestCase
