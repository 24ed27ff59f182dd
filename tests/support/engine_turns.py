"""Turns of engines of page_engine.py, for scenarios."""

import random

from tests.support.page_engine import SimEngine
from tests.support.page_world import World
from tests.unit.mempool_harness import BLOCK_TOKENS

TURN_MS = 10


def some(rng: random.Random, num_blocks: float) -> bytes:
    """Tokens."""
    return bytes(rng.randrange(3) for _ in range(int(num_blocks * BLOCK_TOKENS)))


def settle(world: World, engine: SimEngine, other: SimEngine | None = None) -> None:
    """Until everything is answered."""
    for _ in range(400):
        if not engine.unfinished and not engine.steps:
            return
        engine.turn()
        if other is not None:
            other.scheduler._answer_pool()
        world.pump()
        world.advance(TURN_MS)
    raise AssertionError(f"no end: {engine.describe()}, {world.describe()}")


def turn(world: World, engine: SimEngine) -> None:
    """One, and all messages."""
    engine.turn()
    world.pump()
    world.advance(TURN_MS)
