"""What a source answers, beside what readers make of it (test_mempool_remote.py)."""

import msgspec

from shared.kv.words import u32_bytes, u32_list, u64_bytes
from shared.wire import mempool_peer as peer
from tests.unit.test_mempool_lending import ABCD, Market
from tests.unit.test_mempool_remote import A_HOST, ABC, LINK, PREFILL, Host, TwoMempools


def source(**limits: object) -> Host:
    """A mempool with one engine."""
    host = Host(A_HOST, **limits)
    host.worker(PREFILL, "cpu")
    return host


def test_of_pages_that_callers_hold_only_a_transfer_under_way_has_the_sources_word():
    """Their epochs stay when it was given up, and its caller writes into them."""
    host = source()
    (page,) = host.fill(PREFILL, 0, ABC[:1], "a")
    words = {"pages": u32_bytes([page[0]]), "epochs": u64_bytes([page[1]])}

    def stale(**fields: object) -> list[int]:
        check = peer.CheckEpochs(call_id=1, space=0, **words, **fields)
        host.run(host.core.on_peer_call(LINK, check, 0))
        return u32_list(host.told.pop().message.stale)

    assert stale() == []
    assert stale(held=True) == stale(held=True, order=4) == [0]
    host.core.serve._names = lambda order, space, pages: (order, space, [*pages]) == (4, 0, [page[0]])
    assert stale(held=True, order=4) == []
    assert stale(held=True, order=5) == [0]


def test_leases_that_ended_at_their_time_make_room_for_others():
    host = source(max_leases=2)
    host.fill(PREFILL, 0, ABC, "abc")
    key = host.core.pools[0].memory.content_key

    def answer() -> type:
        call = peer.RemoteAcquire(call_id=1, content_key=key, hashes=ABC[0], ttl_ms=1_000)
        host.run(host.core.on_peer_call(LINK, call, host.now_ms))
        return type(host.told.pop().message)

    assert [answer() for _ in range(3)] == [peer.RemoteAcquired, peer.RemoteAcquired, peer.CallRefused]
    host.advance(host.now_ms + 120_000)
    assert answer() is peer.RemoteAcquired


def test_blocks_without_a_lease_are_a_miss_and_nothing_of_them_is_left():
    """Nothing keeps such pages at the source. They were taken, and failed an assertion in every later event."""
    two = TwoMempools()
    two.hand_off()
    two.acquire()
    (ask,), two.b.asked = two.b.asked, []
    two.a.run(two.a.core.on_peer_call(LINK, ask.message, 0))
    wrong = msgspec.structs.replace(two.a.told.pop().message, lease_id="")
    two.b.run(two.b.core.on_peer_answer(A_HOST, wrong, 0))
    assert two.got()[0].num_blocks == 0
    assert two.b.core.counters["remote_malformed"] == 1
    assert not two.b.core.remote.pulls
    two.b.advance(60_000)


def test_blocks_in_lent_host_memory_go_to_other_hosts_through_that_of_their_own_space():
    """No path reads the loan, by its number."""
    rig = Market()
    rig.core.peer_address = A_HOST
    rig.lend(4)
    rig.leave(ABCD, "abcd")
    rig.copied()
    assert len(rig.core.pools[3].index) == 4
    key = rig.core.pools[0].memory.content_key
    call = peer.RemoteAcquire(call_id=9, content_key=key, hashes=b"".join(ABCD))
    rig.run(rig.core.on_peer_call(LINK, call, rig.now_ms))
    rig.copied()
    assert [space for space, _ in rig.core.serve._leases[LINK].values()] == [1]
