"""What engines of the campaign compute: chains of blocks."""

import random
from collections.abc import Sequence

from tests.fault.campaign_world import World
from tests.integration.mempool_rig import SEED, chain


class Prompt:
    """A chain of blocks. Prompts of a family share prefixes, so that blocks are found, or sealed twice.

    Args: names: of the blocks, instead of some of the family's.
    """

    def __init__(
        self, world: World, family: str, num_ranks: int, longest: int = 4, names: Sequence[str] = ()
    ) -> None:
        rng: random.Random = world.rng
        if not names:
            names = [f"{family}{rng.randrange(3)}", *(["x"] if rng.random() < 0.5 else [])]
            names += [f"{rng.randrange(30)}" for _ in range(rng.randint(1, longest - len(names)))]
        self.hashes: list[bytes] = [bytes(h) for h in chain(*names)]
        self.parents: list[bytes] = [bytes(SEED), *self.hashes[:-1]]
        own = chain(*names, f"answer {rng.randrange(1 << 30)}")[-1]
        self.answer = bytes(own)
        self.handoff = f"h{rng.randrange(1 << 40)}"
        world.note_blocks((*self.hashes, self.answer), num_ranks)
