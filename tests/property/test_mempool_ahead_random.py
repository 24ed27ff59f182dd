"""Prompts whose blocks leave for decode's space before their readers come, in any order with everything else there.

Little memory, several prompts with common beginnings at once, engines that answer late or in part, readers that come
before, with or after the hand-off, or never, and copies that fail. Readers get the right blocks, and every pin is
somebody's.
"""

import random
from collections import Counter

import pytest

from services.mempool.core.pull import Pull
from shared.ids import BlockHash, HandoffId, InstanceId, LeaseId
from shared.kv.words import u32_list
from shared.wire import mempool as wire
from tests.unit.mempool_harness import Owned, chain, page_lists
from tests.unit.test_mempool_spaces import DECODE, FRONT, PREFILL, Spaces, answers

NUM_STEPS = 300
TARGET = InstanceId(f"i{DECODE}")


class Prompt:
    """Under way at prefill."""

    def __init__(self, number: int, hashes: list[BlockHash]) -> None:
        self.handoff_id, self.hashes = HandoffId(f"h{number}"), hashes
        self.num_sealed = 0
        self.is_over = self.is_read = False


class Run:
    """One seed's sequence."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        num_pages = rng.choice([24, 40, 120])
        self.rig = Spaces(num_pages, kept_share=rng.choice([0.9, 1.0]), pull_patience_ms=rng.choice([5, 200]))
        self.rig.worker(PREFILL, "cpu:0", quota=num_pages)
        self.rig.worker(DECODE, "cpu:1", quota=num_pages)
        self.rig.client(FRONT, f"i{DECODE}")
        self.prompts: list[Prompt] = []
        self.pinned: dict[int, list[Owned]] = {PREFILL: [], DECODE: []}
        self.writing: list[Owned] = []  # of decode
        self.asked: dict[int, list[BlockHash]] = {}
        self.leases: list[LeaseId] = []
        self.num_seen = self.num_shrinks = self.num_written = 0

    # -- prefill --------------------------------------------------------------------------------------

    def begin(self) -> None:
        common, rest = self.rng.randrange(6), self.rng.randint(1, 14)
        number = len(self.prompts)
        names = [f"common{i}" for i in range(common)] + [f"{number}-{i}" for i in range(rest)]
        self.prompts.append(Prompt(number, chain(*names)))

    def some_prompt(self, *, over: bool) -> Prompt | None:
        found = [p for p in self.prompts if p.is_over == over and not p.is_read]
        return self.rng.choice(found) if found else None

    def say_ahead(self, prompt: Prompt, step: int, hashes: list[BlockHash]) -> None:
        message = wire.StepLayers(
            handoff_id=prompt.handoff_id, target=TARGET, step=step, cached=b"".join(hashes), pages=b"",
            epochs=b"", hashes=b"",
        )  # fmt: skip
        self.rig.say(PREFILL, message)

    def step(self) -> None:
        prompt = self.some_prompt(over=False)
        if prompt is None:
            return
        rig, first = self.rig, prompt.num_sealed
        count = min(self.rng.randint(1, 5), len(rig.granted[PREFILL]), len(prompt.hashes) - first)
        pages = rig.take(PREFILL, count)
        rig.write(PREFILL, pages)
        for (page, _), block_hash in zip(pages, prompt.hashes[first:], strict=False):
            rig.bytes[0, page] = block_hash.hex()
        rig.seal(PREFILL, pages, prompt.hashes, first=first)
        self.pinned[PREFILL] += pages
        prompt.num_sealed += count
        if prompt.num_sealed < len(prompt.hashes):
            if count:
                self.say_ahead(prompt, 1, prompt.hashes[first : first + count])
            return
        rig.ready(PREFILL, prompt.handoff_id, prompt.hashes)
        prompt.is_over = True

    def give_up(self) -> None:
        prompt = self.some_prompt(over=False)
        if prompt is not None:
            self.say_ahead(prompt, 0, [])
            prompt.is_over = prompt.is_read = True

    # -- decode ---------------------------------------------------------------------------------------

    def read(self) -> None:
        prompt = self.some_prompt(over=self.rng.random() < 0.7)
        if prompt is None:
            return
        prompt.is_read = prompt.is_over
        call_id = len(self.asked) + 1
        self.asked[call_id] = prompt.hashes
        wait_ms = self.rng.choice([0, 20, 2_000])
        message = wire.Acquire(
            call_id=call_id, hashes=b"".join(prompt.hashes), handoff_id=prompt.handoff_id, wait_ms=wait_ms,
            until_release=True,
        )  # fmt: skip
        self.rig.say(FRONT, message)

    def release(self) -> None:
        if self.leases:
            lease_id = self.leases.pop(self.rng.randrange(len(self.leases)))
            self.rig.say(DECODE, wire.Release(lease_id=lease_id))

    def give_back(self) -> None:
        asked = answers(self.rig, DECODE, wire.Shrink)[self.num_shrinks :]
        self.num_shrinks += len(asked)
        wanted = sum(each.count for each in asked)
        count = min(wanted, len(self.rig.granted[DECODE]))
        self.rig.give_back(DECODE, self.rig.take(DECODE, count), answers=wanted)

    def write(self) -> None:
        """Requests in decode grow."""
        pages = self.rig.take(DECODE, min(self.rng.randint(1, 8), len(self.rig.granted[DECODE])))
        if pages:
            self.rig.write(DECODE, pages)
            self.writing += pages

    def end(self) -> None:
        """One of them is over: its blocks are sealed, and not cached here."""
        self.num_written += 1
        pages, self.writing = self.writing, []
        if pages:
            hashes = chain(*[f"own{self.num_written}-{i}" for i in range(len(pages))])
            self.rig.bytes.update({(1, page): h.hex() for (page, _), h in zip(pages, hashes, strict=True)})
            self.rig.seal(DECODE, pages, hashes)
            self.rig.say(DECODE, wire.Unpin(**page_lists(pages)))

    def unpin(self) -> None:
        mine = self.pinned[PREFILL]
        self.rng.shuffle(mine)
        pages, self.pinned[PREFILL] = mine[:6], mine[6:]
        if pages:
            self.rig.say(PREFILL, wire.Unpin(**page_lists(pages)))

    # -- the rest -------------------------------------------------------------------------------------

    def copied(self) -> None:
        rig = self.rig
        if not rig.copies:
            return
        copy_id = self.rng.choice(sorted(rig.copies))
        copy = rig.copies.pop(copy_id)
        failed = self.rng.random() < 0.1
        for source, target in zip(copy.sources, copy.targets, strict=True):
            rig.bytes[copy.space, target] = "nothing" if failed else rig.bytes[source]
        rig.run(rig.core.on_copied(copy_id, rig.now_ms, failed=failed))

    def wait(self) -> None:
        self.rig.advance(self.rng.choice([1, 10, 60, 600]))

    def check(self) -> None:
        got = answers(self.rig, FRONT, wire.Acquired)
        for answer in got[self.num_seen :]:
            hashes = self.asked[answer.call_id]
            pages = u32_list(answer.pages)
            assert [self.rig.bytes[1, page] for page in pages] == [h.hex() for h in hashes[: len(pages)]]
            if answer.lease_id:
                self.leases.append(answer.lease_id)
        self.num_seen = len(got)
        self.rig.counts()
        self.check_pins()

    def check_pins(self) -> None:
        """Every pin is a lease's, a hand-off's, an engine's, a copy's, or of a block whose reader is awaited."""
        core = self.rig.core
        held: Counter[int] = Counter()
        for pool in core.pools.values():
            for entries in pool.leases.pins():
                held.update(map(id, entries))
            assert pool.memory is not None
            for engine in pool.memory.engines.attached.values():
                held.update(id(entry) for entry in engine.pinned.values() if entry.branch is not None)
        for each in core.layers._held.values():
            held.update(map(id, each.entries))
        for pull in core.pulls.pulls.values():
            held.update(map(id, entries_of(pull)))
        for pool in core.pools.values():
            assert {id(e): e.pins for e in pool.index.entries() if e.pins} == {
                key: count for key, count in held.items() if key in {id(e) for e in pool.index.entries()}
            }


def entries_of(pull: Pull) -> list:
    return [*pull.own, *(entry for _, entry in pull.sources)]


def run_of(seed: int) -> Counter[str]:
    """What went ahead, and made way."""
    run = Run(seed)
    doing = [
        run.begin, *[run.step] * 5, run.give_up, *[run.read] * 2, *[run.release] * 2, *[run.give_back] * 3, run.write,
        run.end, *[run.unpin] * 2, *[run.copied] * 4, *[run.wait] * 2,
    ]  # fmt: skip
    for _ in range(NUM_STEPS):
        run.rng.choice(doing)()
        run.check()
    for _ in range(40):
        for do in (run.copied, run.give_back, run.end, run.wait, run.release, run.release):
            do()
            run.check()
    run.rig.advance(120_000)
    run.check()
    while run.leases:
        run.release()
    assert run.num_seen == len(run.asked), "everybody was answered once"
    assert not run.rig.core.pulls.pulls
    assert not run.rig.core.layers._held
    assert run.rig.core.pools[1].index.num_pinned == 0
    return run.rig.core.counters


@pytest.mark.parametrize("first", [0, 10, 130])
def test_readers_get_their_blocks_and_every_pin_is_somebodys(first):
    seen: Counter[str] = Counter()
    for seed in range(first, first + 10):
        try:
            seen += run_of(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    assert seen["blocks_ahead"] > 0
    assert seen["pulls"] > 0
