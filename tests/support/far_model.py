"""Engines with far places (far_world.py), without a model: `python -m tests.support.far_model EXAMPLES SEED...`.

With `fair` behind the examples' number they run in fair slices, with more requests than slots.

The scheduler, the block pool, the wire's messages and the mempool's decisions are the real ones; copies and mappings
end when the example lets them, steps are one or two deep, clients leave, and pages are lent, wanted back and lent
again at any moment, so that blocks that are read move both ways. Prompts begin as earlier ones did, and come with a
lease of what the mempool has of them, also of what is just going far.
"""

import random
import sys
from typing import Any

from tests.support.far_world import SIZES, FarEngine, FarWorld
from tests.support.page_swap_space import DRAM, LENT

NUM_PAGES = SIZES.num_pages
NUM_TURNS = 90
LONGEST = 80  # tokens of a prompt


def ask(rng: random.Random, engine: FarEngine, texts: list[bytes]) -> None:
    """A prompt that is new, or begins as one of the last ones, or is one."""
    text = bytes(rng.randrange(3) for _ in range(rng.choice([6, 20, 44, 70, LONGEST])))
    if texts and rng.random() < 0.5:
        begin = rng.choice(texts)
        text = rng.choice([begin, (begin[: rng.randint(1, len(begin))] + text)[:LONGEST]])
    texts[:] = [*texts[-3:], text]
    most_blocks = rng.choice([0, 2, 4, LONGEST, LONGEST])
    engine.add_with_lease(f"r{len(engine.answers)}", text, rng.randint(1, 14), most_blocks)


def example(rng: random.Random, number: int, *, is_fair: bool = False) -> dict[str, int]:
    """One engine's life. Returns: what it counted."""
    name = f"far-{number}"
    world = FarWorld(name)
    how: dict[str, Any] = {"depth": rng.choice([1, 2, 2]), "v2_runner": rng.random() < 0.5}
    if is_fair:
        how |= {"slice_steps": rng.choice([1, 2, 4])}
    engine = FarEngine(world, name, **how)
    most = 7 if is_fair else 3
    if is_fair:
        engine.scheduler.max_num_running_reqs = rng.choice([1, 2, 4])
        engine.scheduler._most_pages = 8 * NUM_PAGES  # as if there were memory for as many to be parked
    world.pump()
    texts: list[bytes] = []
    for _ in range(NUM_TURNS):
        world.holds_copies, world.holds_maps = rng.random() < 0.3, rng.random() < 0.3
        if len(engine.unfinished) < most and rng.random() < 0.4:
            ask(rng, engine, texts)
        if engine.unfinished and rng.random() < 0.05:
            engine.abort(rng.choice(engine.unfinished))
        if rng.random() < 0.1:
            world.want_back(rng.choice([DRAM, LENT]))
        if rng.random() < 0.1:
            world.lend()
        turns = [engine.schedule, engine.execute, engine.finish, world.pump, world.map_one, world.end_copy]
        for turn in rng.choices(turns, weights=[4, 4, 4, 3, 1, 1], k=6):
            turn()
            if engine.scheduler._fenced and engine.unfinished and rng.random() < 0.2:
                ask(rng, engine, [engine.answers[rng.choice(engine.unfinished)].prompt])
        world.advance(rng.choice([1, 30, 400]))
    world.holds_copies = world.holds_maps = False
    for _ in range(3_000):
        if not engine.unfinished:
            break
        world.pump()
        engine.turn()
        world.advance(5)
    else:
        raise AssertionError(f"no end: {how}, {engine.describe()}, {vars(engine.scheduler.far)}")
    for _ in range(8):
        engine.turn()
        world.pump()
        engine.scheduler._answer_pool()
    far = world.mempool.swap.swaps.far
    assert not engine.scheduler.far.in_use, vars(engine.scheduler.far)
    assert (far.num_placed, world.maps, world.asked) == (0, {}, []), (far.num_placed, world.maps)
    assert not engine.scheduler._fenced
    assert not engine.scheduler.leases, engine.describe()
    assert not engine.scheduler._ended_leases, engine.describe()
    counts = {**engine.scheduler.far_counts, "blocks_back": far.counters["far_blocks_back"]}
    if not is_fair:
        return counts
    return {**counts, **{f"fair_{name}": n for name, n in engine.scheduler.fair_counts.items()}}


def take_turns(*, depth: int, v2_runner: bool) -> None:
    """Four requests in two slots, with nearly three times the memory's blocks: nothing is computed twice."""
    name = f"turns-{depth}-{v2_runner}"
    world = FarWorld(name)
    engine = FarEngine(world, name, depth=depth, v2_runner=v2_runner, slice_steps=2)
    engine.scheduler.max_num_running_reqs = 2
    engine.scheduler._most_pages = 8 * NUM_PAGES
    world.pump()
    for number in range(4):
        engine.add(f"t{number}", bytes((number + at * at) % 3 for at in range(20)), 12, {})
    for _ in range(1_000):
        if not engine.unfinished:
            break
        engine.turn()
        world.pump()
        world.advance(5)
    assert not engine.unfinished, engine.describe()
    far, fair = engine.scheduler.far_counts, engine.scheduler.fair_counts
    assert far["blocks_out"] >= NUM_PAGES, far
    assert fair["times_resumed"] >= 8, fair
    assert (fair["recomputed_tokens"], fair["times_dropped"], far["blocks_lost"]) == (0, 0, 0), (fair, far)


def fill_the_memory(*, depth: int, v2_runner: bool) -> None:
    """Two prompts that have room here and outside together: who finds no page waits for those on their way, and the
    other is not computed again for it.
    """
    name = f"full-{depth}-{v2_runner}"
    world = FarWorld(name)
    engine = FarEngine(world, name, depth=depth, v2_runner=v2_runner, slice_steps=1)
    engine.scheduler.max_num_running_reqs = 1
    engine.scheduler._most_pages = 8 * NUM_PAGES
    world.pump()
    for number in range(2):
        engine.add(f"p{number}", bytes((number + at * at) % 3 for at in range(70)), 6, {})
    for _ in range(200):
        if not engine.unfinished:
            break
        engine.turn()
        world.pump()
        world.advance(5)
    assert not engine.unfinished, engine.describe()
    fair = engine.scheduler.fair_counts
    assert fair["times_resumed"] >= 2, fair
    assert (fair["recomputed_tokens"], fair["times_dropped"]) == (0, 0), fair


def main() -> None:
    """See the module's docstring."""
    totals: dict[str, int] = {}
    words = sys.argv[2:]
    is_fair = words[0] == "fair"
    if is_fair:
        for depth, v2_runner in ((1, False), (1, True), (2, False), (2, True)):
            take_turns(depth=depth, v2_runner=v2_runner)
            fill_the_memory(depth=depth, v2_runner=v2_runner)
    for seed in map(int, words[is_fair:]):
        for number in range(int(sys.argv[1])):
            try:
                found = example(random.Random(f"{seed}-{number}"), number, is_fair=is_fair)
            except BaseException:
                print(f"seed {seed}, example {number}", file=sys.stderr)
                raise
            for key, count in found.items():
                totals[key] = totals.get(key, 0) + count
    print(totals)
    fair = ("fair_times_parked", "fair_times_resumed") if is_fair else ()
    assert all(
        totals.get(name)
        for name in ("blocks_out", "blocks_moved", "blocks_back", "steps_without_pages", *fair)
    ), totals


if __name__ == "__main__":
    main()
