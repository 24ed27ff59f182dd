"""An engine core without a model for tests: Quire's real scheduler over vLLM's, and a runner that only keeps books.

The runner does with pages what a model's steps do: it copies blocks, writes the slots of the tokens that are
scheduled, and reads every slot before them. A slot holds the text up to its token, so reading proves that the
page still holds what its block table promises. The next token is a function of the text.
"""

import copy
import functools
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from shared.engine import block_hasher, page_pool, page_scheduler
from shared.engine.fair_scheduler import AsyncFairPageScheduler, FairPageScheduler
from shared.engine.page_scheduler import AsyncPageScheduler, PageScheduler
from shared.engine.preempt_times import MAX_TIMES
from shared.engine.preload import preload_architecture
from shared.engine.weave_tables import StepTables
from shared.kv.page import PageState
from shared.mempool import page_quota
from tests.support.page_world import SimLink, World, instance
from tests.support.told_slices import ToldSlices
from tests.unit.mempool_harness import BLOCK_TOKENS, SEED

MODEL = Path(__file__).resolve().parents[2] / "deploy" / "models" / "quire-demo"
MAX_MODEL_LEN = 96
STEP_TOKENS = 16
MAX_RUNNING = 4
NUM_WORDS = 3
MORE: dict[str, Any] = {}  # of an engine's settings
_KINDS = ("unknown", "stock", "writing", "sealed", "leased")


def next_token(text: bytes) -> int:
    """What every engine answers."""
    return zlib.crc32(text) % NUM_WORDS


@functools.cache
def _config() -> Any:
    preload_architecture(str(MODEL))  # or vLLM would look at it in a process of its own, for ten CPU-seconds
    config = EngineArgs(
        model=str(MODEL), max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=MAX_RUNNING, enforce_eager=True, enable_prefix_caching=True,
    ).create_engine_config()  # fmt: skip
    config.cache_config.num_gpu_blocks = 1_000
    return config


class SimQuota(page_quota.PageQuota):
    """Time does not pass while a test's engine waits for pages; messages may."""

    pump_waits = True

    def _new_link(self) -> SimLink:
        return SimLink(self._path, on_message=self._on_message, on_down=self._on_down)

    def take_swapped(self) -> list:
        """In the world's time."""
        return [(message, self._link.world.now_ms / 1000) for message, _ in super().take_swapped()]

    def wait_far(self, timeout_s: float) -> bool:
        """As wait_granted()."""
        if self.pump_waits:
            self._link.world.pump()
        return bool(self._far or self._granted) or self.lost

    def wait_granted(self, timeout_s: float) -> bool:
        """What is on its way arrives, if the world lets it; then time is up."""
        if self.pump_waits:
            self._link.world.pump()
        return bool(self._granted) or self.lost


class _Sim:
    """Over both schedulers: no thread of its own."""

    def _watch_pool(self) -> None:
        """The test says when."""


class SimScheduler(_Sim, PageScheduler):
    """Synchronous."""


class SimAsyncScheduler(_Sim, AsyncPageScheduler):
    """With steps ahead."""


class SimFairScheduler(_Sim, ToldSlices, FairPageScheduler):
    """Synchronous, in fair slices."""


class SimAsyncFairScheduler(_Sim, ToldSlices, AsyncFairPageScheduler):
    """With steps ahead, in fair slices."""


KINDS = {
    (1, False): SimScheduler,
    (2, False): SimAsyncScheduler,
    (1, True): SimFairScheduler,
    (2, True): SimAsyncFairScheduler,
}


@dataclass
class Row:
    """One request in the runner, or in a step: then `start` and `count` of its scheduled tokens."""

    request_id: str
    blocks: list[int]
    start: int = 0
    count: int = 0
    samples: bool = False


@dataclass
class Step:
    """A scheduled step. `pages`: (page, epoch) of all that it reads or writes."""

    output: SchedulerOutput
    rows: list[Row]
    copies: list[tuple[int, int]]
    pages: list[tuple[int, int]]
    executed: bool = False


@dataclass
class Answer:
    """A request as its front sees it."""

    prompt: bytes
    max_tokens: int
    lease_id: str = ""
    text: bytes = b""
    finished: bool = False
    aborted: bool = False
    steps: int = field(default=0)


class SimEngine:
    """Args:
    depth: 1 for the synchronous scheduler; 2 and more: so many steps are scheduled before the first is over.
    slice_steps: of fair slices; 0: order of arrival. rules: more fields of FairRules.
    swaps: blocks of parked requests leave where pages are short.
    pump_waits: messages arrive while the engine waits for pages.
    """

    def __init__(
        self,
        world: World,
        name: str,
        socket: str,
        *,
        depth: int = 1,
        v2_runner: bool = False,
        slice_steps: int = 0,
        rules: Mapping[str, float] = MappingProxyType({}),
        swaps: bool = False,
        pump_waits: bool = True,
    ) -> None:
        self.world, self.depth = world, depth
        self.process = world.number()
        self.instance = instance(name, self.process)
        self.steps: deque[Step] = deque()
        self.rows: dict[str, Row] = {}
        self.tables = StepTables(BLOCK_TOKENS)
        self.answers: dict[str, Answer] = {}
        config = copy.copy(_config())
        config.additional_config = {
            "quire": {
                "description": msgspec.json.encode(world.description).decode(), "mempool_socket": socket,
                "instance": self.instance, "handoff_ttl_ms": 1000,
                "fair": {"slice_steps": slice_steps, **rules}, "swap": {"is_on": swaps, "bytes_per_s": 1e300}, **MORE,
            }
        }  # fmt: skip
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
        kv_config = KVCacheConfig(world.num_pages + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        kind = KINDS[min(depth, 2), slice_steps > 0]
        with (
            mock.patch.object(page_scheduler, "PageQuota", SimQuota),
            mock.patch.object(page_scheduler, "die_with_parent"),
        ):
            self.scheduler = kind(config, kv_config, SimpleNamespace(), BLOCK_TOKENS)
        if swaps:
            self.scheduler._step_ms = 10.0  # the world's time does not pass in steps
        self.scheduler.structured_output_manager = SimpleNamespace(should_advance=lambda _: False)
        self.scheduler.use_v2_model_runner = v2_runner
        self.quota: SimQuota = self.scheduler.quota
        self.quota.pump_waits = pump_waits
        self.pool = self.scheduler.pages
        self.pool.clock = lambda: world.now_ms / 1000
        world.watch.append(self.assert_fenced)

    # -- requests -----------------------------------------------------------------------------------------

    def add(self, request_id: str, prompt: bytes, max_tokens: int, quire: dict[str, Any]) -> None:
        """As it arrives at an engine core, with what its front sent along."""
        extra = {block_hasher.EXTRA_ARGS_KEY: {"seed": SEED, **quire}}
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        hasher = block_hasher.quire_block_hasher(BLOCK_TOKENS, None)
        request = Request(request_id, list(prompt), params, None, block_hasher=hasher)
        self.answers[request_id] = Answer(prompt, max_tokens, quire.get("lease_id", ""))
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        """The client left."""
        self.answers[request_id].aborted = True
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    @property
    def unfinished(self) -> list[str]:
        """Requests that still owe tokens."""
        return [r for r, a in self.answers.items() if not a.finished and not a.aborted]

    # -- steps --------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """One more step, unless as many as may be are under way."""
        if len(self.steps) >= self.depth:
            return
        output = self.scheduler.schedule()
        rows = self._rows_of(output)
        reads = {block for row in rows for block in row.blocks[: row.start // BLOCK_TOKENS]}
        writes = (r.blocks[r.start // BLOCK_TOKENS : -(-(r.start + r.count) // BLOCK_TOKENS)] for r in rows)
        assert self.tables.reads_own_blocks(output) == any(not reads.isdisjoint(blocks) for blocks in writes)
        copies = [(c.src_block_id, c.dst_block_id) for c in output.kv_cache_block_copies or []]
        known = {block for pair in copies for block in pair}
        for row in rows:
            assert 0 not in row.blocks, "the null block in a table of full attention"
            used = -(-(row.start + row.count) // BLOCK_TOKENS)
            assert used <= len(row.blocks), row
            known.update(row.blocks[:used])
        pages = [(block - 1, self.pool.epochs[block]) for block in sorted(known)]
        for block in known:
            assert self.pool.kinds[block] not in (page_pool.UNKNOWN, page_pool.STOCK), _KINDS[
                self.pool.kinds[block]
            ]
        self.steps.append(Step(output, rows, copies, pages))
        self.assert_fenced()

    def _rows_of(self, output: SchedulerOutput) -> list[Row]:
        for request_id in output.finished_req_ids:
            self.rows.pop(request_id, None)
        if self.scheduler.use_v2_model_runner:  # it forgets them, and has no room for more
            for request_id in output.preempted_req_ids:
                self.rows.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self.rows[new.req_id] = Row(new.req_id, list(new.block_ids[0]), new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        assert not self.scheduler.use_v2_model_runner or len(self.rows) <= MAX_RUNNING
        for index, request_id in enumerate(cached.req_ids):
            row, blocks = self.rows[request_id], cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                row.blocks = []
            row.blocks += list(blocks[0]) if blocks else []
            row.start = cached.num_computed_tokens[index]
        out = []
        for request_id, count in output.num_scheduled_tokens.items():
            row = self.rows[request_id]
            samples = not self.scheduler.requests[request_id].is_prefill_chunk
            out.append(Row(request_id, list(row.blocks), row.start, count, samples))
        return out

    def execute(self) -> None:
        """Run the oldest scheduled step that has not run. All writes of a layer come before its attention."""
        step = next((s for s in self.steps if not s.executed), None)
        if step is None:
            return
        slots = self.world.slots
        for source, target in step.copies:
            self._assert_mine(target)
            slots[target - 1] = list(slots[source - 1])
        for row in step.rows:
            text = self._text(row)
            for at in range(row.start, row.start + row.count):
                block = row.blocks[at // BLOCK_TOKENS]
                self._assert_mine(block)
                slots[block - 1][at % BLOCK_TOKENS] = text[: at + 1]
        for row in step.rows:
            text = self._text(row)
            for at in range(row.start + row.count):
                found = slots[row.blocks[at // BLOCK_TOKENS] - 1][at % BLOCK_TOKENS]
                assert found == text[: at + 1], (
                    f"{row.request_id}, token {at}: {found} is not {text[: at + 1]}"
                )
        step.executed = True

    def _text(self, row: Row) -> bytes:
        """The request's tokens up to the end of the step: what is not known yet follows from what is."""
        text = self.answers[row.request_id].prompt
        while len(text) < row.start + row.count:
            text += bytes([next_token(text)])
        return text

    def finish(self) -> None:
        """The oldest step's output reaches the scheduler."""
        if not self.steps or not self.steps[0].executed:
            return
        step = self.steps.popleft()
        sampled = [[next_token(self._text(row))] if row.samples else [] for row in step.rows]
        names = [row.request_id for row in step.rows]
        result = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        preemptions = {name: request.num_preemptions for name, request in self.scheduler.requests.items()}
        outputs = self.scheduler.update_from_output(step.output, result)
        for one in (o for client in outputs.values() for o in client.outputs):
            answer = self.answers[one.request_id]
            if one.finish_reason is not None:  # each preemption is told
                told = (one.kv_transfer_params or {})["preempted_ns"]
                assert len(told) == min(preemptions[one.request_id], MAX_TIMES), told
            answer.text += bytes(one.new_token_ids)
            answer.finished |= one.finish_reason is not None
            if answer.finished:
                self._assert_right(answer)
        self.assert_books()

    def _assert_right(self, answer: Answer) -> None:
        text = answer.prompt
        for _ in range(answer.max_tokens):
            text += bytes([next_token(text)])
        assert answer.prompt + answer.text == text

    def describe(self) -> str:
        """Where it stands, for a failure's message."""
        scheduler, pool = self.scheduler, self.pool
        kinds = {name: pool.kinds.count(kind) for kind, name in enumerate(_KINDS)}
        leases = [(name, len(blocks)) for name, (_, blocks) in scheduler.leases.items()]
        running = [(r.request_id, r.num_tokens, r.num_preemptions) for r in scheduler.running]
        waiting = [(r.request_id, r.num_tokens, r.num_preemptions) for r in scheduler.waiting]
        return (
            f"{self.instance}: {kinds}, {pool.free_block_queue.num_free_blocks} cached, {pool.num_expected} expected, "
            f"running {running}, waiting {waiting}, leases {leases}, deferred {scheduler.deferred_frees}, "
            f"{dict(self.quota.counters)}, {dict(getattr(scheduler, 'fair_counts', {}))}"
        )

    def turn(self) -> None:
        """What an engine core does again and again."""
        self.schedule()
        while len(self.steps) >= self.depth or (self.steps and not self.scheduler.has_requests()):
            self.execute()
            self.finish()

    # -- what must hold -------------------------------------------------------------------------------------

    def _assert_mine(self, block: int) -> None:
        """This engine may write the page: nobody else has it, it is not sealed, and the pool knows whose it is."""
        assert self.pool.kinds[block] == page_pool.WRITING, _KINDS[self.pool.kinds[block]]
        if self.world.mempool is None or self.world.mempool.pool.memory is None:
            return
        state = self.world.state(block - 1)
        assert state in (PageState.GRANTED, PageState.WRITING, PageState.QUARANTINED), state
        engines = self.world.mempool.pool.memory.engines
        for engine in engines.attached.values():
            assert engine.process == self.process or block - 1 not in engine.held, f"{block} is {engine}'s"

    def assert_fenced(self) -> None:
        """No page of a step that has not run was freed meanwhile."""
        for step in self.steps:
            if not step.executed:
                for page, epoch in step.pages:
                    self.world.assert_unchanged(page, epoch, f"a step of {self.instance} uses it")

    def assert_books(self) -> None:
        """Every block is in one place, and the numbers say how many."""
        pool, kinds = self.pool, self.pool.kinds
        owned = [b for b in pool.blocks if kinds[b.block_id] in (1, 2, 3)]
        assert pool.num_owned == len(owned)
        stock = {block.block_id for block in pool.stock}
        assert len(stock) == len(pool.stock)
        unwritten = {b - 1 for b in stock if not pool._begun[b]}.union(page for page, _ in pool._written)
        unwritten.update(page for page, _ in self.quota._granted)
        self.world.assert_known(self.quota._link.connection, self.quota.num_asked, unwritten)
        cached = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
        assert len(cached) == pool.free_block_queue.num_free_blocks
        for block in pool.blocks[1:]:
            number, kind = block.block_id, kinds[block.block_id]
            assert (kind == page_pool.STOCK) == (number in stock), (block, _KINDS[kind])
            assert kind != page_pool.STOCK or (block.ref_cnt == 0 and block.block_hash is None), block
            assert kind != page_pool.UNKNOWN or (block.ref_cnt == 0 and block.block_hash is None), block
            assert (number in cached) == (
                kind in (page_pool.WRITING, page_pool.SEALED)
                and block.ref_cnt == 0
                and number not in pool.tails
            ), (block, _KINDS[kind], number in cached)
            assert (kind == page_pool.LEASED) <= (number in pool.lease_counts), block
