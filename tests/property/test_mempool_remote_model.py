"""Two mempools and a bad network against a model that keeps the bytes: late and lost messages, early ends of pins.

The source may lose a reader's pins at any time and use the pages anew, also while they are copied. What the reader's
side indexes must hold the bytes of its hash; readers are answered in their time; in the end every page has come back.
"""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.ids import BlockHash, HandoffId
from shared.kv.page import PageState
from shared.kv.words import u32_list
from shared.wire import mempool as wire
from shared.wire import mempool_peer as peer
from tests.support.examples import examples
from tests.unit.mempool_harness import SEED, Owned, chain, page_lists
from tests.unit.test_mempool_remote import A_HOST, DECODE, FRONT, PREFILL, TwoMempools
from tests.unit.test_mempool_spaces import answers

PROMPTS = [chain("a", "b", "c"), chain("a", "b", "d"), chain("x", "y"), chain("a")]
GARBAGE = b"garbage"
WAIT_MS = 500

prompts = st.sampled_from(PROMPTS)


class RemoteModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.two = TwoMempools(pages_there=4, pull_patience_ms=100)
        self.a, self.b = self.two.a, self.two.b
        self.pinned: dict[BlockHash, Owned] = {}  # at the source, by its engine
        self.asked: dict[int, tuple[list[BlockHash], int]] = {}  # call -> hashes, when it must be answered
        self.leases: list[str] = []
        self.calls = 0
        self.link = 1
        self.up = True
        self.in_doubt: list[list[int]] = []
        self.torn: dict[int, list[bytes]] = {}  # pull -> what it has read so far
        self.a.client(50)
        for (
            prompt
        ) in PROMPTS:  # of an engine here: what other hosts complete behind it comes back (returns.py)
            self.b.core.returns._handed[handoff(prompt)] = 0, SEED

    # -- the source ---------------------------------------------------------------------------------

    @rule(prompt=prompts, keep=st.booleans())
    def compute(self, prompt: list[BlockHash], keep: bool) -> None:
        stock = self.a.granted[PREFILL]
        for i, block_hash in enumerate(prompt):
            if block_hash in self.a.core.pools[0].index:
                continue
            if not stock:
                self.a.need(PREFILL, 1)
                return
            page = stock.pop(0)
            self.a.write(PREFILL, [page])
            self.a.bytes[0, page[0]] = block_hash
            self.a.seal(PREFILL, [page], prompt, first=i)
            self.pinned[block_hash] = page
        ready = wire.HandoffReady(handoff_id=handoff(prompt), hashes=b"".join(prompt), ttl_ms=1_000)
        self.a.say(PREFILL, ready)
        if not keep:
            self.forget()

    @rule()
    def forget(self) -> None:
        """The engine is done with its blocks, and wants pages again."""
        if self.pinned:
            self.a.say(PREFILL, wire.Unpin(**page_lists(list(self.pinned.values()))))
        self.pinned = {}
        self.a.need(PREFILL, 3)

    @rule()
    def evict(self) -> None:
        self.a.say(50, wire.Delete(call_id=1))

    @rule(prompt=prompts)
    def pins_end_and_pages_are_used_anew(self, prompt: list[BlockHash]) -> None:
        self.time_passes_there(31_000)
        self.forget()
        self.evict()
        self.compute(prompt, True)

    @rule(ms=st.sampled_from([1, 300, 2_000, 31_000]))
    def time_passes_there(self, ms: int) -> None:
        """31 s: leases of the peer have ended, whatever it does with them."""
        self.a.advance(ms)

    # -- the reader ---------------------------------------------------------------------------------

    @rule(prompt=prompts, wait=st.booleans())
    def acquire(self, prompt: list[BlockHash], wait: bool) -> None:
        self.calls += 1
        wait_ms = WAIT_MS if wait else 0
        self.asked[self.calls] = prompt, self.b.now_ms + max(wait_ms, 100)
        self.two.acquire(prompt, self.calls, handoff_id=handoff(prompt), wait_ms=wait_ms)

    @rule(prompt=prompts, kept=st.integers(0, 2))
    def told_of_blocks(self, prompt: list[BlockHash], kept: int) -> None:
        """Another host says that it has the blocks behind the first ones, which it may have or not."""
        kept = min(kept, len(prompt) - 1)
        message = peer.BlocksCompleted(
            handoff_id=handoff(prompt), address=A_HOST, parent=[SEED, *prompt][kept], hashes=b"".join(prompt[kept:])
        )  # fmt: skip
        self.b.run(self.b.core.on_peer_call(99, message, self.b.now_ms))

    @rule()
    def release(self) -> None:
        if self.leases:
            self.b.say(FRONT, wire.Release(lease_id=self.leases.pop()))

    @rule()
    def evict_here(self) -> None:
        self.b.say(FRONT, wire.Delete(call_id=1))

    @rule(ms=st.sampled_from([1, 50, 200, 2_000]))
    def time_passes_here(self, ms: int) -> None:
        self.b.advance(ms)

    @rule(count=st.integers(1, 4))
    def engine_here_gives_back(self, count: int) -> None:
        stock = self.b.granted[DECODE]
        if stock:
            given, self.b.granted[DECODE] = stock[:count], stock[count:]
            self.b.give_back(DECODE, given)

    # -- the network --------------------------------------------------------------------------------

    @rule(prompt=prompts, finished=st.booleans(), forget=st.booleans())
    def a_handoff(self, prompt: list[BlockHash], finished: bool, forget: bool) -> None:
        """The usual order, so that what follows finds copies under way and blocks that came."""
        if not self.up:
            self.link_comes_back()
        self.compute(prompt, not forget)
        self.acquire(prompt, True)
        self.deliver(6)
        if finished and self.b.remote_pulls:
            self.pull_ends(-1, False, 0)
            self.deliver(6)

    @rule(prompt=prompts, finished=st.booleans(), forget=st.booleans())
    def blocks_go_back(self, prompt: list[BlockHash], finished: bool, forget: bool) -> None:
        """The usual order of what nobody waits for."""
        if not self.up:
            self.link_comes_back()
        self.compute(prompt, not forget)
        self.told_of_blocks(prompt, 0)
        self.deliver(6)
        if finished and self.b.remote_pulls:
            self.pull_ends(-1, False, 0)
            self.deliver(6)

    @rule(prompt=prompts, other=prompts, first=st.integers(0, 3), back=st.booleans())
    def pages_are_used_anew_under_a_copy(
        self, prompt: list[BlockHash], other: list[BlockHash], first: int, back: bool
    ) -> None:
        self.release()
        self.evict_here()
        if back:
            self.blocks_go_back(prompt, False, True)
        else:
            self.a_handoff(prompt, False, True)
        if self.b.remote_pulls:
            if first:
                self.some_bytes_travel(-1, first)
            self.pins_end_and_pages_are_used_anew(other)
            self.pull_ends(-1, False, 0)
            self.deliver(6)

    @rule(most=st.integers(1, 6))
    def deliver(self, most: int) -> None:
        for _ in range(most):
            if self.b.asked:
                self.deliver_there()
            if self.a.told:
                self.deliver_here()

    def deliver_there(self) -> None:
        message = self.b.asked.pop(0).message
        if self.up:
            self.a.run(self.a.core.on_peer_call(self.link, message, self.a.now_ms))
        elif isinstance(message, peer.RemoteAcquire | peer.CheckEpochs):
            self.b.run(self.b.core.on_peer_lost(A_HOST, self.b.now_ms))

    def deliver_here(self) -> None:
        told = self.a.told.pop(0)
        if self.up and told.link == self.link:
            self.b.run(self.b.core.on_peer_answer(A_HOST, told.message, self.b.now_ms))

    @rule(source_notices=st.booleans())
    def link_breaks(self, source_notices: bool) -> None:
        self.up = False
        self.a.told.clear()
        self.b.asked.clear()
        self.b.run(self.b.core.on_peer_lost(A_HOST, self.b.now_ms))
        if source_notices:
            self.a.run(self.a.core.on_peer_gone(self.link, self.a.now_ms))

    @precondition(lambda self: not self.up)
    @rule()
    def link_comes_back(self) -> None:
        self.a.run(self.a.core.on_peer_gone(self.link, self.a.now_ms))
        self.a.told.clear()
        self.b.asked.clear()
        self.link += 1
        self.up = True

    @precondition(lambda self: self.b.remote_pulls)
    @rule(pick=st.integers(0, 5), count=st.integers(1, 3))
    def some_bytes_travel(self, pick: int, count: int) -> None:
        """Whatever the source's pages hold at this moment."""
        pull = self.b.remote_pulls[pick % len(self.b.remote_pulls)]
        done = self.torn.setdefault(pull.number, [])
        for source in pull.sources[len(done) : len(done) + count]:
            done.append(self.a.bytes.get((pull.source_space, source), GARBAGE))

    @precondition(lambda self: self.b.remote_pulls)
    @rule(pick=st.integers(0, 5), failed=st.booleans(), doubtful=st.integers(0, 3))
    def pull_ends(self, pick: int, failed: bool, doubtful: int) -> None:
        pull = self.b.remote_pulls.pop(pick % len(self.b.remote_pulls))
        done = self.torn.pop(pull.number, [])
        for source in pull.sources[len(done) :]:
            done.append(self.a.bytes.get((pull.source_space, source), GARBAGE))
        for target, content in zip(pull.targets, done, strict=True):
            self.b.bytes[pull.space, target] = GARBAGE if failed else content
        doubt = pull.targets[:doubtful] if failed else []
        if doubt:
            self.in_doubt.append(doubt)
        self.b.run(self.b.core.on_remote_pulled(pull.number, self.b.now_ms, failed=failed, in_doubt=doubt))

    @precondition(lambda self: self.in_doubt)
    @rule()
    def settle(self) -> None:
        pages = self.in_doubt.pop()
        for page in pages:
            self.b.bytes[0, page] = GARBAGE  # its last write comes just before
        self.b.run(self.b.core.on_settled(0, pages, self.b.now_ms))

    # -- what must hold -----------------------------------------------------------------------------

    @invariant()
    def what_is_indexed_is_right(self) -> None:
        pool = self.b.core.pools[0]
        for prompt in PROMPTS:
            for entry in pool.index.prefix(prompt):
                assert self.b.bytes[0, entry.page] == entry.block_hash
                assert self.b.state_in(0, entry.page) is PageState.SEALED

    @invariant()
    def readers_are_answered_in_time_with_what_they_asked_for(self) -> None:
        for got in answers(self.b, FRONT, wire.Acquired):
            hashes, _ = self.asked.pop(got.call_id)
            contents = [self.b.bytes[0, page] for page in u32_list(got.pages)]
            assert contents == hashes[: got.num_blocks]
            if got.lease_id:
                self.leases.append(got.lease_id)
        self.b.sent[FRONT].clear()
        assert all(self.b.now_ms < until_ms for _, until_ms in self.asked.values()), "held beyond its time"

    @invariant()
    def pages_add_up(self) -> None:
        self.a.counts()
        self.b.counts()

    def teardown(self) -> None:
        """The network ends, then everybody lets go: nothing is left."""
        self.link_breaks(True)
        while self.b.remote_pulls:
            self.pull_ends(0, True, 3)
        while self.in_doubt:
            self.settle()
        self.a.advance(200_000)
        self.b.advance(200_000)
        self.b.advance(200_000)  # what was leased with the last answers
        self.b.asked.clear()
        self.readers_are_answered_in_time_with_what_they_asked_for()
        assert not self.asked
        self.two.assert_at_rest()
        assert self.b.core.status().num_leases == 0
        assert self.b.core.status().num_pinned == 0
        assert not self.a.core.serve._readable


def handoff(prompt: list[BlockHash]) -> HandoffId:
    return HandoffId(prompt[-1].hex()[:8])


RemoteModel.TestCase.settings = settings(
    max_examples=examples(80), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRemoteModel = RemoteModel.TestCase
