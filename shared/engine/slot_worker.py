"""vLLM workers whose requests lie in slots of the mempool's pages: layouts "token-major" and "layer-major".

Everything else is page_worker.py's: the same pool, the same block ids, the same quota. `additional_config["quire"]`
says `slot_kernel` and `ahead_tokens` besides. Steps are eager: attention is called outside of graphs.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from shared.engine.page_worker import PageWorkerMixin
from shared.engine.slot_attention import SlotReader, use_kernel, use_reader
from shared.engine.slot_memory import SlotMemory
from shared.engine.slot_settings import GPU_AHEAD_TOKENS, GPU_TILE_TOKENS, install_backend
from shared.engine.slot_steps import SlotSteps
from shared.kv.layout import CUDA_PAGE_BYTES, HOST_PAGE_BYTES, EngineDescription
from shared.vmm.map_budget import process_budget
from shared.vmm.request_layout import RequestLayout, request_layout
from shared.vmm.request_slots import RequestSlots

logger = logging.getLogger(__name__)

SPARE_SLOTS = 4  # besides a quarter of the requests: places of ended ones, kept for their like


class SlotWorkerMixin(PageWorkerMixin):
    """Between vLLM's worker and its model runner: two windows over the pages, slots looked after at each step."""

    _steps: SlotSteps | None = None

    def init_device(self: Any) -> None:
        """vLLM's, with our attention in its place."""
        install_backend()
        super().init_device()

    def initialize_from_config(self: Any, kv_cache_config: KVCacheConfig) -> None:
        """Lay the cache over the pool's pages instead of allocating it. Raises: SettingsError, ResourceError."""
        assert self._memory is not None
        extra: dict[str, Any] = self.vllm_config.additional_config["quire"]
        description = msgspec.json.decode(extra["description"], type=EngineDescription)
        header = self._memory.header
        if kv_cache_config.num_blocks != header.num_pages + 1:
            raise ValueError(f"{kv_cache_config.num_blocks} blocks for {header.num_pages} pages")
        dtype = kv_cache_config.kv_cache_groups[0].kv_cache_spec.dtype
        layout = self._layout(description, dtype)
        memory = SlotMemory(self._memory, layout, self.device, GPU_AHEAD_TOKENS)
        self._memory.stay_attached()
        names = [name for tensor in kv_cache_config.kv_cache_tensors for name in tensor.shared_by]
        blocks, slots = {}, {}
        for layer, name in enumerate(names):
            blocks[name] = memory.view(memory.identity, layout.blocks(layer, header.num_pages + 1), dtype)
            slots[name] = memory.view(memory.slots, layout.slots(layer), dtype)
        self._steps = self._make_steps(memory, layout)
        use_kernel(extra["slot_kernel"])
        use_reader(SlotReader(self._steps, slots, _request_ids(self.model_runner)))
        with _caches_are(self.model_runner, blocks):
            super(PageWorkerMixin, self).initialize_from_config(kv_cache_config)
        self._follow_layers(kv_cache_config)

    def _layout(self: Any, description: EngineDescription, dtype: torch.dtype) -> RequestLayout:
        on_gpu = self.device.type != "cpu"
        max_requests = self.vllm_config.scheduler_config.max_num_seqs
        return request_layout(
            description,
            item_bytes=dtype.itemsize,
            page_bytes=self._memory.header.page_bytes,
            granularity_bytes=CUDA_PAGE_BYTES if on_gpu else HOST_PAGE_BYTES,
            num_slots=max_requests + max_requests // 4 + SPARE_SLOTS,
            guard_tokens=GPU_AHEAD_TOKENS if on_gpu else 0,
        )

    def _make_steps(self: Any, memory: SlotMemory, layout: RequestLayout) -> SlotSteps:
        if self.device.type != "cpu":
            table = RequestSlots(layout.num_slots, layout.slot_places)
            stream = torch.cuda.current_stream
            return SlotSteps(
                table, memory.mapper, layout.block_tokens, lambda: stream().record_event(), GPU_TILE_TOKENS
            )
        # the kernel has a mapping for each piece
        most = process_budget().limit * 3 // 4 // layout.num_pieces
        if self.vllm_config.scheduler_config.max_num_seqs * layout.slot_places > most:
            logger.warning(
                "%d requests of the longest kind would need more mappings than vm.max_map_count allows",
                self.vllm_config.scheduler_config.max_num_seqs,
            )
        table = RequestSlots(layout.num_slots, layout.slot_places, most)
        return SlotSteps(table, memory.mapper, layout.block_tokens, None)

    def execute_model(self: Any, scheduler_output: Any) -> Any:
        """vLLM's, behind the mapping of what the step reads."""
        if self._warming_up:  # without slots: attention is left out
            return super().execute_model(scheduler_output)
        assert self._steps is not None
        self._steps.before(scheduler_output)
        try:
            return super().execute_model(scheduler_output)
        finally:
            self._steps.after()

    def quire_slot_kernel(self, name: str) -> None:
        """For measurements: another kernel from the next step on."""
        use_kernel(name)

    def quire_slot_counters(self) -> dict[str, float]:
        """For measurements and tests."""
        assert self._steps is not None
        counters = self._steps.counters
        return {name: getattr(counters, name) for name in counters.__slots__}


def _request_ids(runner: Any) -> Any:
    """A function that says the request ids of the batch being prepared. Both of vLLM's runners."""
    if not hasattr(runner, "prepare_inputs"):
        return lambda: runner.input_batch.req_ids
    stock, batch_ids = runner.prepare_inputs, [[]]

    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        batch = stock(*args, **kwargs)
        batch_ids[0] = batch.req_ids
        return batch

    runner.prepare_inputs = prepare_inputs
    return lambda: batch_ids[0]


@contextlib.contextmanager
def _caches_are(runner: Any, blocks: dict[str, torch.Tensor]) -> Iterator[None]:
    """While open, the runner finds its layers' caches made already. Both of vLLM's runners."""
    import vllm.v1.worker.gpu.attn_utils as v2_module

    def nothing(*_args: Any) -> dict[str, torch.Tensor]:
        return {}

    def made(*_args: Any, **_kwargs: Any) -> dict[str, torch.Tensor]:
        return blocks

    stock = v2_module._allocate_kv_cache, v2_module._reshape_kv_cache
    v2_module._allocate_kv_cache, v2_module._reshape_kv_cache = nothing, made
    runner._allocate_kv_cache_tensors, runner._reshape_kv_cache_tensors = nothing, made
    try:
        yield
    finally:
        v2_module._allocate_kv_cache, v2_module._reshape_kv_cache = stock
        del runner._allocate_kv_cache_tensors, runner._reshape_kv_cache_tensors
