"""Engines in the mempool's pages against a model: whatever happens in whatever order, every step finds the bytes that
its block tables promise, and every page comes back.

Two engines (Quire's scheduler, block pool and page quota over vLLM's own classes; tests/support/page_engine.py), the
real core of the mempool, and fronts that lease pages and hand prompts off. Only the model is missing: a slot holds the
text up to its token. `python -m tests.support.page_model EXAMPLES SEED... [--shrink]` tries so many sequences of events
for each seed; a failure prints its sequence, and the same seed finds it again; --shrink looks for a shorter one, for
minutes.
"""

import sys
from dataclasses import dataclass, field
from unittest import mock

import hypothesis.strategies as st
import msgspec
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from services.mempool.core.attachments import Claim
from shared.engine import pool_watch
from shared.ids import HandoffId
from shared.wire import mempool as wire
from tests.support import page_turns
from tests.support.page_engine import SimEngine
from tests.support.page_memory_rules import MemoryRules
from tests.support.page_world import World, hashes_of
from tests.unit.mempool_harness import BLOCK_TOKENS, DESCRIPTION

SOCKET = "model"
BASES = [bytes((i * k) % 3 for i in range(40)) for k in (1, 2, 5)]
# in which everything that was asked must be answered; many, as two prompts that do not fit beside each other, with swap
# space for less than one of them, are dropped and computed again some ten times before the first is done
TURNS_PER_REQUEST = 160

slots = st.integers(0, 1)
picks = st.integers(0, 1000)
seldom = st.integers(0, 5).map(lambda n: n == 5)
few = st.integers(1, 3)


@dataclass
class Ask:
    """A request that a front has a lease for, and has not sent to its engine."""

    request_id: str
    prompt: bytes
    max_tokens: int
    quire: dict = field(default_factory=dict)


@dataclass
class Worker:
    """An engine and its front."""

    engine: SimEngine
    client: int | None  # the front's connection
    asks: list[Ask] = field(default_factory=list)


class EngineGone(BaseException):
    """In place of the end of an engine's process."""


class PagesModel(MemoryRules):
    def __init__(self):
        super().__init__()
        self.workers: dict[int, Worker] = {}
        self.dying: list[int] = []  # processes whose death is not proven yet
        self.handoffs: list[tuple[HandoffId, bytes]] = []
        self.claims: list[Claim] = []
        self.texts = list(BASES)
        self.names = 0
        self.keeps_memory = True
        patch = mock.patch.object(pool_watch.os, "_exit", side_effect=EngineGone)
        patch.start()
        self.unpatch = patch.stop

    @initialize(
        num_pages=st.sampled_from([16, 22, 30]), depths=st.tuples(st.sampled_from([1, 2]), st.just(2)),
        v2=st.booleans(), pump_waits=st.booleans(), slice_steps=st.sampled_from([0, 1, 3]),
        swap_pages=st.sampled_from([0, 6, 60, 60]),
    )  # fmt: skip
    def begin(self, num_pages, depths, v2, pump_waits, slice_steps, swap_pages):
        self.world = World(SOCKET, num_pages, swap_pages=swap_pages)
        # as every engine's, which keeps a request's pages ready in it
        self.world.description = msgspec.structs.replace(DESCRIPTION, max_model_len=self._most_tokens)
        self.options = {
            "v2_runner": v2,
            "slice_steps": slice_steps,
            "pump_waits": pump_waits,
            "swaps": swap_pages > 0,
        }
        self.depths = depths
        self.attach(0)

    # -- engines come and go ------------------------------------------------------------------------------

    @rule(slot=slots)
    @precondition(lambda self: self.world.mempool is not None)
    def attach(self, slot):
        if slot in self.workers:
            return
        engine = SimEngine(self.world, f"e{slot}", SOCKET, depth=self.depths[slot], **self.options)
        self.workers[slot] = Worker(engine, self.world.client(engine.instance))

    @rule(slot=slots, seldom=seldom)
    def kill(self, slot, seldom):
        if slot in self.workers and seldom:
            self._end(slot)

    def _end(self, slot):
        """The kernel closes its connections; a step that was running may write until the proof of its death."""
        worker = self.workers.pop(slot)
        engine = worker.engine
        self.world.watch.remove(engine.assert_fenced)
        self.world.end_process(engine.process, engine.quota._link.connection)
        if worker.client is not None and self.world.mempool is not None:
            self.world.mempool.closed(worker.client)
        self.dying.append(engine.process)

    @rule()
    @precondition(lambda self: self.dying)
    def bury(self):
        self.world.death_seen(self.dying.pop(0))

    # -- requests -------------------------------------------------------------------------------------------

    @property
    def _most_tokens(self) -> int:
        """Of a request: what one of two engines may keep."""
        return (int(self.world.num_pages * self.world.kept_share) // 2 - 1) * BLOCK_TOKENS

    def _text(self, pick, length, tail) -> bytes:
        """A prompt that shares some beginning with others; short enough for an engine's part of the pool."""
        most = self._most_tokens
        return (self.texts[pick % len(self.texts)][:length] + bytes([tail] * (tail % 3)))[: most - 8] or b"\0"

    def _max_tokens(self, prompt, wanted) -> int:
        return max(1, min(wanted, self._most_tokens - len(prompt)))

    def _name(self) -> str:
        self.names += 1
        return f"r{self.names}"

    @rule(
        slot=slots, pick=picks, length=st.integers(1, 40), tail=st.integers(0, 2), tokens=st.integers(1, 24)
    )
    def ask_without_lease(self, slot, pick, length, tail, tokens):
        if worker := self.workers.get(slot):
            prompt = self._text(pick, length, tail)
            worker.engine.add(self._name(), prompt, self._max_tokens(prompt, tokens), {})

    @rule(
        slot=slots, pick=picks, length=st.integers(1, 40), tail=st.integers(0, 2), tokens=st.integers(1, 24)
    )
    def lease(self, slot, pick, length, tail, tokens):
        """A front asks the pool for a prompt's blocks; the request reaches the engine later."""
        if worker := self.workers.get(slot):
            prompt = self._text(pick, length, tail)
            whole = hashes_of(prompt)[: len(prompt) // BLOCK_TOKENS]
            worker.asks.append(self._acquire(worker, prompt, whole, self._max_tokens(prompt, tokens), ""))

    def _acquire(self, worker, prompt, hashes, max_tokens, handoff_id) -> Ask:
        ask = Ask(self._name(), prompt, max_tokens)
        if worker.client is None or self.world.mempool is None or not hashes:
            return ask
        ask.quire = self.world.acquired(worker.client, hashes, handoff_id)
        return ask

    @rule(slot=slots, pick=picks, choices=st.sampled_from([1, 1, 1, 3]))
    def submit(self, slot, pick, choices):
        worker = self.workers.get(slot)
        if worker is None or not worker.asks:
            return
        ask = worker.asks.pop(pick % len(worker.asks))
        for choice in range(choices):
            worker.engine.add(f"{ask.request_id}.{choice}", ask.prompt, ask.max_tokens, ask.quire)

    @rule(slot=slots)
    def give_up_before_submitting(self, slot):
        worker = self.workers.get(slot)
        if worker is not None and worker.asks:
            self._settle(worker, worker.asks.pop().quire.get("lease_id", ""))

    def _settle(self, worker, lease_id):
        if not lease_id or worker.engine.scheduler.holds_lease(lease_id):
            return
        if worker.client is not None and self.world.mempool is not None:
            self.world.call(worker.client, wire.Release(lease_id=lease_id))

    @rule(slot=slots, pick=picks)
    def abort(self, slot, pick):
        worker = self.workers.get(slot)
        if worker is None or not worker.engine.unfinished:
            return
        names = worker.engine.unfinished
        name = names[pick % len(names)]
        worker.engine.abort(name)
        self._settle(worker, worker.engine.answers[name].lease_id)

    @rule(slot=slots, pick=picks, length=st.integers(1, 40), tail=st.integers(0, 2))
    def prefill(self, slot, pick, length, tail):
        """A prompt whose pages go to whoever decodes."""
        if worker := self.workers.get(slot):
            prompt, handoff_id = self._text(pick, length, tail), HandoffId(f"h{self._name()}")
            ask = self._acquire(worker, prompt, hashes_of(prompt)[: len(prompt) // BLOCK_TOKENS], 1, "")
            worker.engine.add(ask.request_id, prompt, 1, {**ask.quire, "handoff_id": handoff_id})
            self.handoffs.append((handoff_id, prompt))

    @rule(slot=slots, tokens=st.integers(1, 24), seldom=seldom)
    @precondition(lambda self: self.handoffs)
    def decode(self, slot, tokens, seldom):
        if worker := self.workers.get(slot):
            handoff_id, prompt = self.handoffs[0] if seldom else self.handoffs.pop(0)
            max_tokens = self._max_tokens(prompt, tokens)
            worker.asks.append(self._acquire(worker, prompt, hashes_of(prompt), max_tokens, handoff_id))

    @rule(slot=slots)
    def next_turn(self, slot):
        """Answers become prompts."""
        if worker := self.workers.get(slot):
            done = [a for a in worker.engine.answers.values() if a.finished]
            if done:
                self.texts.append(done[-1].prompt + done[-1].text)
                del self.texts[3:-4]

    @rule(
        slot=slots, parts=st.lists(st.sampled_from(["schedule", "execute", "finish"]), min_size=1, max_size=5)
    )
    def step(self, slot, parts):
        if worker := self.workers.get(slot):
            for part in parts:
                getattr(worker.engine, part)()

    @rule(slot=slots, times=st.integers(1, 8), pumps=st.booleans())
    def run(self, slot, times, pumps):
        if worker := self.workers.get(slot):
            for _ in range(times):
                worker.engine.turn()
                if pumps:
                    self.world.pump()

    @rule(slot=slots, count=few)
    def deliver_some(self, slot, count):
        if worker := self.workers.get(slot):
            self.world.pump(worker.engine.quota._link.connection, count)

    @rule()
    def deliver_all(self):
        self.world.pump()

    @rule(slot=slots)
    def answer_pool(self, slot):
        """The engine's watching thread has its turn: what the pool asks back, or its successor."""
        worker = self.workers.get(slot)
        if worker is None:
            return
        try:
            worker.engine.scheduler._answer_pool()
        except EngineGone:
            assert not self.keeps_memory, "an engine began anew although its pages were kept"
            self._end(slot)
            return
        worker.engine.assert_books()

    @rule(slot=slots)
    def spare_pages(self, slot):
        """It has its turn while steps are under way: pages of the stock."""
        if worker := self.workers.get(slot):
            worker.engine.scheduler._spare()
            worker.engine.assert_books()

    @rule(slot=slots, seldom=seldom)
    def reset_cache(self, slot, seldom):
        if seldom and slot in self.workers:
            self.workers[slot].engine.pool.reset_prefix_cache()

    @rule(by_ms=st.sampled_from([1, 500, 1500]))
    def wait(self, by_ms):
        self.world.advance(by_ms)

    @rule(seldom=seldom)
    @precondition(lambda self: self.world.mempool is not None and not self.claims)
    def lose_mempool(self, seldom):
        if seldom:
            self.world.lose_mempool()
            for worker in self.workers.values():
                worker.client = None

    @rule(keeps=st.sampled_from([True, True, True, False]))
    @precondition(lambda self: self.world.mempool is None)
    def start_successor(self, keeps):
        self.keeps_memory = keeps
        if not keeps:  # nobody may attach with pages of the old memory: all that lives begins anew
            for slot in list(self.workers):
                worker = self.workers[slot]
                worker.engine.quota.lost = True
        self.world.start_successor(keeps)
        for slot in list(self.workers):
            if not keeps:
                self.answer_pool(slot)
            else:
                self.workers[slot].client = self.world.client(self.workers[slot].engine.instance)

    def teardown(self):
        try:
            if hasattr(self, "world"):
                self._drain()
        finally:
            self.unpatch()

    def _idle_engines_let_go(self):
        """The pool evicts no block under which another is pinned, and does not ask an idle engine for its cache."""
        for worker in self.workers.values():
            if not worker.engine.unfinished:
                worker.engine.pool.reset_prefix_cache()

    def _drain(self):
        """Every request is answered, within a bounded number of turns; then every page is free or evictable."""
        world = self.world
        if world.mempool is None:
            self.start_successor(True)
        self.let_copies_end()
        while self.claims or self.dying:
            (self.end_claim if self.claims else self.bury)()
        for slot, worker in list(self.workers.items()):
            while worker.asks:
                self.submit(slot, 0, 1)
        num_asked = sum(len(worker.engine.unfinished) for worker in self.workers.values())
        most = 20 + TURNS_PER_REQUEST * num_asked
        for turn in range(most):
            if turn == most // 2:
                self._idle_engines_let_go()
            for slot in list(self.workers):
                self.answer_pool(slot)
            for worker in list(self.workers.values()):
                worker.engine.turn()
            world.pump()
            self.regain_all()
            world.advance(300)
            if not any(w.engine.unfinished or w.engine.steps for w in self.workers.values()):
                break
        left = {w.engine.instance: w.engine.unfinished for w in self.workers.values() if w.engine.unfinished}
        assert not left, f"never answered: {left}; {world.describe()}; " + "; ".join(
            w.engine.describe() for w in self.workers.values()
        )
        for slot, worker in list(self.workers.items()):
            scheduler = worker.engine.scheduler
            assert not scheduler.leases, "a lease outlived its request"
            assert not scheduler._ended_leases, "a lease was not released"
            worker.engine.assert_books()
            assert all(b.ref_cnt == 0 for b in worker.engine.pool.blocks[1:]), "a block outlived its requests"
            self._end(slot)
        while self.dying:
            self.bury()
        world.advance(200_000)
        self.regain_all()
        if world.mempool.pool.memory is None:
            return
        status = world.mempool.pool.status()
        assert (status.num_leases, status.num_handoffs, status.num_pinned) == (0, 0, 0), status
        assert set(world.counts()) <= {"free", "sealed"}, world.counts()


def main() -> None:
    """See the module's docstring."""
    examples, *seeds = (int(word) for word in sys.argv[1:] if word != "--shrink")
    for chosen in seeds:
        print(f"seed {chosen}", flush=True)
        run_state_machine_as_test(
            seed(chosen)(PagesModel),
            settings=settings(
                max_examples=examples,
                stateful_step_count=60,
                database=None,
                deadline=None,
                report_multiple_bugs=False,
                phases=[Phase.generate, *([Phase.shrink] if "--shrink" in sys.argv else [])],
                suppress_health_check=list(HealthCheck),
            ),
        )
    page_turns.run_all()
    print(f"{examples} examples", flush=True)


if __name__ == "__main__":
    main()
