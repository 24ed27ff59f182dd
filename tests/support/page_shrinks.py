"""Fair slices where memory or swap space is less than requests need, without a model (page_engine.py): all of them
are answered, and nothing stands still for longer than it takes to see that it would.
"""

import itertools
import random

import msgspec

from tests.support.page_engine import SimEngine
from tests.support.page_world import World
from tests.unit.mempool_harness import BLOCK_TOKENS, DESCRIPTION


def run_all() -> None:
    """Both schedulers."""
    for depth, number in itertools.product((1, 2), (1, 72, 129, 147)):
        run_in_less_memory(number, depth=depth)
    for depth in (1, 2):
        run_slots_for_who_comes_back(depth=depth)
        run_little_swap_space(depth=depth)
    run_half_of_the_memory_for_good()


def run_in_less_memory(number: int, *, depth: int) -> None:
    """Five requests take turns in 22 pages; then another engine attaches, and half of these are left: all are answered.

    Found: with the last blocks of those that were away in the rest, none that was chosen could come back. Whoever was
    computed again for it was the last in turn, which had no page here: it was computed again for ever.
    """
    world, rng = World("less", 22, swap_pages=400), random.Random(number)
    options = {"slice_steps": 1, "swaps": True}
    engine = SimEngine(world, "e", "less", depth=depth, **options)
    most = (world.num_pages // 2 - 1) * BLOCK_TOKENS
    for i in range(5):
        prompt = bytes(rng.choices(range(3), k=rng.randint(4, most - 8)))
        engine.add(f"r{i}", prompt, min(rng.randint(1, 30), most - len(prompt)), {})
    for _ in range(6 + number % 9):
        engine.turn()
        world.pump()
    other = SimEngine(world, "f", "less", **options)
    for _ in range(700):
        for one in (engine, other):
            one.scheduler._answer_pool()
            one.turn()
        world.pump()
        world.advance(300)
    assert not engine.unfinished, engine.describe()


def run_slots_for_who_comes_back(*, depth: int) -> None:
    """Eight requests in memory for two or three, in turns that are as short as the way back.

    Found: whose blocks were arriving lost the slot to the next one that had waited too long, by then in vain, as that
    one's were away: nobody ever ran.
    """
    burst = {"patience_slices": 2, "quantum_tokens": 1 << 20, "spread_ms": 50.0, "chunk_tokens": 4}
    for rules, number in itertools.product(({"patience_slices": 1}, burst), (1, 2, 3)):
        world, rng = World("turns", 34, swap_pages=400), random.Random(number)
        engine = SimEngine(world, "e", "turns", depth=depth, slice_steps=1, rules=rules, swaps=True)
        for i in range(8):
            engine.add(f"r{i}", bytes(rng.choices(range(3), k=rng.randint(20, 44))), rng.randint(16, 32), {})
        _finish([engine], most_turns=1_000, most_idle=60)


def run_little_swap_space(*, depth: int) -> None:
    """Swap space for a part of one request.

    Found: the first blocks of its prompt left, and those behind them stayed. No page came free, as prompts are evicted
    from their ends, and the engine had fewer pages than all that it could get: nothing ran for 5 s at a time.
    """
    for swap_pages, number in itertools.product((3, 5), (1, 2)):
        world, rng = World("little", 24, kept_share=1.0, swap_pages=swap_pages), random.Random(number)
        engine = SimEngine(world, "e", "little", depth=depth, slice_steps=4, swaps=True)
        for i in range(3):
            engine.add(f"r{i}", bytes(rng.choices(range(3), k=40)), 24, {})
        _finish([engine], most_turns=1_500, most_idle=60)


def run_half_of_the_memory_for_good() -> None:
    """Twelve requests; another engine attaches. It takes 5 s until nobody believes in the other half any more, once.

    Found: each time that nothing could go on took as long again, for as long as the engine lived.
    """
    most = 44  # tokens of a request, which the mempool knows of
    for number in (2, 13, 15, 18, 129):
        world, rng = World("half", 24, kept_share=1.0, swap_pages=400), random.Random(number)
        world.description = msgspec.structs.replace(DESCRIPTION, max_model_len=most)
        engine = SimEngine(world, "e", "half", depth=2, slice_steps=8, swaps=True)
        for i in range(12):
            prompt = bytes(rng.choices(range(3), k=rng.randint(4, most - 8)))
            engine.add(f"r{i}", prompt, min(rng.randint(1, 30), most - len(prompt)), {})
        for _ in range(6):
            engine.turn()
            world.pump()
            world.advance(10)
        other = SimEngine(world, "f", "half", slice_steps=8, swaps=True)
        assert _finish([engine, other], most_turns=2_000, most_idle=520) <= 900


def _finish(engines: list[SimEngine], *, most_turns: int, most_idle: int) -> int:
    """Turns of 10 ms until the first is done. Returns: in how many it computed nothing; never `most_idle` in a row."""
    engine, world = engines[0], engines[0].world
    idle = before = total = 0
    for _ in range(most_turns):
        if not engine.unfinished:
            return total
        for one in engines:
            one.scheduler._answer_pool()
            one.turn()
        world.pump()
        world.advance(10)
        computed = engine.scheduler.fair_counts["computed_tokens"]
        idle, before = (idle + 1 if computed == before else 0), computed
        total += idle > 0
        assert idle <= most_idle, engine.describe()
    raise AssertionError(f"never answered: {engine.describe()}")
