"""See weave_worker.py. Apart, because importing vLLM's CPU worker on a CUDA build is not free of effects."""

from vllm.v1.worker.cpu_worker import CPUWorker

from shared.engine.page_worker import PageWorkerMixin
from shared.engine.slot_worker import SlotWorkerMixin
from shared.engine.weave_worker import WeaveWorkerMixin


class WeaveCPUWorker(WeaveWorkerMixin, CPUWorker):
    """With a cache of its own."""


class WeavePageCPUWorker(WeaveWorkerMixin, PageWorkerMixin, CPUWorker):
    """Over the pool's memfd pages."""


class WeaveSlotCPUWorker(WeaveWorkerMixin, SlotWorkerMixin, CPUWorker):
    """With requests in slots of memfd pages: fused only."""
