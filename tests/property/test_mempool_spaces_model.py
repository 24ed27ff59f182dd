"""Spaces of one mempool against a small model that keeps the bytes: copies end late, fail, and write on after failing.

Whatever a reader is leased must hold the bytes of the hashes that it asked for, from the answer until it lets go; pages
add up; and when everybody is gone, every page is free or sealed and unpinned.
"""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.mempool.core.actions import CopyPages
from shared.ids import BlockHash, HandoffId, InstanceId
from shared.kv.page import PageState
from shared.kv.words import u32_list
from shared.wire import mempool as wire
from tests.support.examples import examples
from tests.unit.mempool_harness import PAGE_BYTES, Owned, chain, page_lists
from tests.unit.test_mempool_spaces import Spaces

NUM_PAGES = 6
PROMPTS = [chain("a", "b", "c"), chain("a", "b", "d"), chain("x", "y"), chain("a")]
DEVICES = ("cpu:0", "cpu:1", "cpu:2")
GARBAGE = b"garbage"

workers = st.integers(0, 2)
prompts = st.sampled_from(PROMPTS)


class Worker:
    """An engine with its front. `pinned`: sealed pages that it works in, by hash."""

    def __init__(self, number: int, name: str) -> None:
        self.engine, self.front, self.name = number, number + 1, name
        self.pinned: dict[BlockHash, Owned] = {}
        self.leases: dict[str, list[tuple[int, BlockHash]]] = {}
        self.asked: dict[int, list[BlockHash]] = {}


class SpacesModel(RuleBasedStateMachine):
    portion_bytes = 256 << 20  # more than there is

    def __init__(self) -> None:
        super().__init__()
        self.spaces = Spaces(
            NUM_PAGES, kept_share=0.99, pull_patience_ms=100, portion_bytes=self.portion_bytes
        )
        self.number = 10
        self.calls = 0
        self.bytes: dict[tuple[int, int], bytes] = {}
        self.in_doubt: list[tuple[int, list[int]]] = []
        self.workers: dict[int, Worker] = {}

    def space(self, worker: Worker) -> int:
        return self.spaces.core.space_of(InstanceId(worker.name))

    @initialize()
    def begin(self) -> None:
        for slot in range(3):
            self.start(slot)

    def start(self, slot: int) -> None:
        self.number += 1000
        worker = self.workers[slot] = Worker(self.number, f"i{slot}")
        self.spaces.worker(worker.engine, DEVICES[slot], quota=4, instance=worker.name)
        self.spaces.client(worker.front, worker.name)

    # -- engines ----------------------------------------------------------------------------------

    @rule(slot=workers, prompt=prompts, handoff=st.booleans())
    def compute(self, slot: int, prompt: list[BlockHash], handoff: bool) -> None:
        """Write and seal what the engine does not have itself, as far as its pages go."""
        worker = self.workers[slot]
        stock = self.spaces.granted[worker.engine]
        for i, block_hash in enumerate(prompt):
            if block_hash in worker.pinned:
                continue
            if not stock:
                return
            page = stock.pop()
            self.spaces.write(worker.engine, [page])
            self.bytes[self.space(worker), page[0]] = block_hash
            self.spaces.seal(worker.engine, [page], prompt, first=i)
            worker.pinned[block_hash] = page
        if handoff:
            ready = wire.HandoffReady(
                handoff_id=HandoffId(str(prompt[-1])), hashes=b"".join(prompt), ttl_ms=50_000
            )
            self.spaces.say(worker.engine, ready)

    @rule(slot=workers, count=st.integers(1, 4))
    def unpin(self, slot: int, count: int) -> None:
        worker = self.workers[slot]
        for block_hash in list(worker.pinned)[:count]:
            self.spaces.say(worker.engine, wire.Unpin(**page_lists([worker.pinned.pop(block_hash)])))

    @rule(slot=workers, count=st.integers(1, 3))
    def give_back(self, slot: int, count: int) -> None:
        stock = self.spaces.granted[self.workers[slot].engine]
        if stock:
            given, self.spaces.granted[self.workers[slot].engine] = stock[:count], stock[count:]
            self.spaces.give_back(self.workers[slot].engine, given)

    # -- readers ----------------------------------------------------------------------------------

    @rule(slot=workers, prompt=prompts, wait=st.booleans(), kept=st.booleans())
    def acquire(self, slot: int, prompt: list[BlockHash], wait: bool, kept: bool) -> None:
        worker = self.workers[slot]
        self.calls += 1
        worker.asked[self.calls] = prompt
        handoff = HandoffId(str(prompt[-1])) if wait else HandoffId("")
        call = wire.Acquire(
            call_id=self.calls, hashes=b"".join(prompt), handoff_id=handoff, wait_ms=500 if wait else 0,
            until_release=kept,
        )  # fmt: skip
        self.spaces.say(worker.front, call)
        self.collect()

    def collect(self) -> None:
        for worker in self.workers.values():
            for message in self.spaces.sent.pop(worker.front, ()):
                if isinstance(message, wire.Acquired):
                    asked = worker.asked.pop(message.call_id)
                    pages = u32_list(message.pages)
                    assert len(pages) == message.num_blocks <= len(asked)
                    if message.lease_id:
                        worker.leases[message.lease_id] = list(zip(pages, asked, strict=False))

    @rule(slot=workers)
    def release(self, slot: int) -> None:
        worker = self.workers[slot]
        if worker.leases:
            lease_id, _ = worker.leases.popitem()
            self.spaces.say(worker.front, wire.Release(lease_id=lease_id))

    # -- copies -----------------------------------------------------------------------------------

    @precondition(lambda self: self.spaces.copies)
    @rule(pick=st.integers(0, 5), failed=st.booleans(), doubtful=st.integers(0, 3))
    def end_copy(self, pick: int, failed: bool, doubtful: int) -> None:
        copy_id = sorted(self.spaces.copies)[pick % len(self.spaces.copies)]
        copy: CopyPages = self.spaces.copies.pop(copy_id)
        for source, target in zip(copy.sources, copy.targets, strict=True):
            self.bytes[copy.space, target] = GARBAGE if failed else self.bytes[source]
        in_doubt = copy.targets[:doubtful] if failed else []
        if in_doubt:
            self.in_doubt.append((copy.space, in_doubt))
        self.spaces.run(
            self.spaces.core.on_copied(copy_id, self.spaces.now_ms, failed=failed, in_doubt=in_doubt)
        )
        self.collect()

    @precondition(lambda self: self.in_doubt)
    @rule()
    def settle(self) -> None:
        space, pages = self.in_doubt.pop()
        for page in pages:
            self.bytes[space, page] = GARBAGE  # the last moment at which it may write
        self.spaces.run(self.spaces.core.on_settled(space, pages, self.spaces.now_ms))
        self.collect()

    # -- ends -------------------------------------------------------------------------------------

    @rule(slot=workers, dies_first=st.booleans())
    def restart(self, slot: int, dies_first: bool) -> None:
        worker = self.workers[slot]
        events = [lambda: self.spaces.dead(worker.engine), lambda: self.close(worker)]
        for event in events if dies_first else reversed(events):
            event()
        self.start(slot)
        self.collect()

    def close(self, worker: Worker) -> None:
        for connection in (worker.front, worker.engine, 100 + worker.engine):
            self.spaces.closed(connection)

    @rule(by_ms=st.sampled_from([50, 120, 600]))
    def wait(self, by_ms: int) -> None:
        self.spaces.advance(by_ms)
        self.collect()

    # -- what must hold ---------------------------------------------------------------------------

    @invariant()
    def leased_bytes_are_right(self) -> None:
        for worker in self.workers.values():
            space = self.space(worker)
            for pages in worker.leases.values():
                for page, block_hash in pages:
                    assert self.bytes[space, page] == block_hash
                    assert self.spaces.state_in(space, page) is PageState.SEALED
            for block_hash, (page, _) in worker.pinned.items():
                assert self.bytes[space, page] == block_hash

    @invariant()
    def pages_add_up(self) -> None:
        self.spaces.counts()
        for pool in self.spaces.core.pools.values():
            if pool.memory is not None:
                writing = pool.memory.table.by_state()["writing"]
                copied = [c for c in self.spaces.copies.values() if c.space == pool.number]
                assert writing >= sum(len(c.targets) for c in copied)

    def teardown(self) -> None:
        while self.spaces.copies:
            self.end_copy(0, False, 0)
        while self.in_doubt:
            self.settle()
        self.spaces.advance(200_000)
        for worker in self.workers.values():
            self.spaces.dead(worker.engine)
            self.close(worker)
        while self.spaces.copies:  # readers that waited for a handoff until now
            self.end_copy(0, False, 0)
        status = self.spaces.core.status()
        left = {state: count for state, count in status.pages_by_state.items() if count}
        assert set(left) <= {"free", "sealed"}, left
        assert (status.num_pinned, status.num_leases, status.num_handoffs) == (0, 0, 0)
        assert not self.spaces.core.pulls.pulls


SpacesModel.TestCase.settings = settings(
    max_examples=examples(80), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSpaces = SpacesModel.TestCase


class PortionsModel(SpacesModel):
    """Copies for readers go page by page, as pages come."""

    portion_bytes = PAGE_BYTES


PortionsModel.TestCase.settings = SpacesModel.TestCase.settings
TestPortions = PortionsModel.TestCase
