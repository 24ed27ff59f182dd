"""Orders of events in an engine's scheduler that are rare: `python -m tests.support.rare_engine_orders`.

The schedulers, the block pool and the mempool's core are the real ones; there is no model (page_engine.py). Prints a
line of JSON: by claim, how it failed, or nothing.
"""

import json
import random
import sys
import traceback
from unittest import mock

from vllm.v1.request import RequestStatus

from shared.engine.early_requests import EARLY_KEY
from shared.engine.lease_stalls import NEXT_S, STALL_S
from shared.engine.page_swaps import LEASED, SEALED
from tests.support import rare_far_orders
from tests.support.engine_turns import TURN_MS, settle, some, turn
from tests.support.page_engine import SimEngine
from tests.support.page_world import World, hashes_of
from tests.unit.mempool_harness import BLOCK_TOKENS

# -- fair slices -------------------------------------------------------------------------------------------


def lease_ends_under_hits() -> None:
    """A newcomer found blocks that only the lease of another pins, which ended to make way for it: in vLLM's touch()
    of what was no block any more the engine ended.
    """
    for depth in (1, 2):
        rng, name = random.Random(3), f"hits-{depth}"
        world = World(name, 40)
        prefill, engine = SimEngine(world, "a", name), SimEngine(world, "b", name, depth=depth, slice_steps=4)
        world.pump()
        front = world.client(engine.instance)
        begin = some(rng, 1)
        prefill.add("prefill", begin, 1, {})
        settle(world, prefill, engine)
        lease = world.acquired(front, hashes_of(begin))
        engine.add("turn", begin + some(rng, 0.25), 8 * BLOCK_TOKENS - 1, lease)
        settle(world, engine, prefill)
        said = engine.answers["turn"].prompt + engine.answers["turn"].text
        engine.add("runs", some(rng, 3), 20, {})
        for _ in range(8):
            engine.turn()
            world.pump()
            world.advance(TURN_MS)
        engine.add("newcomer", begin + some(rng, 15.5), 2, {})
        lease = world.acquired(front, hashes_of(said)[: len(said) // BLOCK_TOKENS])
        engine.add("next turn", said + some(rng, 0.25), 4, lease)
        kinds = [engine.pool.kinds[block.block_id] for block in engine.scheduler.leases["next turn"][1]]
        assert kinds[0] == LEASED, kinds
        assert SEALED in kinds, kinds
        settle(world, engine, prefill)
        assert engine.quota.counters["leases_dropped"] == 1


def leases_of_those_that_wait() -> None:
    """They end as in the order of arrival: after a while, one after the other, and not one a step at once."""
    rng = random.Random(5)
    world = World("waiting", 80, swap_pages=60)
    prefill = SimEngine(world, "a", "waiting")
    engine = SimEngine(world, "b", "waiting", slice_steps=4, swaps=True)
    world.pump()
    front, prompts = world.client(engine.instance), [some(rng, 6) for _ in range(4)]
    for number, prompt in enumerate(prompts):
        prefill.add(f"p{number}", prompt, 1, {})
    settle(world, prefill, engine)
    leases = [world.acquired(front, hashes_of(prompt)) for prompt in prompts]
    world.mempool.pool.claim(70)  # the engine's stock goes to whoever asks while it is idle
    world.mempool.run(world.mempool.pool.flush())
    world.pump()
    engine.scheduler._answer_pool()
    world.pump()
    engine.add("first", some(rng, 22), 4, {})
    for number, (prompt, lease) in enumerate(zip(prompts, leases, strict=True)):
        engine.add(f"d{number}", prompt + some(rng, 0.25), 8, lease)
    scheduler, left = engine.scheduler, []
    for now_ms in (0, 0, 0, int(STALL_S * 1e3) - 1, 1, 0, 0, int(NEXT_S * 1e3), 0):
        world.advance(now_ms)
        engine.turn()
        left.append(len(scheduler.leases))
    assert left == [4, 4, 4, 4, 3, 3, 3, 2, 2], left


def mempool_lost_while_it_is_answered() -> None:
    """It is lost behind the first look at it: what is away was not asked for again, and waited for nobody's answer."""
    world = World("answered", 40, swap_pages=60)
    engine = SimEngine(world, "e", "answered", slice_steps=4, swaps=True)
    world.pump()
    swapper = engine.scheduler.swapper

    def lost(_: object) -> None:
        world.lose_mempool()
        world.start_successor()

    with mock.patch.object(swapper, "hear", lost), mock.patch.object(swapper, "lost_pool") as lost_pool:
        engine.scheduler._answer_pool()
    assert engine.quota.counters["reattached"] == 1
    assert lost_pool.call_count == 1


def lease_comes_behind_its_request() -> None:
    """With the lease it is as if both had come together; one that is aborted before takes nothing of its lease."""
    for depth in (1, 2):
        rng, name = random.Random(7), f"early-{depth}"
        world = World(name, 60)
        engine = SimEngine(world, "a", name, depth=depth)
        world.pump()
        front, prompts = world.client(engine.instance), [some(rng, 4.5) for _ in range(3)]
        for number, prompt in enumerate(prompts):
            engine.add(f"p{number}", prompt, 1, {})
        settle(world, engine)
        leases = [world.acquired(front, hashes_of(prompt)) for prompt in prompts]
        for at, (key, prompt) in enumerate(zip(("lives", "leaves", "waits"), prompts, strict=True)):
            engine.add(key, prompt, 4, {EARLY_KEY: key})
            engine.answers[key].lease_id = leases[at]["lease_id"]
        scheduler = engine.scheduler
        for _ in range(5):
            engine.turn()
        assert not scheduler.requests, "nothing waits for its turn before its lease"
        engine.abort("leaves")
        for key, lease in zip(("lives", "leaves"), leases, strict=False):
            scheduler.lease_came(key, lease)
        assert list(scheduler.requests) == list(scheduler.leases) == ["lives"]
        held = [scheduler.holds_lease(lease["lease_id"]) for lease in leases]
        assert held == [True, False, False], "a front releases those that its engine does not know"
        engine.answers["waits"].aborted = True
        ended = scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        assert {request.request_id for request in ended} == {"lives", "waits"}
        engine.answers["lives"].aborted = True
        engine.add("again", prompts[0], 4, {EARLY_KEY: "again"})
        scheduler.lease_came("again", {})  # no lease: it finds what the engine has itself
        settle(world, engine)
        assert engine.answers["again"].finished
        assert (scheduler._early, scheduler._early_keys, scheduler.leases) == ({}, {}, {})


def asked_for_pages_behind_the_plan() -> None:
    """The mempool asks for all pages of the stock while turns are planned, for a while: running requests that counted
    on these took parked ones' instead, or were computed again themselves.
    """
    for depth, number in ((1, 0), (1, 2), (2, 0), (2, 2)):
        world, rng = World(f"behind-{depth}-{number}", 34, swap_pages=400), random.Random(number)
        engine = SimEngine(world, "e", f"behind-{depth}-{number}", depth=depth, slice_steps=4, swaps=True)
        scheduler, pool, claims = engine.scheduler, world.mempool.pool, []
        for i in range(8):
            engine.add(f"r{i}", some(rng, rng.uniform(5, 11)), rng.randint(16, 32), {})

        def planned(
            take_turns=scheduler._take_turns, scheduler=scheduler, world=world, pool=pool, claims=claims
        ) -> list:
            out = take_turns()
            if scheduler._growth and scheduler.pages.stock and len(claims) < 3:
                claims.append(pool.claim(len(scheduler.pages.stock)))
                world.mempool.run(pool.flush())
                world.pump()
            return out

        with mock.patch.object(scheduler, "_take_turns", planned):
            while len(claims) < 3:
                turn(world, engine)
                if claims and claims[-1] in pool.claims:
                    for _ in range(2):
                        turn(world, engine)
                    pool.cancel(claims[-1])
        settle(world, engine)
        counts = scheduler.fair_counts
        assert (counts["recomputed_tokens"], counts["times_preempted"]) == (0, 0), counts


CLAIMS = (
    *rare_far_orders.CLAIMS,
    lease_ends_under_hits,
    leases_of_those_that_wait,
    mempool_lost_while_it_is_answered,
    lease_comes_behind_its_request,
    asked_for_pages_behind_the_plan,
)


def main() -> None:
    """See the module's docstring."""
    found: dict[str, str] = {}
    for claim in CLAIMS:
        if sys.argv[1:] and claim.__name__ not in sys.argv[1:]:
            continue
        found[claim.__name__] = ""
        try:
            claim()
        except Exception:  # noqa: BLE001  whatever it is, the test of this claim tells it
            found[claim.__name__] = traceback.format_exc()[-3_000:]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
