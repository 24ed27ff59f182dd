"""PD-Caching-3 between two hosts: what decode completes is in the memory of the prompt's host before anybody asks."""

import msgspec
import pytest

from services.mempool.core import returns
from shared.kv.page import PageState
from shared.kv.words import u32_bytes
from shared.wire import mempool as wire
from shared.wire import mempool_peer as peer
from tests.unit.mempool_harness import BLOCK_TOKENS, SEED, Owned, chain, page_lists
from tests.unit.test_mempool_remote import (
    A_HOST,
    ABC,
    B_HOST,
    DECODE,
    FRONT,
    HANDOFF,
    LINK,
    PREFILL,
    Host,
    TwoMempools,
)
from tests.unit.test_mempool_remote_gpus import DRAM, GPU, GpuHosts
from tests.unit.test_mempool_spaces import acquire, answers

MORE = chain("a", "b", "c", "d", "e")
PREFILL_FRONT = 9


class BothWays(TwoMempools):
    """Messages and bytes go in both directions: a (prefill) reads of b (decode) too."""

    def __init__(
        self, pages_there: int = 32, decode_quota: int = 4, prefill_quota: int = 4, **limits: object
    ) -> None:
        self.a, self.b = Host(A_HOST, pages_there, **limits), Host(B_HOST, 2 * decode_quota, **limits)
        self.a.worker(PREFILL, "cpu", quota=prefill_quota)
        self.b.worker(DECODE, "cpu", quota=decode_quota)
        self.clients()

    def clients(self) -> None:
        self.b.client(FRONT, f"i{DECODE}")
        self.a.client(PREFILL_FRONT, f"i{PREFILL}")

    def deliver(self) -> list[object]:
        said: list[object] = []
        while self.a.asked or self.b.asked or self.a.told or self.b.told:
            for here, there, address in ((self.a, self.b, B_HOST), (self.b, self.a, A_HOST)):
                said += self.say(here, there, address)
        return said

    def say(self, here: Host, there: Host, address: str) -> list[object]:
        asked, here.asked = here.asked, []
        for ask in asked:
            assert ask.address == address
            there.run(there.core.on_peer_call(LINK, ask.message, there.now_ms))
        told, there.told = there.told, []
        for tell in told:
            here.run(here.core.on_peer_answer(address, tell.message, here.now_ms))
        return [each.message for each in (*asked, *told)]

    def copy(self, **how: object) -> None:
        for here, there in ((self.a, self.b), (self.b, self.a)):
            pulls, here.remote_pulls = here.remote_pulls, []
            for pull in pulls:
                for source, target in zip(pull.sources, pull.targets, strict=True):
                    here.bytes[pull.space, target] = there.bytes.get((pull.source_space, source), "")
                here.run(here.core.on_remote_pulled(pull.number, here.now_ms, **how))

    def hand_over(self, prompt: list = ABC, names: str = "abc") -> None:
        """Decode has the prompt's blocks."""
        self.hand_off(prompt, names)
        self.acquire(prompt, traceparent="trace-1")
        self.everything_arrives()
        assert self.got()[0].num_blocks == len(prompt)

    def everything_arrives(self) -> None:
        for _ in range(3):
            self.deliver()
            for host in (self.a, self.b):
                host.copied()
            self.copy()
        self.deliver()

    def decode_seals(self, hashes: list, first: int, names: str, space: int = 0) -> list[Owned]:
        pages = self.b.take(DECODE, len(names))
        self.b.write(DECODE, pages)
        self.b.seal(DECODE, pages, hashes, first)
        self.b.bytes.update({(space, page): name for (page, _), name in zip(pages, names, strict=True)})
        return pages

    def gathered(self) -> None:
        self.b.advance(returns.GATHER_MS)

    def bytes_there(self, hashes: list = MORE, space: int = 0) -> str:
        return "".join(self.a.bytes[space, e.page] for e in self.a.core.pools[space].index.prefix(hashes))


def handed_over(**options: object) -> BothWays:
    two = BothWays(**options)
    two.hand_over()
    return two


def told(two: BothWays, **fields: object) -> peer.BlocksCompleted:
    """What decode's mempool says of d and e, which lie there."""
    two.decode_seals(MORE, 3, "de")
    two.gathered()
    (ask,), two.b.asked = two.b.asked, []
    assert isinstance(ask.message, peer.BlocksCompleted)
    return msgspec.structs.replace(ask.message, **fields)


def test_what_decode_completes_is_gathered_and_comes_back_without_a_reader():
    two = handed_over()
    two.decode_seals(MORE, 3, "d")
    two.b.advance(returns.GATHER_MS - 1)
    two.decode_seals(MORE, 4, "e")
    assert not two.b.asked
    assert two.b.core.next_deadline_ms() <= two.b.now_ms + 1
    two.b.advance(1)
    assert [len(ask.message.hashes) // 32 for ask in two.b.asked] == [2], "one message"
    two.everything_arrives()
    assert two.bytes_there() == "abcde"
    assert two.a.core.counters["blocks_pushed_back"] == two.b.core.counters["push_backs_told"] == 2
    assert not answers(two.a, PREFILL, wire.Shrink), "no engine is asked for anything"
    two.assert_at_rest()


def test_a_second_turn_finds_the_answer_without_another_host():
    two = handed_over()
    two.decode_seals(MORE, 3, "de")
    two.gathered()
    two.everything_arrives()
    two.a.say(PREFILL_FRONT, wire.Acquire(call_id=5, hashes=b"".join(MORE)))
    assert answers(two.a, PREFILL_FRONT, wire.Acquired)[0].num_blocks == 5
    assert not two.a.asked


def test_a_pull_says_in_whose_trace_it_is():
    two = handed_over()
    two.decode_seals(MORE, 3, "de")
    two.gathered()
    two.deliver()
    (pull,) = two.a.remote_pulls
    assert pull.returns == "trace-1"
    memory = two.a.core.pools[0].memory
    assert pull.num_bytes == 2 * memory.page_bytes
    assert all(not each.returns for each in two.b.remote_pulls)


def test_so_many_blocks_are_said_at_once_and_what_goes_on_behind_them_comes_too():
    long = chain("a", "b", "c", *range(20))
    two = handed_over(decode_quota=24, pages_there=128)
    for at in range(returns.MAX_GATHERED):
        assert not two.b.asked
        two.decode_seals(long, 3 + at, "z")
    assert len(two.b.asked) == 1
    two.decode_seals(long, 3 + returns.MAX_GATHERED, "yy")
    two.gathered()
    assert len(two.b.asked) == 2
    two.deliver()  # the second is heard while the first is on its way
    assert len(two.a.remote_pulls) == 1
    two.everything_arrives()
    assert two.bytes_there(long) == "abc" + "z" * returns.MAX_GATHERED + "yy"
    two.assert_at_rest()


@pytest.mark.parametrize("prompt", [("a", "tail"), ("tail",)])
def test_the_block_in_which_the_prompt_ends_comes_back_also_the_first_of_all(prompt):
    two = BothWays()
    tail, whole = chain(*prompt), chain(*prompt[:-1], "whole")
    pages = two.a.take(PREFILL, len(tail))
    valid = [BLOCK_TOKENS] * (len(tail) - 1) + [1]
    parents = b"".join([SEED, *tail][: len(tail)])
    two.a.say(
        PREFILL,
        wire.Sealed(
            **page_lists(pages), hashes=b"".join(tail), parents=parents, valid_tokens=u32_bytes(valid)
        ),
    )
    two.a.say(PREFILL, wire.HandoffReady(handoff_id=HANDOFF, hashes=b"".join(tail), ttl_ms=10_000))
    two.acquire(tail)
    two.everything_arrives()
    two.decode_seals(whole, len(tail) - 1, "w")
    two.gathered()
    two.everything_arrives()
    assert whole[-1] in two.a.core.pools[0].index


def test_what_decode_computes_because_it_came_too_late_is_known_and_what_is_behind_it_comes_back():
    two = BothWays(decode_quota=8)
    two.hand_off()
    two.acquire(wait_ms=500)
    two.b.advance(500)
    assert two.got()[0].num_blocks == 0
    two.b.asked.clear()
    two.decode_seals(MORE, 0, "abcd")
    two.gathered()
    two.b.run(two.b.core.on_peer_lost(A_HOST, two.b.now_ms))
    two.everything_arrives()
    assert two.bytes_there() == "abcd"
    assert two.a.core.counters["blocks_pushed_back"] == 1


@pytest.mark.parametrize("mode", ["basic", "1", "2"])
@pytest.mark.parametrize("where", ["here", "there"])
def test_in_the_other_modes_nothing_is_said_and_nothing_taken(mode, where):
    two = handed_over(pd_caching=mode if where == "here" else "3")
    two.decode_seals(MORE, 3, "d")
    two.gathered()
    assert [bool(two.b.asked)] == [where == "there"]
    if where == "there":
        other = BothWays(pd_caching=mode)
        other.hand_over()
        other.a.run(other.a.core.on_peer_call(LINK, two.b.asked[0].message, 0))
        assert not other.a.asked
        assert not other.a.core.returns.is_on


def test_what_is_not_behind_a_hand_off_of_another_host_is_not_said():
    two = handed_over()
    two.decode_seals(chain("x"), 0, "x")
    acquire(two.b, MORE, 2, source_mempool=A_HOST)  # a prefix that the plan had it fetch: no hand-off
    two.deliver()
    two.gathered()
    assert not two.b.asked


def test_what_is_there_already_does_not_come_and_what_is_behind_it_does():
    two = handed_over()
    message = told(two)
    two.a.need(PREFILL, 1)
    pages = two.a.take(PREFILL, 1)
    two.a.bytes[0, pages[0][0]] = "d"
    two.a.write(PREFILL, pages)
    two.a.seal(PREFILL, pages, MORE, 3)
    two.a.run(two.a.core.on_peer_call(LINK, message, 0))
    assert [len(ask.message.hashes) // 32 for ask in two.a.asked] == [1]
    two.everything_arrives()
    assert two.bytes_there() == "abcde"
    two.a.run(two.a.core.on_peer_call(LINK, message, 0))
    assert not two.a.asked
    two.assert_at_rest()


def test_a_page_that_decode_used_anew_during_the_copy_is_not_taken():
    two = handed_over()
    pages = two.decode_seals(MORE, 3, "de")
    two.gathered()
    two.deliver()
    two.b.run(two.b.core.on_peer_gone(LINK, 0))
    two.b.say(DECODE, wire.Unpin(**page_lists(pages[1:])))
    two.b.say(FRONT, wire.Delete(call_id=8, hashes=MORE[4]))
    two.b.bytes[0, pages[1][0]] = "another's"
    two.copy()
    two.deliver()
    assert two.bytes_there() == "abcd"
    assert two.a.core.counters["remote_blocks_stale"] == 1
    two.assert_at_rest()


def test_a_reader_that_comes_meanwhile_waits_for_it_and_for_the_rest():
    two = handed_over(decode_quota=8)
    long = chain("a", "b", "c", "d", "e", "f")
    two.decode_seals(long, 3, "de")
    two.gathered()
    two.deliver()
    two.decode_seals(long, 5, "f")
    call = wire.Acquire(call_id=5, hashes=b"".join(long), wait_ms=1_000, source_mempool=B_HOST)
    two.a.say(PREFILL_FRONT, call)
    assert not answers(two.a, PREFILL_FRONT, wire.Acquired)
    two.everything_arrives()
    assert answers(two.a, PREFILL_FRONT, wire.Acquired)[0].num_blocks == 6
    assert two.bytes_there(long) == "abcdef"


@pytest.mark.parametrize("step", ["asked", "pulling", "checking"])
def test_a_decode_host_that_is_lost_leaves_nothing_on_its_way(step):
    two = handed_over()
    two.a.run(two.a.core.on_peer_call(LINK, told(two), 0))
    if step != "asked":
        two.deliver()
    if step == "checking":
        two.copy()
    two.a.asked.clear()
    two.a.run(two.a.core.on_peer_lost(B_HOST, 0))
    two.b.run(two.b.core.on_peer_gone(LINK, 0))
    two.copy(failed=True)
    two.deliver()
    assert two.bytes_there() == "abc"
    two.assert_at_rest()
    memory = two.a.core.pools[0].memory
    assert not memory.table.counts[PageState.WRITING]
    assert not two.a.core.remote.pulls
    assert two.a.core.status().num_pinned == 3, "its engine's"


def test_a_prefill_mempool_that_began_anew_knows_no_such_hand_off():
    two = handed_over()
    message = told(two)
    successor = Host(A_HOST)
    successor.worker(PREFILL, "cpu")
    successor.run(successor.core.on_peer_call(LINK, message, 0))
    assert not successor.asked


class GpuBothWays(BothWays):
    def __init__(self, dram_there: int = 32, dram_here: int = 8) -> None:
        gpus = GpuHosts(dram_there, dram_here)
        self.a, self.b = gpus.a, gpus.b
        self.a.client(PREFILL_FRONT, f"i{PREFILL}")


def test_on_gpus_it_leaves_by_host_memory_and_lands_in_host_memory():
    two = GpuBothWays()
    two.hand_over()
    two.decode_seals(MORE, 3, "de", GPU)
    two.gathered()
    two.everything_arrives()
    assert all(h in two.a.core.pools[DRAM].index and h not in two.a.core.pools[GPU].index for h in MORE[3:])
    two.a.say(PREFILL_FRONT, wire.Acquire(call_id=5, hashes=b"".join(MORE)))
    two.a.copied()
    assert answers(two.a, PREFILL_FRONT, wire.Acquired)[0].num_blocks == 5
    assert two.bytes_there(space=GPU) == "abcde"
    assert not two.a.asked


@pytest.mark.parametrize("where", ["here", "there"])
def test_on_gpus_without_host_memory_it_is_not_done(where):
    two = GpuBothWays(dram_there=0 if where == "there" else 32, dram_here=0 if where == "here" else 8)
    two.hand_off()
    two.acquire()
    for _ in range(3):
        two.deliver()
        two.a.copied()
        two.copy()
    two.b.take(DECODE, 0)
    two.decode_seals(MORE, 0, "abcd", GPU)
    two.gathered()
    assert bool(two.b.asked) == (where == "there")
    two.deliver()
    assert not two.a.remote_pulls
    assert not two.a.core.remote.pulls
