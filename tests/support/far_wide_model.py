"""Engines with far places of any size: `python -m tests.support.far_wide_model EXAMPLES [fair] SEED...`.

As far_model.py, and besides: sizes of everything, answers in several choices, hand-offs, private requests, claims,
pages that are asked for during a step, copies that fail, mempools that die (an engine with far blocks ends with them),
and a limit: when nothing happens any more but steps, nobody stands still for long. SEED-NUMBER is one example.
"""

import random
import sys
from collections import Counter
from typing import Any
from unittest import mock

import msgspec

from shared.engine import pool_watch
from shared.engine.page_swaps import FAR
from shared.ids import HandoffId
from tests.support.far_world import FarEngine, FarWorld, Sizes
from tests.support.page_engine import MAX_MODEL_LEN
from tests.support.page_swap_space import DRAM, LENT
from tests.support.page_world import hashes_of
from tests.unit.mempool_harness import BLOCK_TOKENS

NUM_TURNS = 90
TURN_MS = 5
MOST_ANSWER = 14  # tokens
MOST_IDLE_MS = 1_500  # a lease in the way ends after 1,000 (lease_stalls.py)
FEATURES = (
    "aborts",
    "resets",
    "spares",
    "lends",
    "claims",
    "failures",
    "losses",
    "private",
    "handoffs",
    "choices",
)
BURST = {"quantum_tokens": 1 << 20, "patience_slices": 2, "spread_ms": 50.0, "chunk_tokens": 4}


class Ended(BaseException):
    """In place of the end of an engine's process."""


class Life:
    """One engine's. Args: rng: everything is its choice."""

    def __init__(self, rng: random.Random, name: str, *, is_fair: bool) -> None:
        self.rng, self.names = rng, 0
        # what all do at once hides what some do
        self.features = {each for each in FEATURES if rng.random() < 0.6}
        self.longest = rng.choice([40, 60, 80])  # tokens of a prompt
        need = -(-(self.longest + MOST_ANSWER) // BLOCK_TOKENS) + 1
        num_pages, far_blocks = rng.choice([5, 6, 8, 8, 12, 16]), need + rng.choice([0, 2, 8])
        far_places = far_blocks + rng.choice([1, 4, 8])
        dram_pages = far_places + rng.choice([0, 1, 30])
        sizes = Sizes(num_pages, far_blocks, far_places, dram_pages, rng.choice([1, 3, 10, 40]))
        self.how: dict[str, Any] = {
            "depth": rng.choice([1, 2, 2, 3]), "v2_runner": rng.random() < 0.5, "pump_waits": rng.random() < 0.7,
        }  # fmt: skip
        if is_fair:
            self.how |= {"slice_steps": rng.choice([1, 2, 4]), "rules": BURST if rng.random() < 0.4 else {}}
        self.world = FarWorld(name, sizes)
        # as every engine's, which keeps a request's pages ready in it
        self.world.description = msgspec.structs.replace(self.world.description, max_model_len=MAX_MODEL_LEN)
        self.engine = FarEngine(self.world, name, **self.how)
        self.scheduler = self.engine.scheduler
        self.most = rng.choice([3, 7] if is_fair else [2, 3, 5])  # requests at once
        self.scheduler.max_num_running_reqs = rng.choice([1, 2, 4])
        if is_fair and rng.random() < 0.7:
            self.scheduler._most_pages = 8 * num_pages  # as if there were memory for as many to be parked
        self.texts: list[bytes] = []
        self.claims: list[Any] = []
        self.handoffs: list[tuple[HandoffId, bytes]] = []
        # have a lease, and are on their way
        self.asks: list[tuple[str, bytes, int, dict[str, Any], int]] = []
        self.world.pump()

    def now(self, feature: str, share: float) -> bool:
        """Whether it is time for that."""
        return self.rng.random() < share and feature in self.features

    # -- requests -----------------------------------------------------------------------------------------

    def prompt(self) -> bytes:
        """New, or begins as one of the last ones, or is one."""
        rng = self.rng
        length = rng.choice([1, 6, 20, self.longest // 2, self.longest - 6, self.longest])
        text = bytes(rng.randrange(3) for _ in range(length))
        if self.texts and rng.random() < 0.5:
            begin = rng.choice(self.texts)
            text = rng.choice([begin, (begin[: rng.randint(1, len(begin))] + text)[: self.longest]])
        self.texts = [*self.texts[-3:], text]
        return text

    def ask(self) -> None:
        """A front has a request, and what the mempool says of it."""
        rng, world, front = self.rng, self.world, self.engine.front
        self.names += 1
        text, tokens, way = self.prompt(), rng.randint(1, MOST_ANSWER), rng.random()
        quire: dict[str, Any] = {}
        if way < 0.06 and "private" in self.features:
            text = text[: max(1, (world.num_pages - 2) * BLOCK_TOKENS - 16)]  # none of its blocks may leave
            quire, tokens = {"private": True}, min(tokens, 4)
        elif way < 0.2 and self.handoffs and world.mempool is not None:
            handoff_id, text = self.handoffs.pop(0)
            quire = world.acquired(front, hashes_of(text), handoff_id)
        else:
            hashes = hashes_of(text)[: min(rng.choice([0, 2, 4, 80, 80]), len(text) // BLOCK_TOKENS)]
            if hashes and world.mempool is not None:
                quire = world.acquired(front, hashes)
            if way > 0.85 and "handoffs" in self.features:
                handoff_id, tokens = HandoffId(f"h{self.names}"), 1
                self.handoffs.append((handoff_id, text))
                quire = {**quire, "handoff_id": handoff_id}
        choices = rng.choice([1, 1, 1, 2, 3]) if "choices" in self.features else 1
        self.asks.append((f"r{self.names}", text, tokens, quire, choices))

    def submit(self) -> None:
        """One of those that are on their way arrives, with its choices."""
        if not self.asks:
            return
        name, text, tokens, quire, choices = self.asks.pop(self.rng.randrange(len(self.asks)))
        for number in range(choices):
            mine = {key: value for key, value in quire.items() if not number or key != "handoff_id"}
            self.engine.add(f"{name}.{number}", text, tokens, mine)

    # -- the mempool ----------------------------------------------------------------------------------------

    def press(self) -> None:
        """Somebody else wants pages, or cached blocks of engines."""
        pool = self.world.mempool.pool
        if self.rng.random() < 0.5:
            pool.ask_unpin(self.rng.randint(1, 6))
        elif len(self.claims) < 2:
            self.claims.append(pool.claim(self.rng.randint(1, 3)))
        self.world.mempool.run(pool.flush())

    def end_claim(self) -> None:
        """Its pages are free again."""
        if self.claims:
            self.world.mempool.pool.cancel(self.claims.pop(0))
            self.world.mempool.run(self.world.mempool.pool.flush())

    def lose(self) -> None:
        """What a step reads is mapped as long as that runs."""
        for _ in self.engine.steps:
            self.engine.execute()
        self.world.lose_mempool()

    def succeed(self) -> None:
        """Raises: Ended where the engine needs what the dead one had."""
        self.world.start_successor()
        self.scheduler._answer_pool()
        kept = self.scheduler._dropping, FAR in self.engine.pool.kinds
        assert not any(kept), f"places outlive their mempool: {kept}, {self.describe()}"
        self.world.attach_rank(self.engine)
        self.engine.front = self.world.client(self.engine.instance)

    def befall(self) -> None:
        """What others do."""
        rng, world, engine = self.rng, self.world, self.engine
        if engine.unfinished and self.now("aborts", 0.05):
            engine.abort(rng.choice(engine.unfinished))
        if self.now("resets", 0.03):
            engine.pool.reset_prefix_cache()
        if self.now("spares", 0.1):
            self.scheduler._spare()
        if rng.random() < 0.1:
            self.scheduler._answer_pool()
        if world.mempool is None:
            if rng.random() < 0.4:
                self.succeed()
            return
        world.holds_copies, world.holds_maps = rng.random() < 0.3, rng.random() < 0.3
        if self.now("lends", 0.1):
            world.want_back(rng.choice([DRAM, LENT]))
        if self.now("lends", 0.1):
            world.lend()
        if self.now("claims", 0.12):
            self.press()
        if rng.random() < 0.12:
            self.end_claim()
        if self.now("failures", 0.05):
            world.end_copy(rng.randrange(4), failed=True)
        if rng.random() < 0.1:
            world.settle()
        is_known = bool(self.scheduler._dropping) or FAR in engine.pool.kinds  # perhaps to a step alone
        share = 0.003 if self.scheduler.far.in_use else 0.5 if is_known else 0.06
        if not self.claims and self.now("losses", share):
            self.lose()

    def turn(self) -> None:
        """A few events in any order."""
        rng, world, engine = self.rng, self.world, self.engine
        if len(engine.unfinished) + len(self.asks) < self.most and rng.random() < 0.4:
            self.ask()
        if rng.random() < 0.8:
            self.submit()
        self.befall()
        own = engine.quota._link.connection
        turns = [
            engine.schedule, engine.execute, engine.finish,
            world.pump, world.map_one, world.end_copy, lambda: world.pump(own, rng.randint(1, 3)),
        ]  # fmt: skip
        for each in rng.choices(turns, weights=[4, 4, 4, 3, 1, 1, 1], k=6):
            each()
        world.advance(rng.choice([1, 30, 400]))

    # -- the end --------------------------------------------------------------------------------------------

    def calm_down(self) -> int:
        """Until everything is answered. Returns: for how long nothing was computed at most, in ms."""
        world, engine = self.world, self.engine
        if world.mempool is None:
            self.succeed()
        while self.claims:
            self.end_claim()
        while self.asks:
            self.submit()
        world.holds_copies = world.holds_maps = False
        world.settle()
        idle = worst = 0
        before: Any = None
        for number in range(6_000):
            if not engine.unfinished:
                return worst
            world.pump()
            engine.turn()
            if number % 10 == 0:
                self.scheduler._answer_pool()
            world.advance(TURN_MS)
            now = sorted((r.request_id, r.num_computed_tokens) for r in self.scheduler.requests.values())
            idle = idle + TURN_MS if now == before else 0
            before, worst = now, max(worst, idle)
            assert idle <= MOST_IDLE_MS, f"it stands: {self.describe()}"
        raise AssertionError(f"no end: {self.describe()}")

    def assert_empty(self) -> None:
        """Everything came back."""
        world, scheduler = self.world, self.scheduler
        for _ in range(12):
            self.engine.turn()
            world.pump()
            scheduler._answer_pool()
        assert not scheduler.far.in_use, vars(scheduler.far)
        placed = world.mempool.swap.swaps.far.num_placed
        assert (placed, world.maps, world.asked) == (0, {}, []), (placed, world.maps)
        left = ("_fenced", "_dropping", "leases", "_ended_leases", "_changed", "_came_to", "_losing")
        assert not any(getattr(scheduler, each, None) for each in left), self.describe()
        self.engine.assert_books()
        assert not any(block.ref_cnt for block in self.engine.pool.blocks[1:])

    def describe(self) -> str:
        """For a failure's message."""
        pool = self.world.describe() if self.world.mempool is not None else "no mempool"
        parts = self.world.sizes, self.how, self.engine.describe(), vars(self.scheduler.far), pool
        return ", ".join(map(str, parts))


def example(rng: random.Random, name: str, *, is_fair: bool) -> Counter[str]:
    """Returns: what it counted."""
    life = Life(rng, name, is_fair=is_fair)
    counts = life.scheduler.far_counts
    with mock.patch.object(pool_watch.os, "_exit", side_effect=Ended):
        try:
            for _ in range(NUM_TURNS):
                life.turn()
            worst = life.calm_down()
            life.assert_empty()
        except Ended:
            return counts + Counter(ended=1)
    return counts + Counter(outlived=life.engine.quota.counters["reattached"], idle_ms=worst)


def main() -> None:
    """See the module's docstring."""
    is_fair = "fair" in sys.argv[2:]
    totals: Counter[str] = Counter()
    for word in sys.argv[2 + is_fair :]:
        for name in [word] if "-" in word else [f"{word}-{number}" for number in range(int(sys.argv[1]))]:
            try:
                totals += example(random.Random(name), f"wide-{name}", is_fair=is_fair)
            except BaseException:
                print(f"example {name}", file=sys.stderr)
                raise
    print(dict(totals))


if __name__ == "__main__":
    main()
