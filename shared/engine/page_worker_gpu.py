"""See page_worker.py."""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from shared.engine.page_worker import PageWorkerMixin


class PageGPUWorker(PageWorkerMixin, Worker):
    """The GPU worker over the pool's pages of its device."""

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's. A step was launched: memory under pressure is unmapped with care."""
        output = super().sample_tokens(*args, **kwargs)
        if self._memory is not None:
            self._memory.step_launched()
        return output
