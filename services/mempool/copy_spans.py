"""Spans of copies in the traces of the requests that they are for: when the mover has ended one."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shared.observe.trace import start_span

if TYPE_CHECKING:
    from services.mempool.mover import CopyDone


def of_layers(done: "CopyDone", parent: str) -> None:
    """A span of the copy, and one for each part: from when its layers were found written to their arrival."""
    if not parent or not done.sent:
        return
    span = start_span(
        "mempool.layers", parent=parent, start_ns=done.sent[0].begin_ns,
        attributes={"bytes": done.num_bytes, "path": done.path, "parts": len(done.sent)},
    )  # fmt: skip
    for each in done.sent if span.recording else ():
        which = {"layers.first": each.first, "layers.last": each.last - 1}
        part = start_span("mempool.layer", parent=span.traceparent, attributes=which, start_ns=each.begin_ns)
        part.end(each.end_ns)
    span.end(done.sent[-1].end_ns)


def of_return(done: "CopyDone", begin_ns: int, returns: Mapping[str, int]) -> None:
    """In the trace of each request whose blocks the copy brought back from decode to prefill, a span of it.

    Args: returns: blocks of each.
    """
    for parent, num_blocks in returns.items():
        span = start_span(
            "kv.return", parent=parent, start_ns=begin_ns,
            attributes={"blocks": num_blocks, "path": done.path, "copy_bytes": done.num_bytes},
        )  # fmt: skip
        if not done.ok:
            span.fail(done.reason)
        span.end()
