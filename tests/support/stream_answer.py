"""A streamed answer of one chat request, over whatever takes its bytes."""

from types import SimpleNamespace
from typing import Any

from services.gateway.core.admission import Admission
from services.gateway.streaming import EventShape, StreamAnswer
from shared.observe.trace import start_span


def stream_answer(push: Any) -> StreamAnswer:
    """With a place in an admission of its own."""
    admission = Admission(10)
    return StreamAnswer(
        shape=EventShape("chat", "id", 1, "m", "fp", False),
        include_usage=False,
        cluster=SimpleNamespace(cancel=lambda call: None),
        admission=admission,
        ticket=admission.enter("", 1, now_ms=0),
        scope={},
        push=push,
        request_id="id",
        span=start_span("test"),
        received_ns=0,
        wants_receipt=False,
    )
