"""What a service holds of a span. The base records nothing; recorder.py has the recording one."""

import random
from collections.abc import Mapping
from types import TracebackType
from typing import Any


class Span:
    """One piece of a request's life. This base records nothing: it only carries the trace context on.

    As a context manager it ends on exit and records an exception that passes through.
    """

    __slots__ = ("_traceparent",)

    def __init__(self, traceparent: str = "") -> None:
        self._traceparent = traceparent

    @property
    def traceparent(self) -> str:
        """To hand to children, also in other processes: `00-<32 hex>-<16 hex>-<01 if recorded>`."""
        if not self._traceparent:
            # Not recorded, so the flag is 00: no service downstream records half of a trace.
            self._traceparent = f"00-{random.getrandbits(128) | 1:032x}-{random.getrandbits(64) | 1:016x}-00"
        return self._traceparent

    @property
    def recording(self) -> bool:
        """Whether attributes are kept; ask before computing an expensive one."""
        return False

    def set(self, key: str, value: Any) -> None:
        """Set an attribute: str, bool, int, float or a list of one of them."""

    def event(self, name: str, attributes: Mapping[str, Any] | None = None, at_ns: int | None = None) -> None:
        """A point in time, e.g. "first_token": now, or at `at_ns` (Unix time)."""

    def fail(self, message: str) -> None:
        """Mark the span as an error."""

    def end(self, end_ns: int | None = None) -> None:
        """End now, or at `end_ns` (Unix time). Ending twice is harmless."""

    def __enter__(self) -> "Span":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(f"{kind.__name__ if kind else 'error'}: {error}")
        self.end()
