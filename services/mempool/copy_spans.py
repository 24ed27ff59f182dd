"""Spans of copies in the traces of the requests that they are for: when the mover has ended one."""

from typing import TYPE_CHECKING

from services.mempool.core.actions import CopyPages, PullRemote
from shared.observe.trace import Span, start_span

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


def of_copy(done: "CopyDone", begin_ns: int, action: CopyPages) -> None:
    """Of a copy from when its pages were there: `kv.return` in the trace of each request whose blocks it brought back
    from decode to prefill, `mempool.copy` in those of requests that waited for it."""
    for parent, num_blocks in action.returns.items():
        _of_blocks("kv.return", parent, done, begin_ns, num_blocks)
    for parent in action.readers:
        _of_blocks("mempool.copy", parent, done, begin_ns, len(action.targets))


def _of_blocks(name: str, parent: str, done: "CopyDone", begin_ns: int, num_blocks: int) -> None:
    span = start_span(
        name, parent=parent, start_ns=begin_ns,
        attributes={"blocks": num_blocks, "path": done.path, "copy_bytes": done.num_bytes},
    )  # fmt: skip
    if not done.ok:
        span.fail(done.reason)
    span.end()


class ReturnSpans:
    """`kv.return` of what goes back to another host, in the trace of its request: of one mempool's pulls, by number."""

    def __init__(self) -> None:
        self._open: dict[int, Span] = {}

    def begin(self, action: PullRemote) -> None:
        """end() follows, always."""
        if action.returns:
            self._open[action.number] = start_span(
                "kv.return", parent=action.returns,
                attributes={"blocks": len(action.targets), "path": "remote", "copy_bytes": action.num_bytes},
            )  # fmt: skip

    def end(self, number: int, *, failed: bool) -> None:
        """Of any pull: its bytes are here, or will not come."""
        span = self._open.pop(number, None)
        if span is not None:
            if failed:
                span.fail("the pull failed")
            span.end()
