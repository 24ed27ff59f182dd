"""The vLLM 0.26.0 engine behind shared/engine/interface.py: an AsyncLLM with Quire's connector.

Construct it before the process has an event loop or threads: the engine core is forked from here, so that a
worker forked from a process that has imported vLLM is ready in a second or two instead of half a minute.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from shared.background_task import begin_task
from shared.engine import early_requests, fair_scheduler, far_scheduler, page_room, page_scheduler
from shared.engine.block_hasher import EXTRA_ARGS_KEY
from shared.engine.cache_events import CacheEventReceiver
from shared.engine.cpu_dtype import engine_dtype
from shared.engine.describe import describe_engine, why_not_in_pages
from shared.engine.early_requests import EARLY_KEY, PACKED, EarlyStream, EarlyStreams
from shared.engine.engine_arguments import (
    engine_arguments,
    for_the_core,
    in_memory,
    with_slots,
    without_pool,
)
from shared.engine.engine_sampling import asked_deltas, engine_spec
from shared.engine.fair_view import FairView
from shared.engine.grammar_checks import GrammarChecks, is_of_vllms_check
from shared.engine.interface import (
    CacheEvent,
    EngineDelta,
    EngineLoad,
    EngineRequest,
    EngineRoom,
    EngineStep,
)
from shared.engine.kv_told import Told, keep_told, kv_use
from shared.engine.load_view import LoadView
from shared.engine.page_room import room_from
from shared.engine.pages_view import PagesView
from shared.engine.preload import preload_architecture
from shared.engine.rank_processes import EngineFolder, host_ranks
from shared.engine.sampling import honour_seeds, mark_checked, prompt_rows, sampling_params, trust_checks
from shared.engine.vllm_setup import fork_ranks
from shared.engine.weave_restart import started
from shared.engine.weave_settings import weave_arguments
from shared.engine.worker_config import WorkerSettings, has_slots, on_device, works_in_pages
from shared.errors import ClusterError, InvalidRequest, PeerGone
from shared.kv.model_files import check_split
from shared.kv.packed_ids import PackedIds
from shared.kv.words import u32_bytes, u64_bytes
from shared.observe.log import get_logger
from shared.wire.requests import TokenLogprob

_log = get_logger("engine")

EVENT_POLL_S = 0.1
NO_ARGS: Mapping[str, Any] = MappingProxyType({})


class VllmEngine:
    """Implements shared.engine.interface.Engine on AsyncLLM.

    Raises (constructor): SettingsError for a model that cannot be hosted; what vLLM raises otherwise.
    """

    known_cost = None

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings = on_device(settings, "cpu" if current_platform.is_cpu() else "cuda")
        dtype = engine_dtype(settings.dtype, settings.model_dir, on_cpu=current_platform.is_cpu())
        if dtype != settings.dtype:
            why = "this CPU has no fast products of 16 bits"
            _log.info("computes_in_float32", why=why, otherwise="worker.dtype")
            settings = msgspec.structs.replace(settings, dtype=dtype)
        preload_architecture(settings.model_dir)
        check_split(settings.model_dir, settings.tensor_parallel_size)
        honour_seeds()
        trust_checks()
        keep_told()
        config = self._engine_args(settings).create_engine_config()
        reason = why_not_in_pages(config)
        if settings.mempool_socket and settings.tensor_parallel_size > 1 and not works_in_pages(settings):
            reason = reason or "worker.kv_cache = copy moves no blocks of several ranks"
        self.uses_pool = not reason
        layout = settings.kv_layout if has_slots(settings) else "cross-layer"
        if reason:
            settings, layout = without_pool(settings, reason), "private"
            config = self._engine_args(settings, with_pool=False).create_engine_config()
        elif (chosen := with_slots(settings, config)) is not settings:
            settings, config = chosen, self._engine_args(chosen).create_engine_config()
        self.description = describe_engine(config, settings.model_name, settings.model_dir, layout)
        self.device = "cpu" if current_platform.is_cpu() else current_platform.get_device_name()
        self._set_sizes(config)
        self.keeps_leases = works_in_pages(settings)
        # fair slices and far blocks run more requests than memory holds at once: they have rules of their own
        self._counts_room = self.keeps_leases and settings.local_policy == "fcfs" and not settings.far_bytes
        self._reads_cache = settings.role == "decode" or settings.pd_caching != "basic"
        self._load_view: LoadView | None = None
        self._grammars: GrammarChecks | None = None  # of the other backends vLLM asks them itself
        if settings.structured_backend == "guidance":
            self._grammars = GrammarChecks(flexible=settings.structured_any_whitespace)
        self._unfinished_prefill: dict[str, int] = {}
        self._context_tokens: dict[str, int] = {}
        self._event_callback: Callable[[CacheEvent], None] | None = None
        self._event_task: asyncio.Task[None] | None = None
        self._folder = EngineFolder()
        try:
            self._begin(settings, config)
        except BaseException:
            self._folder.remove()
            raise

    def _begin(self, settings: WorkerSettings, config: VllmConfig) -> None:
        """The engine core's process, and those of its ranks."""
        events_address = f"ipc://{self._folder.path}/events"
        host_ranks(self._folder.path)
        extra = for_the_core(settings, self.description, events_address)
        if self.keeps_leases:
            config.additional_config["quire"] = extra
            page_scheduler.install()
            fair_scheduler.install()
            far_scheduler.install()
            page_room.install()
            early_requests.install()
        elif self.uses_pool:
            assert config.kv_transfer_config is not None
            config.kv_transfer_config.kv_connector_extra_config.update(extra)
        off = msgspec.structs.replace(settings, weave="off")
        self._llm, config = started(
            self._forked,
            config,
            lambda: self._engine_args(off, with_pool=self.uses_pool).create_engine_config(),
            self._folder.path,
        )
        self._early = EarlyStreams(self._llm.engine_core)
        # vLLM's own request span, under ours: it goes to whatever tracer provider the process sets. Naming an
        # endpoint instead would make vLLM set a provider of its own, with an exporter thread, before the fork.
        self._llm.output_processor.tracing_enabled = bool(settings.trace_endpoint or settings.trace_dir)
        self.num_kv_blocks = self.num_pages = int(config.cache_config.num_gpu_blocks or 0)
        if self.keeps_leases:  # vLLM's null block and far places are no pages of the space
            self.num_pages = max(0, self.num_kv_blocks - 1 - int(extra["far_places"]))
        self._fair = FairView(settings, self._llm.engine_core)
        self.served_elsewhere = self._fair.hear
        self._in_use = PagesView(self._llm.engine_core if self.keeps_leases else None)
        self._events = CacheEventReceiver(events_address)

    def _forked(self, config: VllmConfig) -> AsyncLLM:
        fork_ranks()  # at each start: whoever makes a configuration for a CPU asks for spawn once more
        return AsyncLLM.from_vllm_config(config, stat_loggers=[self._make_load_view])

    def _set_sizes(self, config: VllmConfig) -> None:
        """Of its steps."""
        self.max_running = config.scheduler_config.max_num_seqs
        self.max_batched_tokens = config.scheduler_config.max_num_batched_tokens
        self.graph_tokens = int(config.compilation_config.max_cudagraph_capture_size or 0)

    def _make_load_view(self, vllm_config: Any, engine_index: int = 0) -> LoadView:
        self._load_view = LoadView(self._unfinished_prefill, self._context_tokens, self.max_batched_tokens)
        return self._load_view

    @staticmethod
    def _engine_args(settings: WorkerSettings, *, with_pool: bool = True) -> AsyncEngineArgs:
        hosted = in_memory(settings, with_pool=with_pool)
        return AsyncEngineArgs(**engine_arguments(settings, hosted | weave_arguments(settings, hosted)))

    async def start(self) -> None:
        """Begin to deliver cache events."""
        self._event_task = begin_task(self._poll_events(), "cache-events")
        self._fair.start()
        self._in_use.start()

    async def _poll_events(self) -> None:
        while True:
            await asyncio.sleep(EVENT_POLL_S)
            if self._event_callback is not None:
                self._events.poll(self._event_callback)

    def on_cache_event(self, callback: Callable[[CacheEvent], None]) -> None:
        """One callback; it runs on the event loop."""
        self._event_callback = callback

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        """See Engine.generate."""
        spec, copies = engine_spec(request.sampling, request.num_output_tokens)
        key = request.engine_request_id
        early = self._early.take(key)
        stream: EarlyStream | AsyncGenerator[RequestOutput, None]
        if early is not None:
            stream = early
        else:
            params = sampling_params(spec, self._extra_args(request))
            if spec.structured is not None and self._grammars is not None:
                await self._grammars.check(spec.structured)
                mark_checked(params)
            stream = self._sent(request, params)
        self._unfinished_prefill[key] = len(request.prompt_token_ids)
        self._context_tokens[key] = len(request.prompt_token_ids)
        told: Told = {}
        try:
            async with contextlib.aclosing(stream):
                if early is not None and await early.is_sent():
                    await self._asked("quire_lease_came", key, held_args(request))
                async for output in stream:
                    is_first = self._unfinished_prefill.pop(key, None) is not None
                    if is_first:  # of several choices: the others also find what the first one brought
                        found = output.num_cached_tokens
                    output.num_cached_tokens = found
                    told |= output.kv_transfer_params or {}
                    deltas = _deltas(output)
                    if is_first and deltas and output.prompt_logprobs:  # every choice has the same
                        deltas[0].prompt_logprobs = await prompt_rows(output.prompt_logprobs)
                    if deltas and (is_first or output.kv_transfer_params or output.finished):
                        use = kv_use(output, told, len(request.prompt_token_ids))
                        deltas[0 if is_first else -1].kv_use = use
                    for delta in asked_deltas(deltas, request.sampling, copies):
                        self._context_tokens[key] += len(delta.token_ids)
                        yield delta
        except (EngineDeadError, EngineGenerateError) as error:
            if isinstance(error, EngineDeadError) or self._llm.errored:
                raise PeerGone(f"the engine died: {error!r}") from error
            if is_of_vllms_check(error.__cause__):
                raise InvalidRequest(f"the grammar cannot be checked: {error.__cause__!r}") from error
            _log.error("request_failed", engine_request_id=key, exc_info=True)
            raise ClusterError("the engine could not run this request") from error
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        finally:
            self._unfinished_prefill.pop(key, None)
            self._context_tokens.pop(key, None)

    def send_early(self, request: EngineRequest) -> None:
        """See Engine.send_early: a long prompt of one choice, whose grammar needs no time."""
        spec, _ = engine_spec(request.sampling, request.num_output_tokens)
        if self._is_long(request) and spec.n == 1 and spec.structured is None:
            key = request.engine_request_id
            params = sampling_params(spec, self._extra_args(request, {EARLY_KEY: key}))
            self._early.begin(key, lambda: self._sent(request, params))

    def drop_early(self, engine_request_id: str) -> None:
        """See Engine.drop_early."""
        self._early.drop(engine_request_id)

    def _sent(self, request: EngineRequest, params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's outputs of the request, which is sent when the first is asked for."""
        if not self._reads_cache:
            params.skip_reading_prefix_cache = True
        ids = request.prompt_token_ids
        prompt = TokensPrompt(prompt_token_ids=ids.unpacked() if isinstance(ids, PackedIds) else list(ids))
        if request.tenant_salt:
            prompt["cache_salt"] = request.tenant_salt
        headers = {"traceparent": request.traceparent} if request.traceparent else None
        return self._llm.generate(prompt, params, request.engine_request_id, trace_headers=headers)

    def _is_long(self, request: EngineRequest) -> bool:
        """Worth being sent as bytes, and early; the caller has the bytes."""
        least = self.settings.early_from_tokens
        return self.keeps_leases and 0 < least <= len(request.packed_prompt) // 4

    def _extra_args(self, request: EngineRequest, more: Mapping[str, Any] = NO_ARGS) -> dict[str, Any]:
        """Where Quire's scheduler, or the connector, looks for what the request brought."""
        out: dict[str, Any] = {"seed": request.chain_seed, "handoff_id": request.handoff_id or ""}
        out |= {"tenant": request.tenant_salt, "weight": request.weight}
        out["handoff_target"] = request.handoff_target or ""
        if request.private:
            out["private"] = True
        if request.handed_tokens:
            out["handed_tokens"] = request.handed_tokens
        out |= held_args(request) | more
        if self._is_long(request):
            out[PACKED] = request.packed_prompt
        return {EXTRA_ARGS_KEY if self.keeps_leases else "kv_transfer_params": out}

    async def abort(self, engine_request_id: str) -> None:
        """See Engine.abort."""
        await self._llm.abort(engine_request_id)

    async def holds_lease(self, lease_id: str) -> bool:
        """See Engine.holds_lease. Answered by the engine core behind every request sent to it before."""
        return bool(await self._asked("quire_holds_lease", lease_id))

    async def ping(self) -> None:
        """See Engine.ping."""
        await self._asked("get_supported_tasks")

    async def _asked(self, method: str, *args: Any) -> Any:
        """The engine core's answer."""
        try:
            return await self._llm.engine_core.call_utility_async(method, *args)
        except EngineDeadError as error:
            raise PeerGone(f"the engine died: {error!r}") from error

    def load(self) -> EngineLoad:
        """See Engine.load."""
        view = self._load_view
        return EngineLoad(
            num_running=view.running if view else 0,
            num_waiting=view.waiting if view else 0,
            unfinished_prefill_tokens=sum(self._unfinished_prefill.values()),
            running_context_tokens=sum(self._context_tokens.values()),
            kv_used_share=view.kv_used_share if view else 0.0,
            num_pages_in_use=self._in_use.num_in_use,
            step_ms=view.step_ms if view else 0.0,
            num_preempted=view.preempted if view else 0,
            **self._fair.of_load(),
        )

    async def room(self) -> EngineRoom | None:
        """See Engine.room."""
        if not self._counts_room:
            return None
        return room_from(await self._asked("quire_room"))

    def on_step(self, callback: Callable[[EngineStep], None]) -> None:
        """See Engine.on_step."""
        if self._load_view is not None:
            self._load_view.listener.hear = callback

    async def clear_cache(self) -> bool:
        """See Engine.clear_cache."""
        return await self._asked("reset_prefix_cache", False, False)

    @property
    def alive(self) -> bool:
        """False once the engine core's process has died."""
        return not self._llm.errored

    async def close(self) -> None:
        """Stops the engine core's process."""
        if self._event_task is not None:
            self._event_task.cancel()
        self._fair.close()
        self._in_use.close()
        if self._grammars is not None:
            await self._grammars.close()
        self._llm.shutdown()
        self._events.close()
        self._folder.remove()


def held_args(request: EngineRequest) -> dict[str, Any]:
    """What the engine core is told of the pages that the request holds; {}: it holds none."""
    held = request.held
    if held is None:
        return {}
    return {
        "pages": u32_bytes(held.pages),
        "epochs": u64_bytes(held.epochs),
        "hashes": b"".join(held.hashes),
        "valid_tokens": held.valid_tokens,
        "lease_id": held.lease_id,
        "digest": request.held_digest,
    }


def _logprobs(rows: Any) -> list[list[TokenLogprob]] | None:
    """vLLM's list of dicts, the sampled token first in each, as wire rows."""
    if rows is None:
        return None
    return [[TokenLogprob(token, lp.logprob, lp.rank or 0) for token, lp in row.items()] for row in rows]


def _deltas(output: RequestOutput) -> list[EngineDelta]:
    """One delta per choice of this output; request_done only on the very last."""
    deltas: list[EngineDelta] = []
    for choice in output.outputs:
        token_ids = list(choice.token_ids)
        stop_token = None
        if choice.finish_reason == "stop" and token_ids:
            stop_token = token_ids[-1]  # stop strings are the gateway's, so a token ended it
        deltas.append(
            EngineDelta(
                index=choice.index,
                token_ids=token_ids,
                finish_reason=choice.finish_reason,
                stop_token_id=stop_token,
                logprobs=_logprobs(choice.logprobs),
            )
        )
    if deltas and output.finished:
        deltas[-1].request_done = True
    return deltas
