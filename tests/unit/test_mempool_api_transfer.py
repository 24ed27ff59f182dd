"""transfer and transfer_with_insert, in one mempool and between two: named after the last byte, or not at all."""

from dataclasses import replace

import pytest

from shared.wire import mempool_api as wire
from shared.wire.mempool_api import InsertFlags, MatchFlags, Medium, TransferFlags
from tests.unit.mempool_api_rig import ApiRig, D, Net, P, raw, singly
from tests.unit.mempool_harness import SEED, chain

PROMPT = chain("a", "b", "c", "d")
HASHES = b"".join(PROMPT)
PIN = int(MatchFlags.PIN)


class Pair:
    """A caller of P, a receiver of D; in one mempool or in two."""

    def __init__(self, apart: bool) -> None:
        net = Net()
        if apart:
            self.here, self.there = ApiRig(P, net=net), ApiRig(D, net=net)
            self.here.link(self.there)
        else:
            self.here = self.there = ApiRig(P, D, net=net)
        self.caller = self.here.connect(P)
        self.receiver = self.there.connect(D, receives=True)
        self.pages = self.here.save(self.caller, PROMPT, flags=int(InsertFlags.PIN))

    def transfer(self, **fields):
        return self.here.call(
            self.caller, wire.Transfer, **({"target": D, "sources": raw(self.pages)} | fields)
        )

    def delivered(self) -> list[wire.Delivered]:
        return [m for m in self.there.sent[self.receiver] if isinstance(m, wire.Delivered)]

    def target_space(self) -> int:
        return self.there.api.homes[D].hbm.space

    def settled(self) -> None:
        """No copy, no pin but the caller's, nothing half done."""
        for rig in {self.here, self.there}:
            assert not rig.held
            assert not rig.api.moves.busy
            assert not rig.api.moves.busy.num_dying
            assert all(h.num_open == 0 for h in rig.api.holders.values())
        assert self.there.api.homes[D].hbm.index.num_pinned == 0


@pytest.fixture(params=[False, True], ids=["one mempool", "two mempools"])
def pair(request) -> Pair:
    return Pair(request.param)


INSERT = {"insert": True, "parent": SEED, "hashes": HASHES}


def test_transferred_pages_are_the_receivers_with_the_private_data_intact(pair):
    private = bytes(range(256)) * 100
    reply = pair.transfer(private=private)
    got = wire.unpack_addresses(reply.addresses)
    assert pair.there.read(got) == PROMPT
    (delivered,) = pair.delivered()
    assert (delivered.private, delivered.addresses, delivered.inserted) == (private, reply.addresses, False)
    assert delivered.source == P
    assert pair.there.call(pair.receiver, wire.FreeMem, addresses=reply.addresses).count == 4
    pair.settled()


def test_blocks_are_named_at_the_target_after_the_last_byte(pair):
    pair.there.hold = True
    call_id = pair.here.start(
        pair.caller, wire.Transfer, target=D, sources=raw(pair.pages), private=b"x", **INSERT
    )
    assert pair.there.match(pair.receiver, PROMPT, D) == []
    assert pair.delivered() == []
    assert pair.here.answer(pair.caller, call_id) is None
    pair.there.end_copies()
    found = pair.there.match(pair.receiver, PROMPT, D)
    assert pair.there.read(found) == PROMPT
    assert raw(found) == pair.here.answer(pair.caller, call_id).addresses
    assert [d.inserted for d in pair.delivered()] == [True]
    pair.settled()


def test_only_what_the_target_lacks_moves(pair):
    pair.transfer(sources=raw(pair.pages[:2]), insert=True, parent=SEED, hashes=b"".join(PROMPT[:2]))
    pair.there.hold = True
    call_id = pair.here.start(pair.caller, wire.Transfer, target=D, sources=raw(pair.pages), **INSERT)
    (move,) = pair.there.held
    assert singly(move.sources) == pair.pages[2:]
    pair.there.end_copies()
    assert pair.here.answer(pair.caller, call_id).num_known == 2
    again = pair.transfer(**INSERT)
    assert again.num_known == 4, "nothing moves, and the answer is there at once"
    pair.settled()


def test_blocks_that_the_target_has_are_not_evicted_for_those_that_it_lacks():
    rig = ApiRig(P, D, pages=4, max_held_ratio=1.0)
    caller = rig.connect(P)
    known = rig.save(caller, PROMPT[:1], D, "dram")
    rig.alloc(rig.connect(D), 2, D, "dram")
    sources = raw(rig.save(caller, PROMPT[:3], flags=PIN))
    fields = INSERT | {"sources": sources, "hashes": b"".join(PROMPT[:3])}
    reply = rig.call(caller, wire.Transfer, target=D, flags=int(TransferFlags.DRAM), **fields)
    assert reply.code == "pages.exhausted"
    assert rig.match(caller, PROMPT, D) == known
    assert rig.api.homes[D].dram.index.num_pinned == 0


@pytest.mark.parametrize(
    ("result", "code"), [({"failed": True}, "copy.failed"), ({"stale": (1,)}, "epoch.stale")]
)
def test_a_copy_that_fails_leaves_nothing_at_the_target(pair, result, code):
    free = pair.there.free_pages()
    pair.there.hold = True
    call_id = pair.here.start(
        pair.caller, wire.Transfer, target=D, sources=raw(pair.pages), private=b"x", **INSERT
    )
    pair.there.end_copies(**result)
    assert pair.here.answer(pair.caller, call_id).code == code
    assert pair.there.match(pair.receiver, PROMPT, D) == []
    assert pair.delivered() == []
    assert pair.there.free_pages() == free
    pair.settled()


def test_a_target_that_may_still_be_written_is_not_reused_before_it_is_settled(pair):
    free = pair.there.free_pages()
    pair.there.hold = True
    pair.here.start(pair.caller, wire.Transfer, target=D, sources=raw(pair.pages), **INSERT)
    lost = [a.page for a in singly(pair.there.held[0].targets)[:2]]
    pair.there.end_copies(failed=True, quarantined=lost)
    assert pair.there.free_pages() == free - 2
    pair.there.perform(pair.there.api.on_settled(pair.target_space(), lost))
    assert pair.there.free_pages() == free
    pair.settled()


def test_pages_allocated_remotely_are_targets_and_go_with_their_caller(pair):
    targets = pair.here.alloc(pair.caller, 6, D)
    free = pair.there.free_pages()
    reply = pair.transfer(targets=raw(targets[:4]))
    assert wire.unpack_addresses(reply.addresses) == targets[:4]
    assert pair.there.read(targets[:4]) == PROMPT
    assert pair.delivered() == [], "no private data, and the pages stay the caller's"
    assert pair.here.call(pair.caller, wire.FreeMem, addresses=raw(targets[4:])).count == 2
    assert pair.there.free_pages() == free + 2
    pair.here.perform(pair.here.api.disconnect(pair.caller))
    assert pair.there.free_pages() == free + 6
    pair.settled()


def test_given_targets_are_named_too_and_then_nobodys(pair):
    targets = pair.here.alloc(pair.caller, 4, D)
    reply = pair.transfer(targets=raw(targets), **INSERT)
    assert wire.unpack_addresses(reply.addresses) == targets
    pair.here.perform(pair.here.api.disconnect(pair.caller))
    assert pair.there.match(pair.receiver, PROMPT, D) == targets


def test_pages_that_the_target_allocated_itself_are_targets(pair):
    targets = pair.there.alloc(pair.receiver, 4, D)
    pair.transfer(targets=raw(targets), private=b"layer 3")
    assert pair.there.read(targets) == PROMPT
    assert [d.private for d in pair.delivered()] == [b"layer 3"]


def test_flags_choose_the_medium_and_free_the_source(pair):
    flags = int(TransferFlags.DRAM | TransferFlags.FREE_SOURCE)
    own = pair.here.alloc(pair.caller, 2)
    pair.here.write(own, ["x", "y"])
    reply = pair.transfer(sources=raw(own), flags=flags)
    got = wire.unpack_addresses(reply.addresses)
    assert {a.medium for a in got} == {Medium.DRAM}
    assert pair.there.read(got) == ["x", "y"]
    assert pair.here.call(pair.caller, wire.FreeMem, addresses=raw(own)).count == 0
    pair.transfer(flags=flags)
    assert pair.here.api.homes[P].hbm.index.num_pinned == 0
    pair.settled()


def test_a_source_that_is_freed_while_it_is_read_is_reused_afterwards(pair):
    own = pair.here.alloc(pair.caller, 1)
    pair.here.write(own, ["x"])
    pair.there.hold = True
    call_id = pair.here.start(pair.caller, wire.Transfer, target=D, sources=raw(own))
    assert pair.here.call(pair.caller, wire.FreeMem, addresses=raw(own)).count == 1
    other = pair.here.alloc(pair.caller, 3)
    assert own[0].page not in [a.page for a in other]
    pair.there.end_copies()
    assert pair.here.answer(pair.caller, call_id).addresses
    pair.settled()


def test_a_caller_that_leaves_during_its_transfer_leaves_nothing_behind(pair):
    pair.there.hold = True
    own = pair.here.alloc(pair.caller, 2)
    pair.here.start(pair.caller, wire.Transfer, target=D, sources=raw(own))
    pair.here.perform(pair.here.api.disconnect(pair.caller))
    pair.there.end_copies()
    pair.there.perform(pair.there.api.disconnect(pair.receiver))
    assert pair.here.states(1) == {"free": 12, "sealed": 4}
    assert pair.there.states(pair.target_space()) in ({"free": 16}, {"free": 12, "sealed": 4})
    pair.settled()


def test_without_a_receiver_nothing_is_sent_that_it_would_get(pair):
    pair.there.perform(pair.there.api.disconnect(pair.receiver))
    assert pair.transfer().code == "receiver.none"
    assert pair.transfer(private=b"x", **INSERT).code == "receiver.none"
    assert pair.transfer(**INSERT).addresses
    pair.settled()


def test_a_receiver_that_leaves_meanwhile_fails_the_transfer(pair):
    free = pair.there.free_pages()
    pair.there.hold = True
    call_id = pair.here.start(pair.caller, wire.Transfer, target=D, sources=raw(pair.pages))
    pair.there.perform(pair.there.api.disconnect(pair.receiver))
    pair.there.end_copies()
    assert pair.here.answer(pair.caller, call_id).code == "receiver.none"
    assert pair.there.free_pages() == free
    pair.settled()


def test_sources_must_be_held_and_current(pair):
    other = pair.here.connect(P)
    reply = pair.here.call(other, wire.Transfer, target=D, sources=raw(pair.pages))
    assert reply.code == "address.not_held"
    stale = [pair.pages[0]._replace(epoch=pair.pages[0].epoch - 1)]
    assert pair.transfer(sources=raw(stale)).code == "epoch.stale"
    assert pair.transfer(sources=raw(pair.pages * 2)).code == "invalid_request"
    assert pair.transfer(target="nobody").code == "instance.unknown"
    assert pair.transfer(private=b"x" * (wire.MAX_PRIVATE_BYTES + 1)).code == "invalid_request"
    assert pair.transfer(targets=raw(pair.pages[:1])).code == "invalid_request"
    assert pair.transfer(insert=True, parent=SEED, hashes=PROMPT[0]).code == "invalid_request"
    pair.settled()


def test_targets_are_checked_where_they_are(pair):
    foreign = pair.there.connect(D)
    targets = pair.there.alloc(foreign, 4, D)
    pair.there.perform(pair.there.api.disconnect(foreign))
    assert pair.transfer(targets=raw(targets)).code == "epoch.stale"
    named = pair.there.save(pair.receiver, chain("n", "o", "p", "q"), D, flags=PIN)
    assert pair.transfer(targets=raw(named)).code == "invalid_request"
    pair.there.call(pair.receiver, wire.FreeMem, addresses=raw(named))
    pair.settled()


def test_two_transfers_never_write_one_target(pair):
    targets = pair.there.alloc(pair.receiver, 4, D)
    pair.there.hold = True
    pair.here.start(pair.caller, wire.Transfer, target=D, sources=raw(pair.pages), targets=raw(targets))
    assert pair.transfer(targets=raw(targets)).code == "invalid_request"
    fields = {"parent": SEED, "hashes": HASHES, "addresses": raw(targets)}
    assert pair.there.call(pair.receiver, wire.InsertBlocks, **fields).code == "invalid_request"
    pair.there.end_copies()
    pair.settled()


# -- two mempools ------------------------------------------------------------------------------------


def test_a_peer_that_does_not_answer_costs_its_timeout_and_no_page():
    pair = Pair(True)
    pair.here.net.cut = True
    call_id = pair.here.start(pair.caller, wire.Transfer, target=D, sources=raw(pair.pages), timeout_ms=700)
    assert pair.here.api.next_deadline_ms() == 700
    pair.here.perform(pair.here.api.tick(699))
    assert pair.here.answer(pair.caller, call_id) is None
    pair.here.perform(pair.here.api.tick(700))
    assert pair.here.answer(pair.caller, call_id).code == "peer.timeout"
    assert pair.here.call(pair.caller, wire.FreeMem, addresses=raw(pair.pages)).count == 4
    assert pair.here.api.homes[P].hbm.index.num_pinned == 0


def test_pages_of_an_allocation_that_came_too_late_go_back():
    pair = Pair(True)
    pair.here.net.cut = True
    call_id = pair.here.start(pair.caller, wire.AllocMem, num_blocks=3, mem_type="hbm", instance=D)
    pair.here.perform(pair.here.api.tick(60_000))
    assert pair.here.answer(pair.caller, call_id).code == "peer.timeout"
    pair.here.net.cut = False
    link = pair.there._links[pair.here.number]
    late = pair.there.api.on_call(link, wire.AllocMem(call_id=1, num_blocks=3, mem_type="hbm", instance=D), 0)
    free = pair.there.free_pages()
    pair.there.perform(late)
    assert pair.there.free_pages() == free + 3


def test_a_peer_that_is_gone_ends_its_calls_and_frees_what_it_had():
    pair = Pair(True)
    targets = pair.here.alloc(pair.caller, 2, D)
    assert targets
    pair.there.hold = True
    call_id = pair.here.start(pair.caller, wire.Transfer, target=D, sources=raw(pair.pages))
    pair.here.perform(pair.here.api.lose_peer(pair.there.number))
    assert pair.here.answer(pair.caller, call_id).code == "peer.gone"
    assert pair.transfer().code == "instance.unknown"
    pair.there.perform(pair.there.api.disconnect(pair.there._links[pair.here.number]))
    pair.there.end_copies()
    assert pair.there.states(pair.target_space()) == {"free": 12, "writing": 4}, "the receiver got them"


def test_what_a_peer_has_moved_is_never_read_from_pages_here():
    """Its instance has been here once, or is called as one of these: addresses do not say whose mempool's they are."""
    here = ApiRig(P, D)
    link = here.connect("mempool-1", is_mempool=True)
    here.connect(D, receives=True)
    own = here.save(here.connect(P), PROMPT)
    order = wire.Transfer(call_id=3, target=D, sources=raw(own))
    reply = here.call(link, wire.PullPages, source=P, order=order)
    assert (reply.code, here.held) == ("invalid_request", [])


def test_a_caller_that_leaves_frees_all_that_it_had_at_a_peer_in_calls_that_are_taken():
    net = Net()
    here, there = (ApiRig(each, net=net, pages=32, max_blocks_per_call=3) for each in (P, D))
    here.link(there)
    caller = here.connect(P)
    free = there.free_pages()
    for _ in range(3):
        here.alloc(caller, 3, D)
    assert there.free_pages() == free - 9
    there.api.limits = replace(there.api.limits, max_calls_open=0)  # of giving back there is never too much
    here.perform(here.api.disconnect(caller))
    assert there.free_pages() == free


def test_only_mempools_ask_to_pull():
    pair = Pair(True)
    order = wire.Transfer(call_id=1, target=D, sources=raw(pair.pages))
    assert pair.there.call(pair.receiver, wire.PullPages, source=P, order=order).code == "invalid_request"


def test_a_target_that_is_given_up_while_it_is_written_is_not_named(pair):
    targets = pair.there.alloc(pair.receiver, 4, D)
    free = pair.there.free_pages()
    pair.there.hold = True
    call_id = pair.here.start(
        pair.caller, wire.Transfer, target=D, sources=raw(pair.pages), targets=raw(targets), **INSERT
    )
    assert pair.there.call(pair.receiver, wire.FreeMem, addresses=raw(targets[:1])).count == 1
    assert pair.there.free_pages() == free, "a copy writes it"
    pair.there.end_copies()
    assert pair.here.answer(pair.caller, call_id).code == "epoch.stale"
    assert pair.there.match(pair.receiver, PROMPT, D) == []
    assert pair.there.free_pages() == free + 1
    pair.settled()
