"""The nine calls, decided: pages have one holder, names come after bytes, and a caller's end leaves nothing behind."""

import pytest

from shared.errors import InvalidRequest, PeerProtocolError
from shared.ids import BlockHash, Epoch, InstanceId, PageId, SpaceId
from shared.wire import mempool_api as wire
from shared.wire.mempool_api import InsertFlags, MatchFlags, Medium, PageAddress
from tests.unit.mempool_api_rig import ApiRig, D, P, raw
from tests.unit.mempool_harness import SEED, chain

PROMPT = chain("a", "b", "c")


@pytest.fixture
def rig() -> ApiRig:
    return ApiRig(P)


def failed(reply) -> str:
    assert isinstance(reply, wire.ApiFailed), reply
    return reply.code


def test_an_address_says_instance_medium_space_page_and_epoch():
    address = PageAddress(
        wire.instance_key(P), Medium.DRAM, SpaceId(65_535), PageId(2**32 - 1), Epoch(2**56 - 1)
    )
    assert len(address.to_bytes()) == wire.ADDRESS_BYTES
    assert PageAddress.from_bytes(address.to_bytes()) == address
    assert wire.instance_key(P) != wire.instance_key(D)


@pytest.mark.parametrize("bad", [b"", b"x" * 23, b"\xff" * 24, b"\0" * 24, b"\0" * 48])
def test_bytes_that_are_no_address_are_a_broken_protocol(bad):
    with pytest.raises(PeerProtocolError):
        PageAddress.from_bytes(bad)


def test_fields_that_do_not_fit_an_address_are_refused():
    with pytest.raises(OverflowError):
        PageAddress(1, Medium.HBM, SpaceId(70_000), PageId(0), Epoch(0)).to_bytes()
    with pytest.raises(OverflowError):
        PageAddress(1, Medium.HBM, SpaceId(0), PageId(2**32), Epoch(0)).to_bytes()


def test_alloc_gives_pages_of_the_medium_asked_for(rig):
    c = rig.connect(P)
    assert {a.medium for a in rig.alloc(c, 3)} == {Medium.HBM}
    assert {a.medium for a in rig.alloc(c, 3, mem_type="dram")} == {Medium.DRAM}
    mixed = rig.alloc(c, 8, mem_type="mixed")
    assert [a.medium for a in mixed] == [Medium.HBM] * 5 + [Medium.DRAM] * 3, "half of a space is the most"
    assert len({(a.space, a.page) for a in mixed}) == 8


def test_alloc_is_all_or_nothing(rig):
    c = rig.connect(P)
    before = rig.free_pages()
    assert (
        failed(rig.call(c, wire.AllocMem, num_blocks=17, mem_type="mixed", instance=P)) == "pages.exhausted"
    )
    assert failed(rig.call(c, wire.AllocMem, num_blocks=0, mem_type="hbm", instance=P)) == "invalid_request"
    assert failed(rig.call(c, wire.AllocMem, num_blocks=1, mem_type="hbm", instance=D)) == "instance.unknown"
    assert rig.free_pages() == before


def test_alloc_evicts_what_nobody_pins(rig):
    c = rig.connect(P)
    for i in range(4):
        rig.save(c, chain(i, 1, 2, 3))
    assert rig.states() == {"sealed": 16}
    rig.alloc(c, 2)
    assert rig.states() == {"sealed": 14, "granted": 2}


def test_free_gives_pages_back_once_and_to_their_holder_only(rig):
    a, b = rig.connect(P), rig.connect(P)
    pages = rig.alloc(a, 3)
    assert rig.call(b, wire.FreeMem, addresses=raw(pages)).count == 0
    assert rig.call(a, wire.FreeMem, addresses=raw(pages[:2])).count == 2
    assert rig.call(a, wire.FreeMem, addresses=raw(pages)).count == 1
    assert rig.states() == {"free": 16}


def test_a_freed_address_does_not_reach_the_next_use_of_the_page(rig):
    c = rig.connect(P)
    old = rig.alloc(c, 1)
    rig.call(c, wire.FreeMem, addresses=raw(old))
    new = rig.alloc(c, 1)
    assert (new[0].page, new[0].epoch) == (old[0].page, old[0].epoch + 1)
    assert rig.call(c, wire.FreeMem, addresses=raw(old)).count == 0
    fields = {"parent": SEED, "hashes": PROMPT[0], "addresses": raw(old)}
    assert failed(rig.call(c, wire.InsertBlocks, **fields)) == "epoch.stale"


def test_a_freed_address_of_before_ends_no_pin_of_the_pages_next_use(rig):
    a = rig.connect(P)
    (old,) = rig.alloc(a, 1)
    assert rig.call(a, wire.FreeMem, addresses=raw([old])).count == 1
    (now,) = rig.save(a, PROMPT[:1], flags=InsertFlags.PIN)
    assert now.page == old.page
    assert rig.call(a, wire.FreeMem, addresses=raw([old])).count == 0
    assert rig.call(a, wire.FreeMem, addresses=raw([now])).count == 1


def test_inserted_pages_are_found_and_no_longer_their_callers(rig):
    c = rig.connect(P)
    placed = rig.save(c, PROMPT)
    assert rig.match(c, [*PROMPT, *chain("z")]) == placed
    assert rig.call(c, wire.FreeMem, addresses=raw(placed)).count == 0
    rig.perform(rig.api.disconnect(c))
    assert rig.states() == {"free": 13, "sealed": 3}


def test_a_block_that_was_known_keeps_its_page_and_the_new_one_is_free(rig):
    c = rig.connect(P)
    first = rig.save(c, PROMPT[:2])
    again = rig.save(c, PROMPT)
    assert again[:2] == first
    assert rig.states() == {"free": 13, "sealed": 3}
    assert rig.read(again) == PROMPT


def test_a_partial_tail_keeps_its_length(rig):
    c = rig.connect(P)
    rig.save(c, PROMPT, last_tokens=3)
    assert [rig.spaces[1].index.get(h).valid_tokens for h in PROMPT] == [4, 4, 3]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"hashes": b"".join(PROMPT[:1])}, "invalid_request"),
        ({"hashes": b"".join([PROMPT[0], PROMPT[0]])}, "invalid_request"),
        ({"hashes": b"".join([SEED, PROMPT[0]])}, "invalid_request"),
        ({"hashes": b"x" * 33}, "invalid_request"),
        ({"parent": BlockHash(b"short")}, "invalid_request"),
        ({"last_tokens": 9}, "invalid_request"),
        ({"addresses": b""}, "invalid_request"),
    ],
)
def test_an_insert_that_makes_no_sense_changes_nothing(rig, fields, code):
    c = rig.connect(P)
    pages = rig.alloc(c, 2)
    call = {"parent": SEED, "hashes": b"".join(PROMPT[:2]), "addresses": raw(pages)} | fields
    assert failed(rig.call(c, wire.InsertBlocks, **call)) == code
    assert rig.call(c, wire.FreeMem, addresses=raw(pages)).count == 2


def test_a_page_named_twice_and_a_page_of_others_are_refused(rig):
    a, b = rig.connect(P), rig.connect(P)
    pages = rig.alloc(a, 1)
    call = {"parent": SEED, "hashes": b"".join(PROMPT[:2]), "addresses": raw(pages * 2)}
    assert failed(rig.call(a, wire.InsertBlocks, **call)) == "invalid_request"
    call = {"parent": SEED, "hashes": PROMPT[0], "addresses": raw(pages)}
    assert failed(rig.call(b, wire.InsertBlocks, **call)) == "address.not_held"


def test_pins_keep_blocks_until_they_are_given_back(rig):
    c, other = rig.connect(P), rig.connect(P)
    placed = rig.save(c, PROMPT, flags=int(InsertFlags.PIN))
    assert rig.match(other, PROMPT, flags=int(MatchFlags.PIN)) == placed
    assert rig.call(other, wire.DeleteBlocks, hashes=b"".join(PROMPT), instance=P).count == 0
    assert rig.call(c, wire.FreeMem, addresses=raw(placed)).count == 3
    assert rig.call(other, wire.DeleteBlocks, hashes=b"".join(PROMPT), instance=P).count == 0
    rig.perform(rig.api.disconnect(other))
    assert rig.call(c, wire.DeleteBlocks, hashes=b"".join(PROMPT), instance=P).count == 3
    assert rig.states() == {"free": 16}


def test_the_end_of_a_connection_gives_everything_back(rig):
    c = rig.connect(P)
    rig.save(c, PROMPT, flags=int(InsertFlags.PIN))
    rig.alloc(c, 4, mem_type="mixed")
    rig.perform(rig.api.disconnect(c))
    assert rig.states() == {"free": 13, "sealed": 3}
    assert rig.spaces[1].index.num_pinned == 0
    assert rig.api.disconnect(c) == []


def test_pages_that_a_living_process_may_write_wait_for_its_death(rig):
    c = rig.connect(P, process=7)
    rig.alloc(c, 2)
    rig.perform(rig.api.disconnect(c))
    assert rig.states() == {"free": 14, "quarantined": 2}
    rig.perform(rig.api.on_process_dead(8))
    rig.perform(rig.api.on_process_dead(7))
    assert rig.states() == {"free": 16}


def test_swap_out_and_in_follow_a_pinned_prompt(rig):
    c = rig.connect(P)
    rig.save(c, PROMPT)
    out = rig.call(c, wire.SwapOut, num_blocks=2, instance=P)
    assert len(wire.unpack_addresses(out.addresses)) == 2
    found = rig.match(c, PROMPT, flags=int(MatchFlags.PIN))
    assert [a.medium for a in found] == [Medium.HBM, Medium.DRAM, Medium.DRAM]
    reply = rig.call(c, wire.SwapIn, addresses=raw(found[1:]))
    back = wire.unpack_addresses(reply.addresses)
    assert [a.medium for a in back] == [Medium.HBM] * 2
    assert rig.read([found[0], *back]) == PROMPT
    assert rig.spaces[2].index.num_pinned == 0
    assert rig.call(c, wire.FreeMem, addresses=raw([found[0], *back])).count == 3
    assert rig.spaces[1].index.num_pinned == 0


def test_a_caller_that_leaves_during_its_swap_leaves_no_pin(rig):
    c = rig.connect(P)
    rig.save(c, PROMPT, mem_type="dram")
    found = rig.match(c, PROMPT, flags=int(MatchFlags.PIN))
    rig.hold = True
    rig.start(c, wire.SwapIn, addresses=raw(found))
    rig.perform(rig.api.disconnect(c))
    rig.end_copies()
    assert [space.index.num_pinned for space in rig.spaces.values()] == [0, 0]


def test_only_pinned_blocks_in_dram_are_swapped_in(rig):
    c = rig.connect(P)
    pages = rig.save(c, PROMPT, flags=int(InsertFlags.PIN))
    assert failed(rig.call(c, wire.SwapIn, addresses=raw(pages))) == "invalid_request"
    cold = rig.save(c, chain("x"), mem_type="dram")
    assert failed(rig.call(c, wire.SwapIn, addresses=raw(cold))) == "address.not_held"


def test_two_instances_of_one_key_are_refused(rig, monkeypatch):
    monkeypatch.setattr(wire, "instance_key", lambda _: 1)
    with pytest.raises(InvalidRequest, match="rename"):
        rig.api.add_peer(InstanceId("a"), 1) or rig.api.add_peer(InstanceId("b"), 1)


def test_a_call_of_nobody_breaks_the_protocol(rig):
    with pytest.raises(PeerProtocolError):
        rig.start(99, wire.FreeMem, addresses=b"")
    with pytest.raises(PeerProtocolError):
        rig.start(rig.connect(P), wire.FreeMem, addresses=b"x" * 24)


def test_bounds_are_kept():
    rig = ApiRig(P, max_blocks_per_call=2, max_calls_open=1)
    c = rig.connect(P)
    assert failed(rig.call(c, wire.AllocMem, num_blocks=3, mem_type="hbm", instance=P)) == "invalid_request"
    assert failed(rig.call(c, wire.FreeMem, addresses=b"x" * 120)) == "invalid_request"
    rig.save(c, PROMPT[:2])
    rig.hold = True
    rig.start(c, wire.SwapOut, num_blocks=1, instance=P)
    assert failed(rig.call(c, wire.SwapOut, num_blocks=1, instance=P)) == "overloaded"
