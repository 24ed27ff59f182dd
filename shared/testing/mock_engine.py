"""An engine without a model, FOR FAULT AND LOAD TESTS ONLY: its tokens mean nothing.

It keeps an engine's manners: steps that batch all running requests, a prompt rate, a step time, a prefix
cache with events, pages, queueing at max_num_seqs, aborts. Its tokens are shared/testing/mock_tokens.py's
pure function, so a test knows every token beforehand. It exists only where `--engine mock` was said.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping

import msgspec

from shared.background_task import begin_task
from shared.engine.interface import (
    CacheEvent,
    DecodeStep,
    EngineDelta,
    EngineLoad,
    EngineRequest,
    EngineRoom,
    EngineStep,
    KvUse,
    PromptStep,
)
from shared.engine.step_listener import StepListener
from shared.engine.worker_config import WorkerSettings, block_tokens, on_device
from shared.errors import ClusterError, InvalidRequest, InvariantBroken, PeerGone, SettingsError
from shared.ids import BlockHash
from shared.kv.block_hash import hash_blocks, pack_tokens
from shared.kv.layout import EngineDescription
from shared.kv.model_files import max_positions
from shared.observe.log import get_logger
from shared.testing.mock_answers import MockAnswers, Running
from shared.testing.mock_pages import MOCK_BLOCK_BYTES, MockPages
from shared.testing.mock_tokens import MockVocabulary
from shared.wire.cost import CostCoefficients, ModelShape
from shared.wire.requests import GREEDY_BELOW

MAX_LOGPROBS = 20

_log = get_logger("mock_engine")


class MockEngine:
    """Implements shared.engine.interface.Engine.

    Raises (constructor): SettingsError unless the settings name the mock explicitly.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        if settings.engine != "mock":
            raise SettingsError("the mock engine is for tests: it must be asked for with --engine mock")
        settings = on_device(settings, "cpu")
        settings = msgspec.structs.replace(settings, block_tokens=block_tokens(settings, on_cpu=True))
        self.settings = settings
        self.vocabulary = MockVocabulary.of_model(settings.model_dir)
        self.max_running = settings.max_num_seqs
        self.max_batched_tokens = settings.max_num_batched_tokens
        self.graph_tokens = 0
        self.num_kv_blocks = self.num_pages = settings.mock_kv_blocks
        self.device = "mock"
        self.known_cost = CostCoefficients(
            shape=ModelShape(
                num_layers=1, hidden_size=1, intermediate_size=1, num_heads=1, num_kv_heads=1, head_dim=1, vocab_size=1
            ),
            device="mock",
            max_batched_tokens=settings.max_num_batched_tokens,
            step_overhead_ms=settings.mock_step_ms,
            token_ms=1e3 / settings.mock_prefill_tokens_per_s,
        )  # fmt: skip
        self.uses_pool = True
        self.keeps_leases = False
        self.description = EngineDescription(
            model=settings.model_name,
            fingerprint="mock" + hashlib.sha256(settings.model_name.encode()).hexdigest()[:28],
            dtype="mock",
            layout="layers-blocks",
            backend="MOCK",
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            block_tokens=settings.block_tokens,
            block_bytes=MOCK_BLOCK_BYTES,
            max_model_len=settings.max_model_len or max_positions(settings.model_dir) or 4096,
        )
        self._answers = MockAnswers(
            self.vocabulary,
            max_model_len=self.description.max_model_len,
            eos_after_tokens=settings.mock_eos_after_tokens,
        )
        self._pages = MockPages(settings, self.description) if settings.mempool_socket else None
        self._cache: OrderedDict[BlockHash, None] = OrderedDict()
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        self._by_id: dict[str, Running] = {}
        self._callback: Callable[[CacheEvent], None] | None = None
        self._listener = StepListener(_log)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._num_made = 0
        self._steps_to_drop = settings.mock_drop_first_steps
        self._dead = False

    # -- the interface ----------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """See Engine.alive."""
        return not self._dead

    @property
    def pages_connected(self) -> bool:
        """Attached to the mempool now."""
        return self._pages is not None and self._pages.connected

    async def start(self) -> None:
        """See Engine.start."""
        await asyncio.sleep(self.settings.mock_start_ms / 1000)
        if self._pages is not None:
            self._pages.start()
        self._task = begin_task(self._live(), "mock-engine")

    def send_early(self, request: EngineRequest) -> None:
        """See Engine.send_early: it gains nothing."""

    def drop_early(self, engine_request_id: str) -> None:
        """See Engine.drop_early."""

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        """See Engine.generate."""
        if self._dead:
            raise PeerGone("the mock engine has died")
        spec = request.sampling
        if spec.logprobs is not None and spec.logprobs > MAX_LOGPROBS:
            raise InvalidRequest(f"logprobs of {spec.logprobs} is more than {MAX_LOGPROBS}")
        seed = None if spec.temperature < GREEDY_BELOW else spec.seed
        # what was made before counts as output: the oracle knows nothing of attempts and stages
        prompt = request.prompt_token_ids[: len(request.prompt_token_ids) - request.num_output_tokens]
        item = Running(
            request=request,
            hashes=hash_blocks(
                request.chain_seed, pack_tokens(request.prompt_token_ids), self.settings.block_tokens
            ),
            states=[self.vocabulary.state(prompt, i, seed) for i in range(spec.n)],
            submitted_at=time.monotonic(),
            ended=[False] * spec.n,
        )
        self._by_id[request.engine_request_id] = item
        self._waiting.append(item)
        self._wake.set()
        try:
            while True:
                deltas = await item.out.get()
                if isinstance(deltas, ClusterError):
                    raise deltas
                for delta in deltas:
                    yield delta
                    if delta.request_done:
                        return
        finally:
            self._forget(item)

    async def holds_lease(self, lease_id: str) -> bool:
        """See Engine.holds_lease: it copies, so it never does."""
        return False

    async def ping(self) -> None:
        """See Engine.ping."""
        if self._hangs:
            await asyncio.Event().wait()

    @property
    def _hangs(self) -> bool:
        return 0 < self.settings.mock_hang_after_tokens <= self._num_made

    async def abort(self, engine_request_id: str) -> None:
        """See Engine.abort."""
        item = self._by_id.get(engine_request_id)
        if item is None:
            return
        self._forget(item)
        item.out.put_nowait([EngineDelta(0, [], "abort", request_done=True, kv_use=item.use)])

    def load(self) -> EngineLoad:
        """See Engine.load."""
        lengths = [len(r.request.prompt_token_ids) + r.made for r in self._running]
        return EngineLoad(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            unfinished_prefill_tokens=sum(r.left_to_compute for r in self._running)
            + sum(len(r.request.prompt_token_ids) for r in self._waiting),
            running_context_tokens=sum(lengths),
            kv_used_share=min(1.0, sum(lengths) / (self.num_kv_blocks * self.settings.block_tokens)),
            step_ms=self.settings.mock_step_ms if self._running else 0.0,
        )

    async def room(self) -> EngineRoom | None:
        """See Engine.room: it copies, so its pages are nobody else's."""
        return None

    def served_elsewhere(self, served: Mapping[str, Mapping[str, int]]) -> None:
        """See Engine.served_elsewhere: here nobody takes turns."""

    def on_cache_event(self, callback: Callable[[CacheEvent], None]) -> None:
        """See Engine.on_cache_event."""
        self._callback = callback

    def on_step(self, callback: Callable[[EngineStep], None]) -> None:
        """See Engine.on_step."""
        self._listener.hear = callback

    async def clear_cache(self) -> bool:
        """See Engine.clear_cache."""
        if self._running:
            return False
        self._cache.clear()
        if self._callback is not None:
            self._callback(CacheEvent("cleared"))
        return True

    async def close(self) -> None:
        """See Engine.close."""
        if self._task is not None:
            self._task.cancel()
        self._die("the mock engine is closed")
        if self._pages is not None:
            self._pages.close()

    # -- steps ------------------------------------------------------------------------------------

    async def _live(self) -> None:
        """Steps until it dies. A bug is its death, and goes on to whoever runs the worker."""
        try:
            await self._run()
        except Exception as error:
            self._die(f"the mock engine died of a bug: {error!r}")
            raise

    async def _run(self) -> None:
        due = time.monotonic()
        while not self._dead:
            if not self._waiting and not self._running:
                self._wake.clear()
                await self._wake.wait()
                due = time.monotonic()
            self._admit()
            computed = self._compute_prompts()
            began = time.monotonic()
            step_s = self.settings.mock_step_ms / 1000 + computed / self.settings.mock_prefill_tokens_per_s
            due = max(due + step_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            if self._steps_to_drop:
                self._steps_to_drop -= 1
                continue
            self._tell_step(computed, (time.monotonic() - began) * 1e3)
            self._emit()

    def _tell_step(self, computed: int, ms: float) -> None:
        if self._listener.hear is None or not self._running:
            return
        context = sum(len(r.request.prompt_token_ids) + r.made for r in self._running)
        if not computed:
            self._listener.tell(DecodeStep(ms, len(self._running), context))
            return
        others = [r for r in self._running if r.made]
        new = [r for r in self._running if not r.made]
        if len(new) == 1 and others and computed == new[0].use.tokens_computed:
            length = len(new[0].request.prompt_token_ids)
            self._listener.tell(PromptStep(ms, computed, length - computed, len(others), context - length))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.max_running:
            item = self._waiting.popleft()
            try:
                item.use = self._look_up(item)
            except InvariantBroken as error:
                item.out.put_nowait(error)
                continue
            item.left_to_compute = item.use.tokens_computed
            self._running.append(item)

    def _look_up(self, item: Running) -> KvUse:
        """Where the prompt's KV comes from: our cache, held pages, or computing: one token at least."""
        prompt, block = item.request.prompt_token_ids, self.settings.block_tokens
        have = 0
        while have < len(item.hashes) and item.hashes[have] in self._cache:
            self._cache.move_to_end(item.hashes[have])
            have += 1
        engine_tokens = min(have * block, len(prompt) - 1)
        held, pool_tokens, moved, failed = item.request.held, 0, 0, 0
        if held is not None and self._pages is not None and held.valid_tokens > engine_tokens:
            good = self._pages.check(held)
            failed = len(held.pages) - good
            covered = min(held.valid_tokens, good * block, len(prompt) - 1)
            pool_tokens = max(0, covered - engine_tokens)
            moved = max(0, good - have) if pool_tokens else 0
        return KvUse(
            tokens_engine=engine_tokens,
            tokens_pool=pool_tokens,
            tokens_computed=len(prompt) - engine_tokens - pool_tokens,
            blocks_moved=moved,
            blocks_reused=have,
            bytes_moved=moved * MOCK_BLOCK_BYTES,
            failed_blocks=failed,
            queue_ms=(time.monotonic() - item.submitted_at) * 1e3,
        )

    def _compute_prompts(self) -> int:
        budget = self.max_batched_tokens
        for item in self._running:
            part = min(budget, item.left_to_compute)
            item.left_to_compute -= part
            budget -= part
            if part and not item.left_to_compute:
                self._store(item)
        return self.max_batched_tokens - budget

    def _store(self, item: Running) -> None:
        """The prompt's blocks are complete: cache them, tell, and put them into pages."""
        new = [h for h in item.hashes if h not in self._cache]
        self._cache.update(dict.fromkeys(item.hashes))
        removed: list[BlockHash] = []
        while len(self._cache) > self.num_kv_blocks:
            removed.append(self._cache.popitem(last=False)[0])
        if self._callback is not None and not item.request.private:
            if new:
                self._callback(CacheEvent("stored", new))
            if removed:
                self._callback(CacheEvent("removed", removed))
        if self._pages is not None and not item.request.private:
            self._pages.save(item.request, item.hashes)

    def _emit(self) -> None:
        for item in list(self._running):
            if item.left_to_compute or self._hangs:
                continue
            deltas = self._answers.next(item)
            self._num_made += len(deltas)
            if deltas[-1].request_done:
                self._running.remove(item)
            item.out.put_nowait(deltas)
        if 0 < self.settings.mock_die_after_tokens <= self._num_made:
            self._die("the mock engine died as told")

    def _forget(self, item: Running) -> None:
        self._by_id.pop(item.request.engine_request_id, None)
        if item in self._running:
            self._running.remove(item)
        if item in self._waiting:
            self._waiting.remove(item)

    def _die(self, reason: str) -> None:
        if self._dead:
            return
        self._dead = True
        for item in self._by_id.values():  # also of one that is on its way from waiting to running
            item.out.put_nowait(PeerGone(reason))
        self._running.clear()
        self._waiting.clear()
