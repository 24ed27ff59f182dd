"""Orders of events that are rare in an engine whose blocks are read where they are (rare_engine_orders.py)."""

import contextlib
import itertools
import random
from typing import Any
from unittest import mock

import msgspec

from shared.engine import pool_watch
from shared.engine.page_swaps import SEALED
from shared.kv.words import u32_bytes
from shared.wire.mempool_far import NO_PLACE, FarMoved
from tests.support.engine_turns import TURN_MS, settle, some, turn
from tests.support.far_world import SIZES, FarEngine, FarWorld, Sizes
from tests.support.page_engine import MAX_MODEL_LEN, STEP_TOKENS


def behind_a_lease(num_leased: int, step_tokens: int = STEP_TOKENS, **how: Any) -> FarEngine:
    """A prompt of nearly twice the memory is answered; it came with a lease of its beginning."""
    rng, name = random.Random(1), f"leased-{num_leased}-{step_tokens}-{how}"
    world = FarWorld(name)
    engine = FarEngine(world, name, **how)
    engine.scheduler.max_num_scheduled_tokens = step_tokens
    world.pump()
    begin = some(rng, num_leased)
    engine.add("before", begin + some(rng, 0.25), 1, {})
    settle(world, engine)
    engine.add_with_lease("long", begin + some(rng, 22 - num_leased), 6, num_leased)
    assert len(engine.scheduler.leases["long"][1]) == num_leased
    settle(world, engine)
    return engine


def fills_its_blocks_in_the_step_under_way() -> None:
    """Nothing but these could leave, and it was computed again for ever."""
    for num_leased in (4, 5, 6, 7):
        for slice_steps in (0, 4):
            engine = behind_a_lease(num_leased, depth=2, slice_steps=slice_steps)
            assert engine.scheduler.far_counts["recomputed_tokens"] == 0
            assert engine.quota.counters["leases_dropped"] == 0


def lease_leaves_too_few_pages() -> None:
    """Steps that end within a block need a page more than they make free: it was computed again for ever."""
    for depth in (1, 2):
        for slice_steps in (0, 4):
            engine = behind_a_lease(7, step_tokens=15, depth=depth, slice_steps=slice_steps)
            assert engine.quota.counters["leases_dropped"] == 1
            assert not engine.scheduler._came_to


def leased_while_going_far() -> None:
    """Its page is fenced still: the engine ended when that step was over."""
    rng = random.Random(0)
    world = FarWorld("going")
    engine = FarEngine(world, "going", depth=2)
    world.pump()
    prompt = some(rng, 15)
    engine.add("other", some(rng, 1.5), 60, {})
    engine.add("first", prompt, 14, {})
    for _ in range(20):
        engine.schedule()
        if engine.scheduler._fenced:
            break
        while len(engine.steps) >= 2:
            engine.execute()
            engine.finish()
        world.pump()
    fenced = {block.block_id for _, blocks in engine.scheduler._fenced for block in blocks}
    engine.add_with_lease("again", prompt, 4, len(prompt))
    leased = {block.block_id for block in engine.scheduler.leases["again"][1]}
    assert fenced & leased, (fenced, leased)
    while engine.scheduler._fenced:
        engine.execute()
        engine.finish()
    assert {engine.pool.kinds[block_id] for block_id in fenced & leased} == {SEALED}
    assert not (fenced - leased) & engine.pool.sealed_pages.keys()
    settle(world, engine)


def lost_in_the_step_of_its_turn() -> None:
    """A parked request: it read the place on, which was the mempool's to give away."""
    for depth in (1, 2):
        rng, name = random.Random(0), f"lost-{depth}"
        world = FarWorld(name)
        engine = FarEngine(world, name, depth=depth, slice_steps=2)
        scheduler = engine.scheduler
        scheduler.max_num_running_reqs = 1
        scheduler._most_pages = 8 * SIZES.num_pages
        take_far, lost = scheduler.quota.take_far, []

        def heard(take_far=take_far, scheduler=scheduler, lost=lost) -> list:
            """The next one to run loses its first block, once."""
            first = next(iter(scheduler.waiting), None)
            places = scheduler.far._far.get(first.request_id) if first is not None else None
            if lost or scheduler.running or not places or scheduler._in_flight(first):
                return take_far()
            lost.append((first, next(iter(places.values()))))
            return [*take_far(), FarMoved(places=u32_bytes([lost[0][1]]), to=u32_bytes([NO_PLACE]))]

        world.pump()
        for number in range(2):
            engine.add(f"t{number}", some(rng, 11), 30, {})
        with mock.patch.object(scheduler.quota, "take_far", heard):
            while not lost:
                engine.turn()
                world.pump()
                world.advance(TURN_MS)
        request, place = lost[0]
        assert request in scheduler.running
        engine.turn()
        table = [block.block_id for block in scheduler._table(request.request_id)]
        assert 1 + scheduler._num_own + place not in table
        assert scheduler.fair_counts["times_preempted"] + scheduler.fair_counts["times_dropped"] == 1
        settle(world, engine)
        assert not scheduler._losing
        for _ in range(8):
            scheduler._answer_pool()
            engine.turn()
            world.pump()
        assert (scheduler.far.in_use, world.maps) == (False, {})


def parked_with_one_beginning() -> None:
    """It fills half of the memory and may not leave, being more than one request's: who came next found no page, and
    nobody ran for ten seconds, again and again, though the others needed none.
    """
    for depth in (1, 2):
        rng, name = random.Random(0), f"beginning-{depth}"
        world = FarWorld(name)
        engine = FarEngine(world, name, depth=depth, slice_steps=2)
        engine.scheduler.max_num_running_reqs = 1
        engine.scheduler._most_pages = 8 * SIZES.num_pages
        world.pump()
        begin = some(rng, 7)
        for number in range(4):
            engine.add(f"a{number}", begin + some(rng, 0.25), 12, {})
            for _ in range(6):
                engine.turn()
                world.pump()
                world.advance(TURN_MS)
        for number in range(2):
            engine.add(f"b{number}", some(rng, 8), 4, {})
        settle(world, engine)
        assert engine.scheduler.fair_counts["times_dropped"] == 0
        assert engine.scheduler.fair_counts["recomputed_tokens"] == 0


def far_and_beside(name: str, depth: int) -> tuple[FarWorld, FarEngine]:
    """Two requests in steps; blocks of "far" alone are read outside, and none is on its way there."""
    rng = random.Random(1)
    world = FarWorld(name)
    engine = FarEngine(world, name, depth=depth)
    world.pump()
    engine.add("far", some(rng, 12), 30, {})
    engine.add("beside", some(rng, 3), 50, {})
    scheduler = engine.scheduler
    for _ in range(100):
        turn(world, engine)
        is_read = set(scheduler.far._far) == {"far"} and not scheduler.far.num_asked
        if is_read and len(scheduler.running) == 2 and not scheduler._fenced:
            return world, engine
    raise AssertionError(engine.describe())


class Ended(Exception):
    """The engine begins anew."""


def has_a_successor(world: FarWorld, engine: FarEngine) -> bool:
    """Whether the engine goes on with it. What a step reads is mapped as long as that runs, whoever died."""
    for _ in engine.steps:
        engine.execute()
    world.lose_mempool()
    world.start_successor()
    try:
        engine.scheduler._answer_pool()
    except Ended:
        return False
    world.attach_rank(engine)
    return True


def leaves_with_the_mempool() -> None:
    """Whose blocks alone were far is aborted in the middle of a step that reads them. The engine went on, and dropped
    the places behind that step with the successor, where they were another request's: a fault, or wrong bytes.
    """
    for depth, is_over in itertools.product((1, 2), (False, True)):
        world, engine = far_and_beside(f"leaves-{depth}-{is_over}", depth)
        if not engine.steps:
            engine.schedule()
        engine.abort("far")
        assert not engine.scheduler.far.in_use
        for _ in range(3 if is_over else 0):
            turn(world, engine)
        with mock.patch.object(pool_watch.os, "_exit", side_effect=Ended):
            assert has_a_successor(world, engine) == is_over
        if is_over:
            settle(world, engine)


def lost_while_it_is_answered() -> None:
    """It is lost behind the first look at it, and its successor is there already: blocks that are read nowhere."""
    for depth in (1, 2):
        world, engine = far_and_beside(f"answered-{depth}", depth)
        is_there, absorb = [], engine.pool.absorb

        def lost(world=world, engine=engine, absorb=absorb, is_there=is_there) -> None:
            absorb()
            if not is_there:
                for _ in engine.steps:
                    engine.execute()
                is_there.append(True)
                world.lose_mempool()
                world.start_successor()

        with (
            mock.patch.object(pool_watch.os, "_exit", side_effect=Ended) as ends,
            mock.patch.object(engine.pool, "absorb", lost),
            contextlib.suppress(Ended),
        ):
            engine.scheduler._answer_pool()
        assert ends.call_count == 1


def stands(engine: FarEngine) -> list[int]:
    """Until everything is answered. Returns: how long each time nothing was computed, in turns, the longest first."""
    found, before = [0], None
    for _ in range(6_000):
        if not engine.unfinished:
            return sorted(found, reverse=True)
        engine.scheduler._answer_pool()
        turn(engine.world, engine)
        computed = engine.scheduler.fair_counts["computed_tokens"]
        found = [*found[:-1], found[-1] + 1] if computed == before else [*found, 0]
        before = computed
    raise AssertionError(f"no end: {engine.describe()}")


def private_ones(name: str, depth: int) -> FarEngine:
    """Whose blocks may not leave: more of them than there is memory for."""
    rng = random.Random(1)
    world = FarWorld(name, Sizes(24, 40, 48, 200))
    world.description = msgspec.structs.replace(world.description, max_model_len=MAX_MODEL_LEN)
    engine = FarEngine(world, name, depth=depth, slice_steps=2)
    engine.scheduler.max_num_running_reqs = 2
    world.pump()
    for number in range(6):
        engine.add(f"p{number}", some(rng, 12.5), 24, {"private": True})
    return engine


def parked_that_may_not_leave() -> None:
    """Nobody ran for ten seconds, again and again, though the engine had all pages that there are."""
    for depth in (1, 2):
        found = stands(private_ones(f"private-{depth}", depth))
        assert found[0] <= 40, found[:9]


def parked_where_pages_are_gone_for_good() -> None:
    """It takes ten seconds until nobody believes in them any more, once: each time it took as long again."""
    for depth in (1, 2):
        name = f"gone-{depth}"
        engine = private_ones(name, depth)
        for _ in range(6):
            turn(engine.world, engine)
        engine.world.mempool.pool.claim(3)
        engine.world.mempool.run(engine.world.mempool.pool.flush())
        found = stands(engine)
        assert found[1] <= 40, found[:9]


CLAIMS = (
    fills_its_blocks_in_the_step_under_way,
    lease_leaves_too_few_pages,
    leased_while_going_far,
    lost_in_the_step_of_its_turn,
    parked_with_one_beginning,
    leaves_with_the_mempool,
    lost_while_it_is_answered,
    parked_that_may_not_leave,
    parked_where_pages_are_gone_for_good,
)
