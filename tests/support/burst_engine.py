"""Quire's real scheduler over vLLM's in virtual time: steps take what the cost model says, no model runs."""

import copy
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from loadtest.burst_model import Job
from shared.engine import block_hasher, page_scheduler
from shared.engine.fair_scheduler import AsyncFairPageScheduler
from shared.mempool import page_quota
from shared.wire.mempool_swap import SwappedIn, SwappedOut
from tests.support import page_engine
from tests.support.burst_world import BLOCK_TOKENS, DESCRIPTION, BurstWorld
from tests.support.page_world import SimLink, instance
from tests.support.told_slices import ToldSlices
from tests.unit.mempool_harness import SEED

HOST_S = 1e-3  # of the engine core's own work in a step
MAX_MODEL_LEN = 8_192
DEPTH = 2


class BurstQuota(page_quota.PageQuota):
    """In the world's time."""

    def _new_link(self) -> SimLink:
        return SimLink(self._path, on_message=self._on_message, on_down=self._on_down)

    def _on_message(self, seq: int, message: Any, raw: list, fds: list) -> None:
        if isinstance(message, SwappedOut | SwappedIn):
            self._swapped.append((message, self._link.world.now_s))
        else:
            super()._on_message(seq, message, raw, fds)

    def wait_granted(self, timeout_s: float) -> bool:
        world = self._link.world
        begin_s = world.now_s
        world.advance_to(begin_s + timeout_s, lambda: bool(self._granted))
        world.waited_s += world.now_s - begin_s
        return bool(self._granted)


class BurstScheduler(ToldSlices, AsyncFairPageScheduler):
    """No thread of its own."""

    def _watch_pool(self) -> None:
        """Steps follow each other."""


class BurstEngine:
    """Args: prices: of steps. rules: of FairRules."""

    def __init__(
        self, world: BurstWorld, socket: str, prices: Any, rules: dict[str, Any], *, slots: int = 256,
        step_tokens: int = 8_192, kind: type = BurstScheduler, swaps: bool = True,
    ) -> None:  # fmt: skip
        self.world, self.prices = world, prices
        process = world.number()
        self.instance = instance("e", process)
        world.rank(self.instance, process)
        config = copy.copy(page_engine._config())
        config.model_config = copy.copy(config.model_config)
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.model_config.max_model_len = config.scheduler_config.max_model_len = MAX_MODEL_LEN
        config.scheduler_config.max_num_batched_tokens = step_tokens
        config.scheduler_config.max_num_scheduled_tokens = step_tokens
        config.scheduler_config.max_num_seqs = slots
        config.additional_config = {
            "quire": {
                "description": msgspec.json.encode(DESCRIPTION).decode(), "mempool_socket": socket,
                "instance": self.instance, "handoff_ttl_ms": 1000, "fair": rules,
                "swap": {"is_on": swaps, "bytes_per_s": 1e15},
            }
        }  # fmt: skip
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
        kv_config = KVCacheConfig(world.num_pages + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        with (
            mock.patch.object(page_scheduler, "PageQuota", BurstQuota),
            mock.patch.object(page_scheduler, "die_with_parent"),
        ):
            self.scheduler = kind(config, kv_config, SimpleNamespace(), BLOCK_TOKENS)
        self.scheduler.structured_output_manager = SimpleNamespace(should_advance=lambda _: False)
        self.scheduler.pages.clock = lambda: world.now_s
        self.jobs: dict[str, Job] = {}
        self.steps: deque[tuple[Any, float]] = deque()
        self.gpu_free_s = 0.0
        self.idle_s = 0.0  # nothing ran although there was work
        self.longest_idle_s = 0.0
        self._idle_since_s = -1.0
        self.num_steps = 0
        self.on_step = lambda: None

    @property
    def counts(self) -> dict[str, int]:
        return self.scheduler.fair_counts

    def _add(self, job: Job) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=job.output_tokens, ignore_eos=True,
            extra_args={block_hasher.EXTRA_ARGS_KEY: {"seed": SEED}},
        )  # fmt: skip
        first = int(job.name[1:]) * 10_000
        tokens = list(range(first, first + job.prompt_tokens))
        hasher = block_hasher.quire_block_hasher(BLOCK_TOKENS, None)
        self.jobs[job.name] = job
        self.scheduler.add_request(Request(job.name, tokens, params, None, block_hasher=hasher))

    def run(self, jobs: Sequence[Job], most_steps: int = 100_000) -> None:
        """To the end of all, which are written into."""
        due = deque(sorted(jobs, key=lambda job: job.arrival_ms))
        world = self.world
        begin_s = world.now_s
        while due or any(job.end_ms < 0 for job in self.jobs.values()):
            while due and begin_s + due[0].arrival_ms / 1e3 <= world.now_s:
                self._add(due.popleft())
            if not self.scheduler.has_requests() and not self.steps:
                world.advance_to(begin_s + due[0].arrival_ms / 1e3)
                continue
            self._turn(begin_s)
            self.num_steps += 1
            assert self.num_steps < most_steps, "requests starve"

    def _turn(self, begin_s: float) -> None:
        world = self.world
        if self.scheduler.has_requests() and len(self.steps) < DEPTH:
            output = self.scheduler.schedule()
            self.on_step()
            took_s = self._step_s(output)
            ran = output.total_num_scheduled_tokens > 0
            if ran:
                if self._idle_since_s >= 0:
                    idle_s = world.now_s - self._idle_since_s
                    self.idle_s += idle_s
                    self.longest_idle_s = max(self.longest_idle_s, idle_s)
                self._idle_since_s = -1.0
            elif self._idle_since_s < 0 and not self.steps:
                self._idle_since_s = world.now_s
            self.gpu_free_s = max(self.gpu_free_s, world.now_s) + took_s
            self.steps.append((output, self._rows(output), self.gpu_free_s))
            world.advance_to(world.now_s + HOST_S)
            if ran and len(self.steps) < DEPTH:
                return
        output, rows, end_s = self.steps.popleft()
        world.advance_to(max(world.now_s, end_s))
        self._finish(output, rows, begin_s)

    def _rows(self, output: Any) -> list[tuple[str, bool]]:
        requests = self.scheduler.requests
        return [(name, not requests[name].is_prefill_chunk) for name in output.num_scheduled_tokens]

    def _step_s(self, output: Any) -> float:
        if not output.total_num_scheduled_tokens:
            return 0.0
        chunks, decodes, context = [], 0, 0
        for name, new in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            past = request.num_computed_tokens - new
            if new == 1 and past >= request.num_prompt_tokens:
                decodes += 1
                context += past
            else:
                chunks.append((new, past))
        return self.prices.step_ms(chunks, decodes, context) / 1e3

    def _finish(self, output: Any, rows: list[tuple[str, bool]], begin_s: float) -> None:
        names = [name for name, _ in rows]
        sampled = [[7] if samples else [] for _, samples in rows]
        result = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        outputs = self.scheduler.update_from_output(output, result)
        now_ms = (self.world.now_s - begin_s) * 1e3
        for one in (o for client in outputs.values() for o in client.outputs):
            job = self.jobs[one.request_id]
            job.made += len(one.new_token_ids)
            if job.first_ms < 0 and job.made:
                job.first_ms = now_ms
            if one.finish_reason is not None:
                job.end_ms = now_ms
