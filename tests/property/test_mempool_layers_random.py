"""Steps that write layer by layer, copies that follow them, and everything that can go wrong between, in any order.

The bytes are modelled: a layer of a page holds (step, block) of whoever wrote it last. Whatever is indexed in the
target has, in each layer, what the step that sealed the block wrote there; and no page is ever lost.
"""

import random
from dataclasses import dataclass, field

import pytest

from services.mempool.core.actions import CopyPages
from shared.ids import InstanceId
from shared.kv.page import PageState
from shared.wire import mempool as wire
from tests.unit.mempool_harness import chain, page_lists
from tests.unit.test_mempool_layers import LAYERED, H
from tests.unit.test_mempool_spaces import DECODE, FRONT, PREFILL, Spaces, answers

NUM_LAYERS, NUM_STEPS = 4, 160
CHAINS = [chain(*[f"{name}{i}" for i in range(4)]) for name in "abc"]
Stamp = tuple[int, bytes]


@dataclass
class Copying:
    """What the mover would be doing."""

    action: CopyPages
    done: int = 0  # layers


@dataclass
class Step:
    """Of the prefill engine, under way."""

    number: int
    pages: list
    hashes: list
    written: int = 0  # layers
    cancelled: set = field(default_factory=set)


class Run:
    """One seed's sequence."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.rig = Spaces(rng.choice([5, 8, 12]), pull_patience_ms=rng.choice([1, 150]))
        self.rig.worker(PREFILL, "cpu:0", quota=8, description=LAYERED)
        self.rig.worker(DECODE, "cpu:1", quota=rng.choice([2, 4]), description=LAYERED)
        self.rig.client(FRONT, f"i{DECODE}")
        self.bytes: dict[tuple[int, int], list[Stamp | None]] = {}
        self.copying: dict[int, Copying] = {}
        self.step: Step | None = None
        self.num_steps = 0
        self.stock: list = []  # pages of aborted blocks, written on under the same epoch
        self.sealed: list = []
        self.in_doubt: list = []
        self.calls = 0

    def layers(self, space: int, page: int) -> list:
        return self.bytes.setdefault((space, page), [None] * NUM_LAYERS)

    # -- the engine -----------------------------------------------------------------------------------

    def begin(self) -> None:
        if self.step is not None:
            return
        hashes = self.rng.choice(CHAINS)
        first = self.rng.randrange(3)
        hashes = hashes[first : first + self.rng.randint(1, 3)]
        while len(self.stock) < len(hashes) and self.rig.granted[PREFILL]:
            (page,) = self.rig.take(PREFILL, 1)
            self.rig.write(PREFILL, [page])
            self.stock.append(page)
        if len(self.stock) < len(hashes):
            return
        pages = [self.stock.pop(self.rng.randrange(len(self.stock))) for _ in hashes]
        self.num_steps += 1
        self.step = Step(self.num_steps, pages, hashes)
        if self.rng.random() < 0.9:
            self.rig.say(
                PREFILL,
                wire.StepLayers(
                    handoff_id=H, target=InstanceId(f"i{DECODE}"), step=self.num_steps, **page_lists(pages),
                    hashes=b"".join(hashes),
                ),
            )  # fmt: skip

    def compute(self) -> None:
        step = self.step
        if step is not None and step.written < NUM_LAYERS:
            for (page, _), block in zip(step.pages, step.hashes, strict=True):
                self.layers(0, page)[step.written] = (step.number, block)
            step.written += 1

    def abort(self) -> None:
        if self.step is not None:
            self.step.cancelled.add(self.rng.randrange(len(self.step.pages)))

    def over(self) -> None:
        step = self.step
        if step is None:
            return
        while step.written < NUM_LAYERS:
            self.compute()
        self.step = None
        kept = [i for i in range(len(step.pages)) if i not in step.cancelled]
        for i in kept:
            self.rig.seal(PREFILL, [step.pages[i]], [step.hashes[i]])
        self.stock += [step.pages[i] for i in step.cancelled]
        self.sealed += [step.pages[i] for i in kept]
        self.rig.say(
            PREFILL, wire.LayersSealed(step=step.number, **page_lists([step.pages[i] for i in kept]))
        )

    def unpin(self) -> None:
        if self.sealed:
            page = self.sealed.pop(self.rng.randrange(len(self.sealed)))
            self.rig.say(PREFILL, wire.Unpin(**page_lists([page])))

    def give_back(self) -> None:
        if self.stock:
            self.rig.give_back(PREFILL, [self.stock.pop()])

    # -- the mover ------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Copy a layer of one copy, if its step has written it."""
        for copy_id, action in self.rig.copies.items():
            self.copying.setdefault(copy_id, Copying(action))
        going = [c for c in self.copying.values() if c.done < NUM_LAYERS]
        if not going:
            return
        copy = self.rng.choice(going)
        gated, step = copy.action.cut is not None and copy.action.cut.step, self.step
        if gated and step is not None and step.number == gated and step.written <= copy.done:
            return
        layers = [copy.done] if gated else range(NUM_LAYERS)
        for (space, page), target in zip(copy.action.sources, copy.action.targets, strict=True):
            for layer in layers:
                self.layers(copy.action.space, target)[layer] = self.layers(space, page)[layer]
        copy.done = copy.done + 1 if gated else NUM_LAYERS

    def copied(self) -> None:
        ended = [i for i, c in self.copying.items() if c.done == NUM_LAYERS]
        failed = self.rng.random() < 0.2
        if failed:
            ended = list(self.copying)
        if not ended:
            return
        copy_id = self.rng.choice(ended)
        action = self.copying.pop(copy_id).action
        self.rig.copies.pop(copy_id)
        doubt = [page for page in action.targets if failed and self.rng.random() < 0.3]
        self.rig.run(self.rig.core.on_copied(copy_id, self.rig.now_ms, failed=failed, in_doubt=doubt))
        if doubt:
            self.in_doubt.append((action.space, doubt))

    def settled(self) -> None:
        if self.in_doubt:
            space, pages = self.in_doubt.pop()
            self.rig.run(self.rig.core.on_settled(space, pages, self.rig.now_ms))

    # -- the decode side ------------------------------------------------------------------------------

    def acquire(self) -> None:
        self.calls += 1
        call = wire.Acquire(call_id=self.calls, hashes=b"".join(self.rng.choice(CHAINS)), wait_ms=100)
        self.rig.say(FRONT, call)

    def release(self) -> None:
        for answer in answers(self.rig, FRONT, wire.Acquired):
            if answer.lease_id and self.rng.random() < 0.5:
                self.rig.say(FRONT, wire.Release(lease_id=answer.lease_id))

    def wait(self) -> None:
        self.rig.advance(self.rng.choice([1, 50, 200, 31_000]))

    def check(self) -> None:
        self.rig.counts()
        for pool in self.rig.core.pools.values():
            assert all(count > 0 for count in pool.memory.read_early.values()), "read less than never"
        for entry in self.rig.core.pools[1].index.entries():
            stamps = set(self.layers(1, entry.page))
            assert len(stamps) == 1, f"layers of several steps: {stamps}"
            assert self.rig.state_in(1, entry.page) is PageState.SEALED
            ((_, block),) = stamps
            assert block == entry.block_hash, "another block's bytes"


STEPS = (
    "begin", "compute", "compute", "compute", "over", "abort", "unpin", "give_back", "follow", "follow",
    "follow", "copied", "copied", "settled", "acquire", "release", "wait",
)  # fmt: skip


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_the_target_never_has_a_layer_of_another_step_or_block(first):
    by_layer = 0
    for seed in range(first, first + 40):
        run = Run(seed)
        try:
            for _ in range(NUM_STEPS):
                getattr(run, run.rng.choice(STEPS))()
                run.check()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        by_layer += run.rig.core.counters["blocks_by_layer"]
    assert by_layer > 40, "the runs proved nothing"
