"""An engine whose memory becomes less than its requests were begun for, without a model (page_engine.py)."""

import itertools
import random

from tests.support.page_engine import SimEngine
from tests.support.page_world import World
from tests.unit.mempool_harness import BLOCK_TOKENS


def run_all() -> None:
    """Both schedulers."""
    for depth, number in itertools.product((1, 2), (1, 72, 129, 147)):
        run_in_less_memory(number, depth=depth)


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
