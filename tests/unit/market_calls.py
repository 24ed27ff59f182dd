"""Calls on the market of market_world.py, as unit tests make them."""

from shared.ids import InstanceId
from shared.wire.lending import AskLease, AskReclaim, Grant, LeaseCall, LendingRefused, OfferMemory, SpaceRef
from tests.support.market_world import GIB, LIMITS, SPACE, World


def led_world():
    """Coordinator a leads and knows both mempools; p0 has offered 4 GiB in m0."""
    made = World()
    made.elect("a", lease_ms=10**9)
    made.settle("a", 1)
    made.pass_ms(LIMITS.report_ttl_ms)
    made.settle("a")
    made.a = made.coordinators["a"]
    made.m0 = made.mempools["m0"]
    offer(made)
    made.settle("a")
    return made


def offer(world, producer="p0", mempool="m0", gib=4, key="", **more):
    found = world.mempools[mempool]
    body = OfferMemory(
        producer=InstanceId(producer), mempool=found.name, boot_generation=found.boot, space=SPACE,
        length_bytes=gib * GIB, **more,
    )  # fmt: skip
    return world.a.offer(body, key, now_ms=world.now_ms)


def ask(world, gib=1, consumer="c0", key="", name="a", mempools=("m0", "m1"), least_gib=0, **more):
    body = AskLease(
        consumer=InstanceId(consumer), length_bytes=gib * GIB, min_bytes=least_gib * GIB, purpose="swap",
        spaces=[SpaceRef(mempool=InstanceId(m), space=SPACE) for m in mempools],
        **more,
    )  # fmt: skip
    return world.coordinators[name].lease(body, key, now_ms=world.now_ms)


def borrow(world, **words):
    grant = ask(world, **words)
    assert isinstance(grant, Grant), grant
    assert world.mempools[grant.mempool].present(grant, world.now_ms)
    world.settle(words.get("name", "a"), 1)
    return grant


def reclaim(world, offer_id, gib=0, deadline_ms=500, producer="p0", key=""):
    body = AskReclaim(
        offer_id=offer_id, producer=InstanceId(producer), length_bytes=gib * GIB, deadline_ms=deadline_ms
    )
    return world.a.reclaim(body, key, now_ms=world.now_ms)


def call(grant):
    return LeaseCall(consumer=grant.consumer, token=grant.token)


def lease_of(world, grant, name="a"):
    return world.coordinators[name].book.leases[grant.lease_id]


def code(answer):
    assert isinstance(answer, LendingRefused), answer
    return answer.code


def the_offer(world):
    return next(iter(world.a.book.offers.values()))
