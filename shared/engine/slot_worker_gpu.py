"""See slot_worker.py."""

from vllm.v1.worker.gpu_worker import Worker

from shared.engine.slot_worker import SlotWorkerMixin


class SlotGPUWorker(SlotWorkerMixin, Worker):
    """The GPU worker with requests in slots of the pool's pages of its device."""
