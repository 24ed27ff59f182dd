"""vLLM's scheduler for an engine that copies blocks to and from pages: it tells of copies with the first output."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from shared.engine.kv_told import tell_first


class CopyScheduler(Scheduler):
    """With QuireConnector, one step at a time."""

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, with what first outputs tell."""
        outputs = super().update_from_output(*args, **kwargs)
        tell_first(outputs, self.connector.told_first)
        return outputs
