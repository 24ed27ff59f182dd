"""Two engines, readers and a caller of swap_out over small spaces and smaller host memory behind them, in any order.

Every copy reads sealed pages and writes its own, whatever fails or is in doubt, and no page is lost.
"""

import random

import pytest

from shared.ids import InstanceId
from shared.wire import mempool as wire
from shared.wire import mempool_api as api_wire
from tests.unit.mempool_harness import PAGE_BYTES, chain, page_lists
from tests.unit.test_mempool_dram import CALLER, perform
from tests.unit.test_mempool_spaces import DECODE, FRONT, PREFILL, Spaces, answers

OTHER_FRONT = 4
ENGINES, FRONTS = (PREFILL, DECODE), (FRONT, OTHER_FRONT)
CHAINS = [chain(*[f"{name}{i}" for i in range(6)]) for name in "abcd"]
NUM_STEPS = 120


class Run:
    """One seed's sequence. Spaces.run asserts the states of every copy's pages."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.rig = rig = Spaces(
            rng.choice([6, 8, 12]), dram_bytes=rng.choice([3, 4, 8]) * PAGE_BYTES, dram_for_host=True,
            kept_share=rng.choice([1.0, 0.9]),
        )  # fmt: skip
        rig.replies = []
        for engine, front in zip(ENGINES, FRONTS[::-1], strict=True):
            rig.worker(engine, f"cpu:{engine}", quota=rng.choice([4, 8]))
            rig.client(front, f"i{engine}")
        rig.core.api.connect(CALLER, api_wire.ApiHello(instance=InstanceId(f"i{PREFILL}")), None)
        self.owned: dict[int, list] = {engine: [] for engine in ENGINES}
        self.in_doubt: list[tuple[int, list]] = []
        self.released: set[str] = set()
        self.num_calls = 0

    def save(self) -> None:
        engine, count = self.rng.choice(ENGINES), self.rng.randrange(1, 4)
        if len(self.rig.granted[engine]) >= count:
            self.owned[engine] += self.rig.save(engine, self.rng.choice(CHAINS)[:count])

    def unpin(self) -> None:
        mine = self.owned[self.rng.choice(ENGINES)]
        if mine:
            engine = next(e for e in ENGINES if self.owned[e] is mine)
            part = [mine.pop(self.rng.randrange(len(mine))) for _ in range(self.rng.randint(1, len(mine)))]
            self.rig.say(engine, wire.Unpin(**page_lists(part)))

    def acquire(self) -> None:
        self.num_calls += 1
        hashes = b"".join(self.rng.choice(CHAINS)[: self.rng.randrange(1, 7)])
        call = wire.Acquire(call_id=self.num_calls, hashes=hashes, wait_ms=self.rng.choice([0, 100]))
        self.rig.say(self.rng.choice(FRONTS), call)

    def release(self) -> None:
        for front in FRONTS:
            for lease in (a.lease_id for a in answers(self.rig, front, wire.Acquired)):
                if lease and lease not in self.released and self.rng.random() < 0.5:
                    self.released.add(lease)
                    self.rig.say(front, wire.Release(lease_id=lease))

    def copied(self) -> None:
        if not self.rig.copies:
            return
        copy = self.rig.copies.pop(self.rng.choice(list(self.rig.copies)))
        how = self.rng.choice(["well", "well", "failed", "in doubt"])
        doubt = [page for page in copy.targets if how == "in doubt" and self.rng.random() < 0.5]
        failed = how != "well"
        perform(
            self.rig, self.rig.core.on_copied(copy.copy_id, self.rig.now_ms, failed=failed, in_doubt=doubt)
        )
        if doubt:
            self.in_doubt.append((copy.space, doubt))

    def settled(self) -> None:
        if self.in_doubt:
            space, pages = self.in_doubt.pop()
            perform(self.rig, self.rig.core.on_settled(space, pages, self.rig.now_ms))

    def wait(self) -> None:
        self.rig.now_ms += self.rng.choice([1, 50, 200, 1_500])
        perform(self.rig, self.rig.core.tick(self.rig.now_ms))

    def swap_out(self) -> None:
        self.num_calls += 1
        instance = InstanceId(f"i{self.rng.choice(ENGINES)}")
        call = api_wire.SwapOut(
            call_id=self.num_calls, num_blocks=self.rng.randrange(1, 9), instance=instance
        )
        self.rig.core.api.on_call(CALLER, call, self.rig.now_ms)
        perform(self.rig, self.rig.core.after_api(self.rig.now_ms))


STEPS = ["save", "save", "unpin", "acquire", "release", "copied", "settled", "wait", "swap_out"]


@pytest.mark.parametrize("first", range(0, 100, 50))
def test_copies_read_what_is_sealed_whatever_leaves_meanwhile(first):
    for seed in range(first, first + 50):
        run = Run(seed)
        try:
            for _ in range(NUM_STEPS):
                getattr(run, run.rng.choice(STEPS))()
                run.rig.counts()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
