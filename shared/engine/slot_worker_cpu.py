"""See slot_worker.py. Apart, because importing vLLM's CPU worker on a CUDA build is not free of effects."""

from vllm.v1.worker.cpu_worker import CPUWorker

from shared.engine.slot_worker import SlotWorkerMixin


class SlotCPUWorker(SlotWorkerMixin, CPUWorker):
    """The CPU worker with requests in slots of memfd pages."""
