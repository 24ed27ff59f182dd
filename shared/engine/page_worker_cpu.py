"""See page_worker.py. Apart, because importing vLLM's CPU worker on a CUDA build is not free of effects."""

from vllm.v1.worker.cpu_worker import CPUWorker

from shared.engine.page_worker import PageWorkerMixin


class PageCPUWorker(PageWorkerMixin, CPUWorker):
    """The CPU worker over the pool's memfd pages."""
