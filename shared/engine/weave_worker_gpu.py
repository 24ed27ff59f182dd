"""See weave_worker.py."""

from vllm.v1.worker.gpu_worker import Worker

from shared.engine.page_worker_gpu import PageGPUWorker
from shared.engine.slot_worker import SlotWorkerMixin
from shared.engine.weave_worker import WeaveWorkerMixin


class WeaveGPUWorker(WeaveWorkerMixin, Worker):
    """With a cache of its own."""


class WeavePageGPUWorker(WeaveWorkerMixin, PageGPUWorker):
    """Over the pool's pages of its device."""


class WeaveSlotGPUWorker(WeaveWorkerMixin, SlotWorkerMixin, Worker):
    """With requests in slots of the pool's pages: fused only."""
