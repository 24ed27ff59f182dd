"""What the pool decides about engines and their pages."""

import msgspec
import pytest

from services.mempool.core import supply
from shared.errors import PeerProtocolError
from shared.ids import Epoch, InstanceId
from shared.kv.page import PageState, sealed_word
from shared.kv.words import u32_bytes, u64_bytes
from shared.wire import mempool as wire
from tests.unit.mempool_harness import DESCRIPTION, PAGE_BYTES, Harness, chain, page_lists


def test_first_engine_creates_the_memory_and_gets_its_quota():
    pool = Harness(num_pages=8)
    pool.engine(1, quota=3)
    assert (pool.created.num_pages, pool.created.page_bytes) == (8, PAGE_BYTES)
    assert isinstance(pool.sent[1][0], wire.Attached)
    assert len(pool.granted[1]) == 3
    assert pool.counts() == {"free": 5, "granted": 3}


def test_sealed_pages_are_found_by_hash_by_everyone_under_their_epochs():
    pool = Harness()
    pool.engine(1, quota=3)
    pool.client(2)
    hashes = chain("a", "b", "c")
    pages = pool.save(1, hashes)
    got = pool.acquire(2, [*hashes, *chain("x")])
    assert got.num_blocks == 3
    assert got.pages == u32_bytes(p for p, _ in pages)
    assert got.epochs == u64_bytes(e for _, e in pages)
    assert all(pool.words[p] == sealed_word(Epoch(e)) for p, e in pages)
    assert got.fencing_token > pool.pool.boot_generation


def test_pages_are_not_indexed_before_their_seal():
    pool = Harness()
    pool.engine(1, quota=2)
    hashes = chain("a", "b")
    pages = pool.take(1, 2)
    pool.write(1, pages)
    assert pool.acquire(1, hashes).num_blocks == 0
    pool.seal(1, pages[:1], hashes)
    assert pool.acquire(1, hashes).num_blocks == 1


def test_second_seal_of_a_hash_is_dropped_and_its_page_freed_under_a_larger_epoch():
    pool = Harness()
    pool.engine(1)
    pool.engine(2)
    hashes = chain("a")
    first = pool.save(1, hashes)
    ((page, epoch),) = pool.save(2, hashes)
    assert pool.state(page) is PageState.FREE
    assert pool.words[page] >> 8 == epoch + 1
    assert pool.acquire(1, hashes).pages == u32_bytes([first[0][0]])


def test_engines_that_ask_get_the_pages_of_the_least_recently_used_leaves():
    pool = Harness(num_pages=4)
    pool.engine(1, quota=2)
    old, new = chain("old1", "old2"), chain("new1", "new2")
    pool.save(1, old)
    pool.need(1, 2)
    pool.save(1, new)
    pool.acquire(1, new, ttl_ms=10)
    pool.need(1, 2)
    assert pool.counts() == {"sealed": 2, "granted": 2}
    assert pool.acquire(1, old).num_blocks == 0
    assert pool.acquire(1, new).num_blocks == 2


def test_pinned_pages_are_never_evicted_and_the_engine_waits_for_the_release():
    pool = Harness(num_pages=2)
    pool.engine(1, quota=2)
    pool.client(2)
    pool.save(1, chain("a", "b"))
    lease = pool.acquire(2, chain("a", "b"))
    pool.need(1, 2)
    assert pool.counts() == {"sealed": 2}
    pool.release(2, lease.lease_id)
    assert pool.counts() == {"granted": 2}
    assert all(epoch == pool.pool.boot_generation + 1 for _, epoch in pool.granted[1])


def test_pages_of_a_lost_engine_wait_for_proof_of_its_death():
    pool = Harness(num_pages=3)
    pool.engine(1, quota=3, process=77)
    sealed, writing, granted = pool.take(1, 3)
    pool.write(1, [sealed, writing])
    pool.seal(1, [sealed], chain("a"))
    pool.closed(1)
    assert pool.counts() == {"sealed": 1, "quarantined": 2}
    pool.engine(2, quota=3, process=78)
    pool.dead(99)
    assert pool.counts() == {"granted": 1, "quarantined": 2}, "only the sealed page could be evicted"
    pool.dead(77)
    assert pool.counts() == {"granted": 3}
    assert all(e > granted[1] for p, e in pool.granted[2] if p in (writing[0], granted[0]))


def test_death_ends_a_connection_that_a_forked_child_keeps_open():
    pool = Harness(num_pages=2)
    pool.engine(1, quota=2, process=77)
    pool.dead(77)
    assert pool.disconnected == {1: "process.dead"}
    assert pool.counts() == {"free": 2}
    pool.closed(1)
    assert pool.counts() == {"free": 2}


def test_only_the_same_process_and_instance_can_let_go_of_pages_that_it_lost():
    pool = Harness(num_pages=2)
    pool.engine(1, quota=2, process=77, instance="a")
    pool.write(1, pool.take(1, 2)[:1])
    pool.closed(1)
    pool.engine(2, quota=0, process=78, instance="a", lets_go=True)
    pool.engine(3, quota=0, process=77, instance="b", lets_go=True)
    pool.engine(4, quota=0, process=77, instance="a")
    assert pool.counts() == {"quarantined": 2}
    pool.engine(5, quota=0, process=77, instance="a", lets_go=True)
    assert pool.counts() == {"free": 2}


def test_letting_go_replaces_a_connection_whose_end_was_not_seen_yet():
    pool = Harness(num_pages=2)
    pool.engine(1, quota=2, process=77, instance="a")
    pool.engine(2, quota=2, process=77, instance="a", lets_go=True)
    assert pool.disconnected == {1: "replaced"}
    assert len(pool.granted[2]) == 2
    assert all(epoch == pool.pool.boot_generation + 1 for _, epoch in pool.granted[2])


def test_detaching_returns_all_pages_at_once():
    pool = Harness(num_pages=3)
    pool.engine(1, quota=2)
    pool.write(1, pool.take(1, 1))
    pool.say(1, wire.Detach())
    assert pool.counts() == {"free": 3}
    assert 1 in pool.disconnected


def test_stale_messages_are_counted_and_change_nothing():
    pool = Harness(num_pages=4)
    pool.engine(1, quota=2)
    pool.engine(2, quota=2)
    (page, epoch), other = pool.take(1, 1)[0], pool.take(2, 1)[0]
    pool.write(1, [(page, epoch + 1), (page, epoch - 1), other, (4_000_000_000, epoch)])
    pool.seal(1, [(page, epoch + 1), other], chain("a", "b"))
    pool.give_back(1, [other, (page, epoch + 1)])
    assert pool.counts() == {"granted": 4}
    assert pool.pool.counters["messages_stale"] == 8
    pool.seal(1, [(page, epoch)], chain("a"))
    pool.seal(1, [(page, epoch)], chain("b"))
    assert pool.counts() == {"granted": 3, "sealed": 1}
    assert pool.pool.counters["messages_stale"] == 9


@pytest.mark.parametrize("kind", [wire.Writing, wire.GiveBack, wire.Unpin])
def test_of_a_page_that_is_named_twice_the_second_word_is_stale(kind):
    pool = Harness(4)
    pool.engine(1, quota=3, works_in_pages=True)
    pages = pool.take(1, 3)
    if kind is wire.Unpin:
        pool.write(1, pages)
        pool.seal(1, pages, chain("a", "b", "c"))
    before = sum(pool.counts().values())
    pool.say(1, kind(**page_lists([pages[0], pages[1], pages[0], (pages[2][0], 1)])))
    assert pool.pool.counters["messages_stale"] == 2
    assert sum(pool.counts().values()) == before == 4
    (engine,) = pool.pool.memory.engines.attached.values()
    assert pages[2][0] in engine.held | engine.pinned.keys()


def test_page_given_back_gets_a_larger_epoch_before_anyone_else_has_it():
    pool = Harness(num_pages=1)
    pool.engine(1, quota=1)
    (owned,) = pool.take(1, 1)
    pool.engine(2, quota=1)
    assert pool.granted[2] == []
    pool.give_back(1, [owned])
    assert pool.granted[2] == [(owned[0], owned[1] + 1)]


def test_grants_stay_within_their_share_and_a_new_engine_makes_others_shrink():
    pool = Harness(num_pages=8, granted_share=0.5)
    pool.engine(1, quota=100)
    assert len(pool.granted[1]) == 4
    pool.engine(2, quota=100)
    assert pool.sent[1][-1] == wire.Shrink(count=2)
    assert len(pool.granted[2]) == 2
    pool.give_back(1, pool.take(1, 2))
    pool.need(1, 100)
    assert pool.counts() == {"free": 4, "granted": 4}
    pool.closed(2)
    pool.dead(2)
    assert len(pool.granted[1]) == 4


def test_another_layout_is_refused_with_its_code_and_ended():
    pool = Harness()
    pool.engine(1)
    pool.engine(2, description=msgspec.structs.replace(DESCRIPTION, dtype="bfloat16"))
    assert pool.sent[2][-1].code == "layout.mismatch"
    assert pool.disconnected == {2: "layout.mismatch"}
    with pytest.raises(PeerProtocolError):
        pool.need(2, 1)


def test_pool_smaller_than_a_page_refuses_and_can_still_serve_smaller_blocks():
    pool = Harness(num_pages=1)
    pool.engine(1, description=msgspec.structs.replace(DESCRIPTION, block_bytes=PAGE_BYTES + 1))
    assert pool.sent[1][-1].code == "pages.exhausted"
    pool.engine(2, quota=1)
    assert len(pool.granted[2]) == 1


def test_later_instance_epoch_replaces_an_earlier_one_and_never_the_reverse():
    pool = Harness(num_pages=4)
    pool.engine(1, quota=1, instance="same", instance_epoch=Epoch(5))
    pool.engine(2, quota=1, instance="same", instance_epoch=Epoch(4))
    assert pool.sent[2][-1].code == "epoch.stale"
    pool.engine(3, quota=1, instance="same", instance_epoch=Epoch(6))
    assert pool.disconnected[1] == "epoch.stale"
    assert pool.counts() == {"free": 2, "granted": 1, "quarantined": 1}


@pytest.mark.parametrize(
    "message",
    [
        wire.Acquire(call_id=1, hashes=b"short"),
        wire.Acquire(call_id=1, hashes=b"\0" * 32 * 5),
        wire.Writing(pages=b"\0\0", epochs=b""),
        wire.Writing(pages=b"\0" * 4, epochs=b""),
        wire.Sealed(pages=b"", epochs=b"", hashes=b"", parents=b"\1" * 32, valid_tokens=b""),
        wire.Sealed(pages=b"", epochs=b"", hashes=b"", parents=b"", valid_tokens=b"1"),
        wire.Sealed(
            pages=b"\0" * 4, epochs=b"\0" * 8, hashes=b"\1" * 32, parents=b"\1" * 32, valid_tokens=b"\1\0\0\0"
        ),
        wire.Sealed(
            pages=b"\0" * 4, epochs=b"\0" * 8, hashes=b"\1" * 32, parents=b"\2" * 32, valid_tokens=b"\5\0\0\0"
        ),
        wire.Sealed(
            pages=b"\0" * 4, epochs=b"\0" * 8, hashes=b"\1" * 32, parents=b"\2" * 32, valid_tokens=b"\0\0\0\0"
        ),
        wire.Attach(kind="client", instance="again"),
    ],
)
def test_impossible_messages_end_the_connection_and_change_nothing(message):
    pool = Harness(num_pages=2, max_blocks_per_call=4)
    pool.engine(1, quota=2)
    words = dict(pool.words)
    with pytest.raises(PeerProtocolError):
        pool.say(1, message)
    assert pool.words == words
    assert pool.counts() == {"granted": 2}


LAYER_MAJOR = msgspec.structs.replace(DESCRIPTION, layout="layer-major", block_bytes=2 << 20)


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 1},
        {"rank": -1},
        {"description": LAYER_MAJOR, "device": "cuda:00", "capacity_bytes": 1 << 28},
        {"description": msgspec.structs.replace(LAYER_MAJOR, num_layers=-1)},
    ],
)
def test_a_rank_that_no_engine_has_is_refused_before_there_is_memory(fields):
    """It ended the mempool: its slabs were counted per page by none, or kept under a number beyond the ranks."""
    pool = Harness()
    attach = wire.Attach(kind="rank", instance=InstanceId("x"), **{"description": DESCRIPTION} | fields)
    with pytest.raises(PeerProtocolError):
        pool.pool.on_attach(1, 1, attach, 0)
    assert pool.pool.memory is None


def test_clients_may_not_speak_as_engines_and_nobody_before_attach():
    pool = Harness()
    pool.client(1)
    with pytest.raises(PeerProtocolError):
        pool.need(1, 1)
    with pytest.raises(PeerProtocolError):
        pool.say(7, wire.StatusCall(call_id=1))
    with pytest.raises(PeerProtocolError):
        pool.engine(8, description=None)


def test_what_an_engine_is_granted_at_once_comes_in_messages_that_can_be_sent(monkeypatch):
    monkeypatch.setattr(supply, "PAGES_PER_GRANT", 3)
    pool = Harness(num_pages=8)
    pool.engine(1, quota=7)
    grants = [message for message in pool.sent[1] if isinstance(message, wire.Granted)]
    assert [len(message.pages) // 4 for message in grants] == [3, 3, 1]
    assert len({page for page, _ in pool.granted[1]}) == 7


def test_negative_or_huge_demands_are_bounded_by_the_quota():
    pool = Harness(num_pages=8)
    pool.engine(1, quota=-5)
    assert pool.counts() == {"free": 8}
    pool.engine(2, quota=2**40)
    assert len(pool.granted[2]) == 4, "the even part of two engines"
    pool.need(2, -3)
    pool.need(2, 2**40)
    assert pool.counts() == {"free": 4, "granted": 4}


def test_quiet_pool_gives_memory_of_free_pages_back_once():
    pool = Harness(num_pages=4, idle_punch_ms=100)
    pool.engine(1, quota=2)
    pages = pool.take(1, 2)
    assert pool.pool.next_deadline_ms() is None
    pool.give_back(1, pages)
    assert pool.pool.next_deadline_ms() == 100
    pool.advance(99)
    assert pool.punched == []
    pool.advance(1)
    assert sorted(pool.punched) == sorted(p for p, _ in pages)
    pool.advance(1000)
    assert len(pool.punched) == 2
    assert pool.pool.next_deadline_ms() is None
    pool.need(1, 2)
    assert len(pool.granted[1]) == 2


def test_delete_drops_what_nobody_pins_and_says_how_much():
    pool = Harness(num_pages=4)
    pool.engine(1, quota=3)
    pool.client(2)
    hashes = chain("a", "b", "c")
    pool.save(1, hashes)
    pool.acquire(2, hashes[:1])
    pool.say(2, wire.Delete(call_id=5, hashes=hashes[2]))
    assert pool.sent[2][-1] == wire.Deleted(call_id=5, num_blocks=1)
    pool.say(2, wire.Delete(call_id=6))
    assert pool.sent[2][-1] == wire.Deleted(call_id=6, num_blocks=1)
    pool.say(2, wire.Match(call_id=7, hashes=b"".join(hashes)))
    assert pool.sent[2][-1] == wire.Matched(call_id=7, num_blocks=1)


def test_status_before_any_engine_is_empty_and_after_it_sums_up():
    pool = Harness(num_pages=4)
    pool.client(1, "tool")
    pool.say(1, wire.StatusCall(call_id=3))
    assert (pool.sent[1][-1].num_pages, pool.sent[1][-1].attachments) == (0, ["client tool"])
    assert pool.acquire(1, chain("a")).num_blocks == 0
    pool.engine(2, quota=2)
    pool.say(1, wire.StatusCall(call_id=4))
    assert sum(pool.sent[1][-1].pages_by_state.values()) == pool.sent[1][-1].num_pages == 4
