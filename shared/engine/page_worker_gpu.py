"""See page_worker.py."""

from vllm.v1.worker.gpu_worker import Worker

from shared.engine.page_worker import PageWorkerMixin


class PageGPUWorker(PageWorkerMixin, Worker):
    """The GPU worker over the pool's pages of its device."""
