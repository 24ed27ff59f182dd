"""Who is told of an engine's steps, by vLLM's adapter and by the mock."""

from collections.abc import Callable
from typing import Any

from shared.engine.interface import EngineStep


class StepListener:
    """What it raises is logged, once: nothing that one learns from a step is worth an engine.

    Args: log: of whoever tells.
    """

    def __init__(self, log: Any) -> None:
        self.hear: Callable[[EngineStep], None] | None = None
        self._log = log
        self._has_failed = False

    def tell(self, step: EngineStep) -> None:
        """Of a step that is over."""
        if self.hear is None:
            return
        try:
            self.hear(step)
        except Exception:  # noqa: BLE001  see the class
            if not self._has_failed:
                self._log.exception("step_listener_failed", step=repr(step))
            self._has_failed = True
