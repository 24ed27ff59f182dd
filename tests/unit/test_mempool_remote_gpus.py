"""Two hosts with their engines on GPUs: blocks travel from host memory to host memory, through the DRAM behind both."""

import pytest

from services.mempool.core.actions import CopyPages, PullRemote
from shared.ids import InstanceId
from shared.kv.page import PageState
from shared.kv.words import u32_list
from shared.wire import mempool as wire
from shared.wire.mempool_reach import HostReach
from tests.unit.mempool_harness import DESCRIPTION, page_lists
from tests.unit.test_mempool_remote import (
    A_HOST,
    B_HOST,
    DECODE,
    FRONT,
    LINK,
    PREFILL,
    Host,
    TwoMempools,
)
from tests.unit.test_mempool_spaces import answers

PAGE_BYTES = 16_384  # of a GPU's slab with blocks of 1,000 bytes
GPU, DRAM = 0, 1


def on_gpu(address: str, connection: int, dram_pages: int) -> Host:
    host = Host(address, dram_bytes=dram_pages * PAGE_BYTES)
    attach_gpu(host, connection)
    return host


def attach_gpu(host: Host, connection: int) -> None:
    """An engine and its rank, which has a GPU."""
    name = InstanceId(f"i{connection}")
    rank = wire.Attach(
        kind="rank", instance=name, description=DESCRIPTION, device=f"cuda:{connection:032x}",
        capacity_bytes=128 * PAGE_BYTES,
    )  # fmt: skip
    host.run(host.core.on_attach(100 + connection, connection, rank, host.now_ms))
    host.engine(connection, quota=8, instance=name, works_in_pages=True)


class GpuHosts(TwoMempools):
    def __init__(self, dram_there: int = 8, dram_here: int = 8) -> None:
        self.a, self.b = on_gpu(A_HOST, PREFILL, dram_there), on_gpu(B_HOST, DECODE, dram_here)
        self.b.client(FRONT, f"i{DECODE}")


@pytest.fixture
def two() -> GpuHosts:
    return GpuHosts()


def spaces_of(copy: CopyPages | PullRemote) -> tuple[set[int], int]:
    sources = {copy.source_space} if isinstance(copy, PullRemote) else {space for space, _ in copy.sources}
    return sources, copy.space


def test_blocks_go_out_through_host_memory_and_in_through_host_memory(two):
    two.hand_off()
    two.acquire()
    two.deliver()
    assert [spaces_of(copy) for copy in two.a.copies.values()] == [({GPU}, DRAM)]
    assert two.a.core.status().num_handoffs == 0
    assert not two.b.remote_pulls
    two.a.copied()
    two.deliver()
    assert [spaces_of(pull) for pull in two.b.remote_pulls] == [({DRAM}, DRAM)]
    two.copy()
    two.deliver()
    assert [spaces_of(copy) for copy in two.b.copies.values()] == [({DRAM}, GPU)]
    assert not two.got()
    two.b.copied()
    (got,) = two.got()
    assert [two.b.bytes[GPU, page] for page in u32_list(got.pages)] == ["a", "b", "c"]
    assert all(two.b.state_in(GPU, page) is PageState.SEALED for page in u32_list(got.pages))
    two.assert_at_rest()
    assert two.a.core.counters["peer_calls_staged"] == 1


def test_what_host_memory_has_already_is_not_copied_again(two):
    pages = two.hand_off()
    two.acquire()
    two.deliver()
    two.a.copied()
    two.b.run(two.b.core.on_peer_lost(A_HOST, 0))  # the reader did not get it
    two.deliver()
    two.acquire(call_id=2)
    two.deliver()
    assert not two.a.copies
    assert len(two.b.remote_pulls) == 1
    assert len(pages) == 3


def test_a_copy_to_host_memory_that_fails_is_a_miss(two):
    two.hand_off()
    two.acquire()
    two.deliver()
    two.a.copied(failed=True)
    two.deliver()
    assert two.got()[0].num_blocks == 0
    two.assert_at_rest()


def test_a_reader_that_goes_during_the_copy_leaves_nothing(two):
    pages = two.hand_off()
    two.acquire()
    two.deliver()
    two.a.run(two.a.core.on_peer_gone(LINK, 0))
    two.a.copied()
    assert not two.a.told
    assert not any(pool.leases.leases for pool in two.a.core.pools.values())
    two.a.say(PREFILL, wire.Unpin(**page_lists(pages)))
    assert two.a.core.status().num_pinned == 0


@pytest.mark.parametrize("where", ["there", "here"])
def test_without_host_memory_it_is_a_miss_at_once(where):
    two = GpuHosts(dram_there=0 if where == "there" else 8, dram_here=0 if where == "here" else 8)
    two.hand_off()
    two.acquire()
    two.deliver()
    assert two.got()[0].num_blocks == 0
    two.deliver()
    two.assert_at_rest()


def told(host: Host, connection: int = FRONT) -> list[bool]:
    return [message.crosses for message in answers(host, connection, HostReach)]


def test_a_client_hears_that_blocks_on_gpus_without_host_memory_stay_on_their_host():
    two = GpuHosts(dram_here=0)
    assert told(two.b) == [False]
    two.b.client(FRONT + 1, f"i{DECODE}")
    assert told(two.b, FRONT + 1) == [False]
    assert told(two.b) == [False], "once"


def test_where_blocks_pass_between_hosts_nothing_has_to_be_said(two):
    assert told(two.b) == []
    in_host_memory = TwoMempools()
    assert told(in_host_memory.b) == []


@pytest.mark.parametrize("dram_pages", [0, 8])
def test_a_client_that_came_before_its_engine_hears_it_when_that_is_there(dram_pages):
    host = Host(B_HOST, dram_bytes=dram_pages * PAGE_BYTES)
    host.client(FRONT, f"i{DECODE}")
    assert told(host) == []
    attach_gpu(host, DECODE)
    assert told(host) == ([False] if not dram_pages else [])


def test_host_memory_that_comes_later_is_said_too():
    """A mempool that took over, with a setting that its predecessor lacked, whose clients were back first."""
    host = Host(B_HOST)
    attach_gpu(host, DECODE)
    host.client(FRONT, f"i{DECODE}")
    host.core.dram._limits = type(host.core.limits)(capacity_bytes=1, dram_bytes=8 * PAGE_BYTES)
    attach_gpu(host, PREFILL)
    assert told(host) == [False, True]


def test_a_mempool_that_no_other_host_reaches_says_nothing_of_it():
    host = Host("")
    attach_gpu(host, DECODE)
    host.client(FRONT, f"i{DECODE}")
    assert told(host) == []


def test_a_connection_with_the_number_of_one_that_closed_hears_it_anew():
    two = GpuHosts(dram_here=0)
    two.b.run(two.b.core.on_closed(FRONT, two.b.now_ms))
    two.b.client(FRONT, f"i{DECODE}")
    assert told(two.b) == [False, False]
