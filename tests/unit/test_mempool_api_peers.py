"""Instances of other hosts' mempools in the nine calls: who is asked, what may be read, how transfers end."""

import pytest

from services.mempool.core import api_peers
from services.mempool.core.actions import ApiSend, AskPeer, PoolLimits, PullRemote, TellPeer
from services.mempool.core.api_peers import CHECK_TIMEOUT_MS, FIRST_CONNECTION, FIRST_NUMBER, ApiPeers
from services.mempool.core.api_state import CallPeer, MovePages
from services.mempool.core.mempool import Mempool
from shared.errors import PeerProtocolError
from shared.ids import Epoch, InstanceId, PageId, SpaceId
from shared.kv.words import u32_bytes, u32_list, u64_list
from shared.wire import mempool_api as wire
from shared.wire import mempool_peer as peer_wire
from shared.wire.mempool_api import Medium
from tests.unit.mempool_api_rig import ApiRig, D, P, Q

ORDER = 12  # number of the transfer at the source
HERE, THERE = "tcp://10.0.0.1:1", "tcp://10.0.0.2:1"


class Peers:
    """Of a mempool that serves P; two others are named to it."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, bool, list[int], bool]] = []
        self.rig = ApiRig(P)
        self.api = self.rig.api
        self.core = ApiPeers(
            self.api, lambda n, failed, doubt, stale: self.ends.append((n, failed, [*doubt], stale))
        )
        self.core.addresses = (HERE, THERE)
        self.taken: list[tuple[int, int, list[PageId]]] = []

    def here(self, *instances: InstanceId, address: str = THERE) -> None:
        assert self.core.on_answer(address, peer_wire.Here(instances=list(instances)), 0) is None

    def actions(self, kind: type) -> list:
        return [action for action in self.core.take_actions() if isinstance(action, kind)]

    def move(self, *pairs: tuple[int, int]) -> list[PullRemote]:
        """Pages 5, 6, ... of these (source space, target space)."""
        sources, targets = (
            b"".join(packed(space, 5 + at, 100 + at) for at, space in enumerate(column))
            for column in zip(*pairs, strict=True)
        )
        action = MovePages(
            1, D, wire.unpack_stretches(sources), P, wire.unpack_stretches(targets), 900, ORDER
        )
        self.core.move(action, lambda number, space, pages: self.taken.append((number, space, pages)))
        return self.actions(PullRemote)


def packed(space: int, page: int, epoch: int) -> bytes:
    return wire.pack_addresses(7, Medium.HBM, SpaceId(space), [PageId(page)], [Epoch(epoch)])


@pytest.fixture
def peers():
    found = Peers()
    found.here(D)
    found.actions(object)
    return found


def test_every_peer_is_asked_each_second_and_its_instances_may_be_named_then(peers):
    peers.core.tick(0)
    asked = peers.actions(AskPeer)
    assert [(each.address, each.message) for each in asked] == [
        (a, peer_wire.WhoIsHere()) for a in (HERE, THERE)
    ]
    assert peers.core.next_deadline_ms() == 1_000
    peers.core.tick(999)
    assert not peers.actions(AskPeer)
    peers.here(Q, address=HERE)
    assert peers.api.peers == {D: 1, Q: 0}


def test_what_is_served_here_is_nobody_elses_and_strangers_are_not_believed(peers):
    peers.here(D, P)
    peers.here(Q, address="tcp://10.0.0.9:1")
    assert peers.api.peers == {D: 1}


def test_an_instance_that_a_peer_does_not_name_any_more_is_forgotten(peers):
    peers.here(Q)
    assert peers.api.peers == {Q: 1}


def test_an_instance_that_has_gone_from_a_peer_costs_nobody_what_is_of_the_others_there():
    core, caller = Mempool(PoolLimits(capacity_bytes=1 << 20), Epoch(1)), 1 << 32
    core.peer_address, core.api.peers.addresses = HERE, (THERE,)
    core.on_peer_answer(THERE, peer_wire.Here(instances=[D, Q]), 0)
    core.api.connect(caller, wire.ApiHello(instance=P), None)
    core.api.api.holders[caller].remote = {D: {b"d"}, Q: {b"q"}}
    for call_id, name in enumerate((D, Q)):
        call = wire.AllocMem(call_id=call_id, num_blocks=1, mem_type="dram", instance=name)
        core.api.on_call(caller, call, 0)
    core.after_api(0)
    done = core.on_peer_answer(THERE, peer_wire.Here(instances=[D]), 1)
    assert [a.message.call.addresses for a in done if isinstance(a, AskPeer)] == [b"q"]
    assert [(a.message.call_id, a.message.code) for a in done if isinstance(a, ApiSend)] == [(1, "peer.gone")]
    assert core.api.api.holders[caller].remote == {D: {b"d"}}


def test_the_source_has_no_good_word_for_a_transfer_to_an_instance_that_has_gone(peers):
    peers.here(D)
    peers.core.call(order(4, 5))
    assert peers.core.names(4, 1, [5])
    peers.here()  # the caller hears of it, and may write into its page
    assert not peers.core.names(4, 1, [5])


def test_an_instance_that_comes_here_costs_callers_nothing_that_they_have_at_its_old_host(peers):
    peers.here(D, Q)
    caller = peers.api.holders[peers.rig.connect(P)]
    caller.remote[D] = {b"an address"}
    peers.rig.home(Q, 4)
    peers.here(D, Q)
    assert caller.remote == {D: {b"an address"}}
    assert D in peers.api.peers


def test_of_two_that_serve_one_instance_the_one_that_stays_is_believed(peers):
    peers.here(D, address=HERE)
    assert peers.api.peers == {D: 0}, "who said so last"
    peers.here(D)
    assert peers.api.peers == {D: 0}, "and not who says it most often"
    for number in peers.core.on_lost(HERE):
        peers.api.lose_peer(number)
    peers.here(D)
    assert peers.api.peers == {D: 1}


def test_a_lost_peer_is_unknown_until_it_answers_again(peers):
    for number in peers.core.on_lost(THERE):
        peers.api.lose_peer(number)
    assert peers.api.peers == {}
    peers.here(D)
    assert peers.api.peers == {D: 1}


def test_a_pull_for_each_pair_of_spaces_and_the_sources_word_behind_the_last_byte(peers):
    pulls = peers.move((1, 1), (2, 1), (1, 1))
    assert [(p.address, p.source_space, p.space, p.sources, p.targets) for p in pulls] == [
        (THERE, 1, 1, [5, 7], [5, 7]),
        (THERE, 2, 1, [6], [6]),
    ]
    assert peers.taken == [(p.number, p.space, p.targets) for p in pulls]
    first, second = (p.number for p in pulls)
    assert first >= FIRST_NUMBER
    for number in (first, second):
        assert peers.core.on_pulled(number, failed=False, in_doubt=(), now_ms=0)
    questions = [each.message for each in peers.actions(AskPeer)]
    assert all((question.held, question.order) == (True, ORDER) for question in questions)
    assert [u32_list(q.pages) for q in questions] == [[5, 7], [6]]
    assert [u64_list(q.epochs) for q in questions] == [[100, 102], [101]]
    peers.core.on_answer(THERE, peer_wire.EpochsChecked(call_id=first), 0)
    peers.core.on_answer(THERE, peer_wire.EpochsChecked(call_id=second, stale=u32_bytes([0])), 0)
    assert peers.ends == [(first, False, [], False), (second, False, [], True)]
    peers.core.on_answer(THERE, peer_wire.EpochsChecked(call_id=second), 0)
    assert len(peers.ends) == 2, "a second answer changes nothing"


def ends_by_failing(peers, number):
    peers.core.on_pulled(number, failed=True, in_doubt=[6], now_ms=0)
    return [6]


def ends_by_refusal(peers, number):
    peers.core.on_pulled(number, failed=False, in_doubt=(), now_ms=0)
    peers.core.on_answer(THERE, peer_wire.CallRefused(call_id=number, code="overloaded", reason=""), 0)
    return []


def ends_by_nonsense(peers, number):
    peers.core.on_pulled(number, failed=False, in_doubt=(), now_ms=0)
    peers.core.on_answer(THERE, peer_wire.EpochsChecked(call_id=number, stale=b"odd"), 0)
    return []


def ends_by_time(peers, number):
    peers.core.on_pulled(number, failed=False, in_doubt=(), now_ms=0)
    peers.core.tick(CHECK_TIMEOUT_MS - 1)
    assert not peers.ends
    peers.core.tick(CHECK_TIMEOUT_MS)
    return []


def ends_by_loss(peers, number):
    peers.core.on_pulled(number, failed=False, in_doubt=(), now_ms=0)
    peers.core.on_lost(HERE)
    assert not peers.ends
    peers.core.on_lost(THERE)
    return []


@pytest.mark.parametrize(
    "end", [ends_by_failing, ends_by_refusal, ends_by_nonsense, ends_by_time, ends_by_loss]
)
def test_a_transfer_without_the_sources_word_has_failed_once(peers, end):
    (pull,) = peers.move((1, 1))
    assert peers.core.is_mine(peer_wire.EpochsChecked(call_id=pull.number))
    in_doubt = end(peers, pull.number)
    assert peers.ends == [(pull.number, True, in_doubt, False)]
    assert peers.core.on_pulled(pull.number, failed=False, in_doubt=(), now_ms=0), "it was ours"
    assert len(peers.ends) == 1


def test_pulls_of_other_parts_and_their_answers_are_not_touched(peers):
    assert not peers.core.on_pulled(3, failed=False, in_doubt=(), now_ms=0)
    assert not peers.core.is_mine(peer_wire.EpochsChecked(call_id=3))
    assert not peers.core.is_mine(peer_wire.RemoteAcquired(call_id=3))


def test_a_source_that_nobody_serves_any_more_fails_at_once(peers):
    peers.api.lose_peer(1)
    assert peers.move((1, 1), (2, 1)) == []
    assert [failed for _, failed, _, _ in peers.ends] == [True, True]


def order(call_id: int, *pages: int) -> CallPeer:
    sources = b"".join(packed(1, page, 100) for page in pages)
    given = wire.Transfer(call_id=9, target=D, sources=sources)
    return CallPeer(D, wire.PullPages(call_id=call_id, source=P, order=given))


def test_only_pages_that_a_transfer_under_way_names_may_be_read(peers):
    peers.core.call(order(4, 5, 6))
    peers.core.call(order(5, 6))
    (ask, _) = peers.actions(AskPeer)
    assert isinstance(ask.message, peer_wire.PeerCall)
    assert peers.core.may_read(1, [5, 6])
    assert not peers.core.may_read(1, [5, 7])
    assert not peers.core.may_read(2, [5])
    reply = wire.Addresses(call_id=4, addresses=b"")
    assert peers.core.on_answer(THERE, peer_wire.PeerReply(reply=reply), 0) == reply
    assert not peers.core.may_read(1, [5])
    assert peers.core.may_read(1, [6])
    peers.core.expire([5])
    assert peers.core.may_read(1, [6])
    peers.core.expire([])
    assert not peers.core.may_read(1, [6])
    peers.core.call(order(6, 7))
    peers.core.on_lost(THERE)
    assert not peers.core.may_read(1, [7])


def test_the_reply_of_another_peer_than_was_called_ends_no_transfer(peers):
    peers.core.call(order(4, 5))
    reply = peer_wire.PeerReply(reply=wire.Addresses(call_id=4, addresses=b""))
    for address in (HERE, "tcp://10.0.0.9:1"):
        assert peers.core.on_answer(address, reply, 0) is None
    assert peers.core.may_read(1, [5])
    assert peers.core.on_answer(THERE, reply, 0) == reply.reply
    assert not peers.core.may_read(1, [5])
    assert peers.core.on_answer(THERE, reply, 0) is None, "once"


def test_the_reply_of_another_peer_than_was_called_grants_no_pages(peers):
    caller = peers.rig.connect(P)
    ask = wire.AllocMem(call_id=9, num_blocks=1, mem_type="hbm", instance=D)
    granted = packed(1, 5, 100)

    def call(now_ms: int) -> int:
        (called,) = peers.api.on_call(caller, ask, now_ms)
        peers.core.call(called)
        (asked,) = peers.actions(AskPeer)
        assert asked.address == THERE
        return called.message.call_id

    def answers(address: str, call_id: int, now_ms: int) -> list:
        reply = peer_wire.PeerReply(reply=wire.Addresses(call_id=call_id, addresses=granted))
        found = peers.core.on_answer(address, reply, now_ms)
        return [] if found is None else peers.api.on_peer_reply(found)

    number = call(0)
    assert answers(HERE, number, 1) == []
    assert [each.message.addresses for each in answers(THERE, number, 1)] == [granted]
    number, later_ms = call(2), 3 + peers.api.limits.max_timeout_ms
    peers.api.tick(later_ms)  # the caller hears that it failed
    peers.core.expire(peers.api.moves.forwarded)
    assert answers(HERE, number, later_ms) == []
    (free,) = answers(THERE, number, later_ms)
    assert free == CallPeer(D, wire.FreeMem(call_id=0, addresses=granted)), (
        "the late answer of who was called"
    )


def test_calls_that_nobody_answers_are_forgotten_the_oldest_first(peers, monkeypatch):
    monkeypatch.setattr(api_peers, "MAX_LATE", 2)
    for call_id in (1, 2, 3):
        peers.core.call(CallPeer(D, wire.AllocMem(call_id=call_id, num_blocks=1, mem_type="hbm", instance=D)))
    replies = [peer_wire.PeerReply(reply=wire.Addresses(call_id=n, addresses=b"")) for n in (1, 2, 3)]
    answered = [peers.core.on_answer(THERE, reply, 0) for reply in replies]
    assert answered == [None, replies[1].reply, replies[2].reply]


def test_the_sources_word_is_good_for_the_transfer_that_asks_alone(peers):
    peers.core.call(order(4, 5, 6))
    assert peers.core.names(4, 1, [6, 5])
    assert not peers.core.names(4, 1, [5, 7])
    assert not peers.core.names(4, 2, [5])
    assert peers.core.names(0, 1, [5]), "an earlier version does not say which"
    peers.core.call(order(5, 5))
    peers.core.expire([5])  # the first was given up, and its caller may write into its pages
    assert not peers.core.names(4, 1, [5])
    assert peers.core.names(5, 1, [5])
    peers.core.on_lost(THERE)
    assert not peers.core.names(5, 1, [5])
    assert not peers.core.names(0, 1, [5])


def test_calls_to_a_peer_that_was_lost_meanwhile_go_nowhere(peers):
    peers.api.lose_peer(1)
    peers.core.call(order(4, 5))
    assert not peers.actions(AskPeer)
    assert not peers.core.may_read(1, [5])


def test_answers_to_callers_on_other_hosts_go_to_their_mempool(peers):
    counted = wire.Counted(call_id=4, count=1)
    peers.core.reply(ApiPeers.connection_of(3), counted)
    (told,) = peers.actions(TellPeer)
    assert (told.link, told.message) == (3, peer_wire.PeerReply(reply=counted))
    with pytest.raises(PeerProtocolError):
        peers.core.reply(FIRST_CONNECTION + 3, wire.Evacuated(addresses=b""))
    peers.core.tell_who_is_here(3)
    (told,) = peers.actions(TellPeer)
    assert told.message == peer_wire.Here(instances=[P])
