"""vLLM workers whose KV cache is the mempool's memory: block i + 1 lies in page i, all layers of it.

The cache is one window: a private page for vLLM's null block, then every page of this rank, mapped once. Layers are
strided views of it (vLLM's packed form), so a block's bytes are one contiguous run of a page. `worker_cls`
names PageCPUWorker or PageGPUWorker; settings as in page_scheduler.py.
"""

import contextlib
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, Protocol

import msgspec
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

from shared.engine.far_tables import change_tables, make_room, place_tables
from shared.engine.layer_progress import LayerProgress, open_word
from shared.engine.long_lists import read_long_lists_by_numpy, stage_ids_packed
from shared.engine.page_warmup import use_null_block
from shared.engine.page_window import PageWindow, device_name, open_window
from shared.engine.rank_processes import unlink_shared_memory
from shared.engine.tail_copies import copy_one_by_one
from shared.engine.vllm_setup import die_with_parent
from shared.ids import InstanceId
from shared.kv.layout import EngineDescription
from shared.mempool.rank_memory import RankMemory, pages_bytes


class _Worker(Protocol):
    vllm_config: Any
    device: torch.device
    rank: int
    model_runner: Any


class PageWorkerMixin:
    """Between vLLM's worker and its model runner: where the cache's memory comes from."""

    _window: PageWindow | None = None
    _memory: RankMemory | None = None
    _warming_up: bool = False
    _progress: LayerProgress | None = None  # with transfer_mode "by-layer"

    def init_device(self: Any) -> None:
        """vLLM's. A rank in a process of its own ends with the engine core, whatever it waits for."""
        die_with_parent()
        super().init_device()
        unlink_shared_memory(self.rank)
        read_long_lists_by_numpy()
        stage_ids_packed(self.model_runner)

    def compile_or_warm_up_model(self: Any) -> Any:
        """vLLM's; what its requests write is no page of the pool, which may be in use."""
        self._warming_up = True
        try:
            return super().compile_or_warm_up_model()
        finally:
            self._warming_up = False

    def execute_model(self: Any, scheduler_output: Any) -> Any:
        """vLLM's."""
        if self._warming_up:
            use_null_block(scheduler_output)
        elif (far := self._window.far if self._window is not None else None) is not None:
            change_tables(
                self.model_runner, scheduler_output, getattr(scheduler_output, "quire_far", ()), far.block_of
            )
            place_tables(scheduler_output, far.block_of)
        if self._progress is None or self._warming_up:
            return super().execute_model(scheduler_output)
        self._progress.begin(scheduler_output.quire_step)
        output = super().execute_model(scheduler_output)
        self._progress.end()
        return output

    def determine_available_memory(self: Any) -> int:
        """Attach to the pool, which may use what vLLM found free; says the bytes of the pool's blocks.

        Raises: ResourceError when the pool refuses this engine, or nothing is left for pages.
        """
        found_bytes = super().determine_available_memory()
        extra: dict[str, Any] = self.vllm_config.additional_config["quire"]
        description = msgspec.json.decode(extra["description"], type=EngineDescription)
        far_places = int(extra.get("far_places", 0))
        on_gpu = self.device.type == "cuda"
        self._memory = RankMemory(
            extra["mempool_socket"],
            InstanceId(extra["instance"]),
            description,
            self.rank,
            device=device_name(self.device, extra.get("kv_space", "")),
            capacity_bytes=pages_bytes(found_bytes) * description.tp_size if on_gpu else 0,
            far_places=far_places,
        )
        copy_one_by_one(self.model_runner, self._memory.header.page_bytes)
        if extra.get("follow_layers"):
            self._progress = LayerProgress(open_word(self._memory.layer_words(), self.device))
        return (self._memory.header.num_pages + 1 + far_places) * description.block_bytes

    def initialize_from_config(self: Any, kv_cache_config: KVCacheConfig) -> None:
        """Lay the cache over the pool's pages instead of allocating it."""
        assert self._memory is not None
        header = self._memory.header
        far_places = kv_cache_config.num_blocks - header.num_pages - 1
        if far_places != int(self.vllm_config.additional_config["quire"].get("far_places", 0)):
            raise ValueError(f"{kv_cache_config.num_blocks} blocks for {header.num_pages} pages")
        self._window = open_window(self._memory, self.device, far_places)
        self._memory.stay_attached(self._window.slabs, self._window.far)
        packed = packed_config(kv_cache_config, header.page_bytes)
        with _cache_from(self.model_runner, self._window.tensor):
            super().initialize_from_config(packed)
        if far_places:
            make_room(self.model_runner, far_places)
        self._follow_layers(kv_cache_config)

    def _follow_layers(self: Any, config: KVCacheConfig) -> None:
        """Layers lie in a page as their tensors are named."""
        if self._progress is not None:
            layers = self.vllm_config.compilation_config.static_forward_context
            self._progress.follow([layers[t.shared_by[0]].impl for t in config.kv_cache_tensors])


def packed_config(config: KVCacheConfig, page_bytes: int) -> KVCacheConfig:
    """The same cache with each block's layers one after another, blocks page_bytes apart."""
    packed = deepcopy(config)
    tensors: list[KVCacheTensor] = []
    offset = 0
    for tensor in packed.kv_cache_tensors:
        layer_bytes = tensor.size // packed.num_blocks
        tensors.append(
            KVCacheTensor(
                size=packed.num_blocks * page_bytes,
                shared_by=tensor.shared_by,
                offset=offset,
                block_stride=page_bytes,
            )
        )
        offset += layer_bytes
    assert offset <= page_bytes, f"{offset} bytes of layers in pages of {page_bytes}"
    packed.kv_cache_tensors = tensors
    return packed


@contextlib.contextmanager
def _cache_from(runner: Any, window: torch.Tensor) -> Iterator[None]:
    """While open, the runner finds its cache tensor allocated already. Both of vLLM's runners."""
    import vllm.v1.worker.gpu.attn_utils as v2_module

    def allocate(config: KVCacheConfig, *_args: Any) -> dict[str, torch.Tensor]:
        return {name: window for tensor in config.kv_cache_tensors for name in tensor.shared_by}

    stock = v2_module._allocate_kv_cache
    v2_module._allocate_kv_cache = allocate
    runner._allocate_kv_cache_tensors = allocate
    try:
        yield
    finally:
        v2_module._allocate_kv_cache = stock
        del runner._allocate_kv_cache_tensors
