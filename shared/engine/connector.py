"""Quire's KV connector for vLLM 0.26.0 (KVConnectorBase_V1): hooks in, SchedulerSide or WorkerSide out.

Loaded by `kv_connector_module_path`. Settings come through kv_connector_extra_config: `description` (JSON of
EngineDescription), `mempool_socket`, `instance`, `quota_pages`, `events_address`, `handoff_ttl_ms`.
"""

from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import BlockHash

from shared.engine import pool
from shared.engine.block_copy import BlockCopier
from shared.engine.cache_events import CacheEventSender
from shared.engine.connector_meta import StepPlan
from shared.engine.connector_scheduler import SchedulerSide
from shared.engine.connector_worker import WorkerSide
from shared.engine.page_swaps import GROUP
from shared.engine.vllm_setup import die_with_parent
from shared.ids import InstanceId
from shared.kv.layout import EngineDescription
from shared.mempool.engine_attachment import EngineAttachment

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class QuireConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM makes one with role SCHEDULER and one with role WORKER, in the same process for one rank."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.extra: dict[str, Any] = extra
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | None = None
        self.block_pool: BlockPool | None = None
        self.requests: dict[str, Request] = {}
        if role == KVConnectorRole.SCHEDULER:
            die_with_parent()
            address = extra.get("events_address")
            events = CacheEventSender(address) if address else None
            description = msgspec.json.decode(extra["description"], type=EngineDescription)
            self.scheduler = SchedulerSide(description.block_tokens, description.block_bytes, events)

    # -- scheduler side -----------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Turn on the pool's cache events; publish_events() takes them each step."""
        self.block_pool = gpu_block_pool
        gpu_block_pool.enable_kv_cache_events = True

    def on_new_request(self, request: "Request") -> None:
        assert self.scheduler is not None
        self.requests[request.request_id] = request
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self.scheduler is not None
        return self.scheduler.num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        assert self.scheduler is not None
        if num_external_tokens > 0:
            self.scheduler.after_alloc(request, list(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        assert self.scheduler is not None
        plan = self.scheduler.build_plan(scheduler_output, self.requests)
        if self.block_pool is not None:
            self.scheduler.publish_events(self.block_pool.take_events(), self._is_cached)
        return plan

    def _is_cached(self, block_hash: bytes) -> bool:
        assert self.block_pool is not None
        return self.block_pool.get_cached_block(BlockHash(block_hash), [GROUP]) is not None

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        assert self.scheduler is not None
        self.scheduler.loads_ended(connector_output.finished_recving or set())

    def told_first(self, request_id: str) -> dict[str, Any]:
        """CopyScheduler asks, with the request's first output."""
        assert self.scheduler is not None
        return self.scheduler.told_first(request_id)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks are never held back: every completed block was saved in the step that completed it."""
        assert self.scheduler is not None
        self.requests.pop(request.request_id, None)
        return False, self.scheduler.finished(request)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    # -- worker side --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The tensors exist: attach to the mempool if one is configured."""
        description = msgspec.json.decode(self.extra["description"], type=EngineDescription)
        socket = self.extra.get("mempool_socket")
        if not socket:
            return
        copier = BlockCopier(kv_caches)
        if copier.block_bytes != description.block_bytes:
            raise ValueError(f"a block is {copier.block_bytes} bytes, described as {description.block_bytes}")
        attachment = EngineAttachment(
            socket=socket,
            instance=InstanceId(self.extra["instance"]),
            description=description,
            quota_pages=self.extra["quota_pages"],
        )
        pool.set_attachment(attachment)
        self.worker = WorkerSide(copier, attachment, self.extra["handoff_ttl_ms"])

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.worker is not None:
            self.worker.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before a request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks are saved after the forward pass instead."""

    def wait_for_save(self) -> None:
        if self.worker is not None:
            self.worker.save(self._plan())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self.worker is None:
            return None, None
        if self.has_connector_metadata():
            self.worker.drop(self._plan())
        return None, self.worker.take_received() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_failed() if self.worker is not None else set()

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker.attachment.close()
            pool.set_attachment(None)

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan
