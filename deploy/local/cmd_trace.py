"""`quire trace REQUEST_ID`: one request's timeline as text."""

import time
from pathlib import Path
from typing import Annotated

import typer

from deploy.local import addresses, config
from deploy.local.terminal import fail, out, status_or_none
from shared import settings
from shared.observe import timeline
from shared.observe.span_record import SpanRecord

FLUSH_WAIT_S = 6.0  # processes write their spans in batches
POLL_S = 0.3


def trace(
    request_id: Annotated[
        str, typer.Argument(help="chatcmpl-... or cmpl-...: the answer's id, or a trace id.")
    ],
    jaeger: Annotated[str, typer.Option(help="Jaeger's query URL, e.g. http://127.0.0.1:16686.")] = "",
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Local span store. Default: the cluster's.")
    ] = None,
) -> None:
    """Print what happened to one request: every span of every service on one time axis."""
    settings.check_text("REQUEST_ID", request_id)
    if jaeger:
        addresses.check_url("--jaeger", jaeger, "http://127.0.0.1:16686")
    spans = _read(request_id, jaeger, folder)
    if not spans:
        status = status_or_none()
        endpoint = status["trace_endpoint"] if status else ""
        hint = f"; traces go to {endpoint}: give --jaeger URL" if endpoint and not jaeger else ""
        fail(f"no spans of {request_id!r}{hint}")
    out.print(timeline.render(spans), end="", no_wrap=True, overflow="ignore", crop=False)


def _read(request_id: str, jaeger: str, folder: Path | None) -> list[SpanRecord]:
    """Until two looks saw the same spans, so that a fresh trace is whole. Without a cluster nothing is fresh."""
    store = folder or config.paths_of(config.default_home()).traces
    may_grow = bool(jaeger) or status_or_none() is not None
    end = time.monotonic() + FLUSH_WAIT_S
    spans: list[SpanRecord] = []
    while time.monotonic() < end:
        seen = len(spans)
        spans = timeline.read_jaeger(jaeger, request_id) if jaeger else timeline.read_local(store, request_id)
        if not may_grow:
            break
        is_old = bool(spans) and time.time() - max(s.end_ns for s in spans) / 1e9 > FLUSH_WAIT_S
        if is_old or (seen and len(spans) == seen and _has_root(spans)):
            break
        time.sleep(POLL_S)
    return spans


def _has_root(spans: list[SpanRecord]) -> bool:
    return any(not span.parent_id for span in spans)
