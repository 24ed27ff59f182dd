"""Orders of events that are rare: each lost a page, a pin or an answer once."""

import msgspec
import pytest

from services.mempool.core.actions import ApiSend
from shared.errors import PeerProtocolError
from shared.ids import Epoch, InstanceId
from shared.kv.page import PageState
from shared.kv.words import u32_list
from shared.wire import mempool as wire
from shared.wire import mempool_api as api_wire
from shared.wire.mempool_api import InsertFlags
from shared.wire.mempool_swap import NO_PAGE, SwapIn, SwapOut, SwappedIn, SwappedOut
from tests.unit.mempool_harness import DESCRIPTION, PAGE_BYTES, SEED, Harness, chain, page_lists
from tests.unit.test_mempool_dram import ABCD, WXYZ, fill, number_of_dram, spaces, unpin
from tests.unit.test_mempool_layers import ABC, say_layers, without_layers
from tests.unit.test_mempool_leased import hands, raw  # noqa: F401  hands is a fixture
from tests.unit.test_mempool_spaces import DECODE, FRONT, PREFILL, Spaces, acquire, answers

CALLER = 1 << 32
PROMPT = chain(*"abcdef")


# -- blocks that a checksum condemns ------------------------------------------------------------------


def test_a_pull_that_was_shortened_by_a_condemned_block_keeps_no_later_reader_waiting():
    rig = Spaces(pull_patience_ms=400)
    rig.worker(PREFILL, "cpu:0", quota=6)
    rig.worker(DECODE, "cpu:1", quota=4)  # half of its space is free
    rig.client(FRONT, f"i{DECODE}")
    rig.fill(PREFILL, 0, PROMPT, "abcdef")
    acquire(rig, PROMPT)  # six blocks, four pages: it waits for its engine
    rig.run(rig.core.on_corrupt(0, PROMPT[4], rig.now_ms))
    rig.advance(310)  # three quarters of its patience: content with four pages
    rig.copied()
    rig.advance(500)
    acquire(rig, PROMPT, call_id=2)
    for _ in range(20):
        rig.advance(1_000)
        rig.copied()
    assert [one.call_id for one in answers(rig, FRONT, wire.Acquired)] == [1, 2]
    assert not rig.core.pulls._arriving


def _condemned_twice():
    """A block that is condemned, leaves for host memory, is computed again, leaves, and is condemned there, too."""
    rig = spaces(8, 8)
    first = fill(rig, ABCD[:1], "a") + fill(rig, WXYZ, "wxyz")
    rig.run(rig.core.on_corrupt(0, ABCD[0], rig.now_ms))
    for pages in (first[:1], None):
        unpin(rig, pages if pages is not None else rig.save(PREFILL, ABCD[:1]))
        while rig.copies:
            rig.copied()
    dram = rig.core.pools[number_of_dram(rig)]
    page = dram.index.get(ABCD[0]).page
    held = rig.core.hold(dram.number, ABCD[0], page, dram.memory.table.epochs[page])
    rig.run(rig.core.on_corrupt(dram.number, ABCD[0], rig.now_ms))
    rig.run(rig.core.let_go(dram.number, [held], rig.now_ms))
    return rig, dram


def test_a_block_that_is_condemned_in_two_spaces_loses_no_page():
    rig, dram = _condemned_twice()
    for pool in rig.core.pools.values():
        assert pool.memory.table.counts[PageState.SEALED] == len(pool.index)
    while dram.evict():
        pass
    assert dram.memory.table.num_free == dram.memory.table.num_pages


def test_blocks_that_were_condemned_while_their_request_was_parked_do_not_come_back():
    rig = spaces(8, 8)
    pages = fill(rig, ABCD, "abcd")
    rig.say(PREFILL, SwapOut(swap=1, hashes=b"".join(ABCD)))
    rig.copied()
    (out,) = answers(rig, PREFILL, SwappedOut)
    assert out.kept == bytes([1] * 4)
    unpin(rig, pages)
    rig.run(rig.core.on_corrupt(0, ABCD[1], rig.now_ms))  # and what was computed from it
    rig.say(PREFILL, SwapIn(swap=1, hashes=b"".join(ABCD), **page_lists(rig.take(PREFILL, 4))))
    rig.copied()
    (back,) = answers(rig, PREFILL, SwappedIn)
    assert u32_list(back.pages)[1:] == [NO_PAGE] * 3


# -- who comes back elsewhere, or is dead already -----------------------------------------------------


@pytest.mark.parametrize("device", ["cpu:0", "cpu:1"])
def test_an_engine_whose_successor_is_in_another_space_is_refused_as_one_in_the_same_would_be(device):
    rig, name = Spaces(), InstanceId("i")

    def attach(connection, process, epoch, where, kind):
        message = wire.Attach(
            kind=kind, instance=name, instance_epoch=Epoch(epoch), description=DESCRIPTION, device=where,
            works_in_pages=True, quota_pages=4,
        )  # fmt: skip
        rig.run(rig.core.on_attach(connection, process, message, 0))

    for connection, kind in ((101, "rank"), (1, "engine")):
        attach(connection, 1, 1, "cpu:0", kind)
    rig.closed(101)  # it hangs; its process lives
    rig.closed(1)
    for connection, kind in ((102, "rank"), (2, "engine")):
        attach(connection, 2, 2, device, kind)
    home = rig.core.space_of(name)
    for connection, kind in ((103, "rank"), (3, "engine")):  # it goes on
        attach(connection, 1, 1, "cpu:0", kind)
        assert rig.disconnected[connection] == "epoch.stale"
    assert rig.core.space_of(name) == home
    rig.closed(2)
    attach(4, 3, 3, device, "engine")
    assert 4 not in rig.disconnected


def test_two_workers_of_one_name_have_no_two_spaces():
    """The readers of one would get pages of the other's, and its engine pages that its ranks do not have."""
    rig, name = Spaces(), InstanceId("i")

    def attach(connection, process, where, kind):
        message = wire.Attach(
            kind=kind,
            instance=name,
            description=DESCRIPTION,
            device=where,
            works_in_pages=True,
            quota_pages=4,
        )
        rig.run(rig.core.on_attach(connection, process, message, 0))
        return rig.disconnected.get(connection)

    assert attach(101, 1, "cpu:0", "rank") is None
    spaces = [*rig.core.pools]
    assert attach(102, 2, "cpu:1", "rank") == "instance.taken"
    assert attach(1, 1, "cpu:0", "engine") is None
    assert attach(103, 2, "cpu:1", "rank") == "instance.taken", "and with its rank its engine ends"
    assert [*rig.core.pools] == spaces, "no memory is made for who is refused"
    home = rig.core.space_of(name)
    assert attach(4, 1, "cpu:0", "engine") is None, "its own process may come again"
    for connection in (101, 1, 4):
        rig.closed(connection)
    assert attach(105, 2, "cpu:1", "rank") is attach(5, 2, "cpu:1", "engine") is None, "it has gone"
    assert rig.core.space_of(name) != home
    assert attach(106, 1, "cpu:0", "rank") == "instance.taken"


def test_a_hand_off_that_is_announced_for_two_spaces_has_its_pins_where_its_blocks_are():
    it = without_layers()
    it.worker(9, "cpu:9")
    it.save(PREFILL, ABC[:2])
    for target in ({}, {"target": InstanceId("i9")}):
        say_layers(it, [], [], cached=b"".join(ABC[:2]), **target)
        it.copied()
    it.advance(60_000)
    it.advance(60_000)
    for pool in it.core.pools.values():
        assert pool.index.num_pinned == sum(entry.pins > 0 for entry in pool.index.entries())


def test_a_rank_that_is_proven_dead_before_its_engine_attaches_keeps_no_page():
    it = Harness(8)
    rank = wire.Attach(kind="rank", instance=InstanceId("i1"), description=DESCRIPTION, device="cpu")
    it.run(it.pool.on_attach(101, 7, rank, 0))
    it.dead(7)  # its connection's end is not read yet
    it.engine(1, quota=4, process=1, works_in_pages=True)
    for connection in (101, 1):
        it.closed(connection)
    it.dead(1)
    assert it.pool.memory.table.counts[PageState.QUARANTINED] == 0


def _asking(rig, call):
    rig.core.api.on_call(CALLER, call, rig.now_ms)
    _heard(rig, rig.core.after_api(rig.now_ms))


def _heard(rig, actions):
    rig.replies += [action.message for action in actions if isinstance(action, ApiSend)]
    rig.run([action for action in actions if not isinstance(action, ApiSend)])


def _moved(rig, device):
    """The instance comes back with another model."""
    other = msgspec.structs.replace(DESCRIPTION, dtype="bfloat16")
    rig.worker(5, device, quota=4, instance="i1", description=other)
    _asking(rig, api_wire.MatchBlocks(call_id=2, hashes=b"", instance=InstanceId("i1")))


def _with_caller(rig):
    rig.replies = []
    rig.worker(PREFILL, "cpu:0", quota=4)
    rig.core.api.connect(CALLER, api_wire.ApiHello(instance=InstanceId("me")), None)
    return rig


def _ended(rig):
    for connection in (PREFILL, 101):
        rig.closed(connection)
    rig.dead(PREFILL)


def test_a_caller_that_leaves_gives_back_its_pages_of_an_instance_that_came_back_elsewhere():
    rig = _with_caller(Spaces(8))
    _asking(rig, api_wire.AllocMem(call_id=1, num_blocks=2, mem_type="hbm", instance=InstanceId("i1")))
    _ended(rig)
    _moved(rig, "cpu:0")
    rig.core.api.on_closed(CALLER)
    rig.run(rig.core.after_api(rig.now_ms))
    assert rig.core.pools[0].memory.table.num_free == 8


def test_a_swap_under_way_is_answered_when_its_instance_came_back_elsewhere():
    rig = _with_caller(Spaces(8, dram_bytes=8 * PAGE_BYTES, dram_for_host=True))
    rig.fill(PREFILL, 0, chain(*"abcd"), "abcd")
    _ended(rig)
    _asking(rig, api_wire.SwapOut(call_id=1, num_blocks=2, instance=InstanceId("i1")))
    _moved(rig, "cpu:7")
    for copy_id in list(rig.copies):
        del rig.copies[copy_id]
        _heard(rig, rig.core.on_copied(copy_id, rig.now_ms))
    assert 1 in [reply.call_id for reply in rig.replies]


def test_a_swap_in_a_space_that_instances_share_is_answered_in_the_name_of_the_one_that_was_asked():
    rig = _with_caller(Spaces(8, dram_bytes=8 * PAGE_BYTES, dram_for_host=True))
    rig.worker(DECODE, "cpu:0", quota=0)
    pages = rig.fill(PREFILL, 0, chain(*"abcd"), "abcd")
    unpin(rig, pages)
    for number, name in enumerate(("i1", f"i{DECODE}")):
        _asking(rig, api_wire.SwapOut(call_id=number, num_blocks=1, instance=InstanceId(name)))
    while rig.copies:
        for copy_id in list(rig.copies):
            del rig.copies[copy_id]
            _heard(rig, rig.core.on_copied(copy_id, rig.now_ms))
    named = {
        reply.call_id: {one.instance_key for one in api_wire.unpack_addresses(reply.addresses)}
        for reply in rig.replies
        if reply.addresses
    }
    assert named[1] == {api_wire.instance_key(InstanceId(f"i{DECODE}"))}


# -- callers' own mistakes ----------------------------------------------------------------------------


def test_a_broken_list_ends_its_callers_connection_at_once_and_nobody_elses_later():
    rig = Spaces(8)
    rig.worker(PREFILL, "cpu:0", quota=8)  # has all pages: the call would wait
    rig.core.api.connect(CALLER, api_wire.ApiHello(instance=InstanceId("me")), None)
    broken = bytes(api_wire.ADDRESS_BYTES * 2 + 3)
    with pytest.raises(PeerProtocolError):
        rig.core.api.on_call(
            CALLER, api_wire.Transfer(call_id=1, target=InstanceId("i1"), sources=broken), rig.now_ms
        )
    rig.advance(10_000)


def test_lent_pages_hold_no_block_that_a_pin_would_keep_from_their_lender(hands):  # noqa: F811
    lent, _ = hands.hold("ab")
    hashes = b"".join(chain("a", "b"))
    refused = hands.ask(
        api_wire.InsertBlocks, addresses=raw(lent), hashes=hashes, parent=SEED, flags=InsertFlags.PIN
    )
    assert refused.code == "invalid_request"
    hands.reclaim(0, 1_000)
    for _ in range(5):
        hands.copied()
        hands.advance(1_000)
    assert hands.leased() == 0
