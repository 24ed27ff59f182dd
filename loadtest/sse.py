"""Reading a stream of server-sent events line by line, and what a reader measures: TTFT and TPOT.

Lines must come from the raw stream (`readline`): clients that collect blocks first (locust's iter_lines waits
for 1024 bytes) move every time to the right. Reading goes on past [DONE] to the end of the response, so that
the connection can be used again.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MAX_LINE_BYTES = 1 << 20


class StreamError(Exception):
    """The stream did not end as one must: an error event, no [DONE], or a line that is no event."""


def events(readline: Callable[[], bytes]) -> Iterator[str]:
    """Data of every event, without [DONE]. Raises: StreamError when the stream ends before [DONE]."""
    done = False
    while line := readline():
        if len(line) > MAX_LINE_BYTES:
            raise StreamError(f"a line of {len(line)} bytes")
        text = line.strip()
        if not text or text.startswith(b":"):
            continue
        if not text.startswith(b"data:"):
            raise StreamError(f"not an event: {text[:80]!r}")
        data = text[5:].strip()
        if data == b"[DONE]":
            done = True
        elif not done:
            yield data.decode()
    if not done:
        raise StreamError("the stream ended without [DONE]")


def shown_text(event: dict[str, Any]) -> str:
    """The text (or tool-call argument text) that an event shows; "" for role, usage and the like."""
    parts = []
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        parts.append(choice.get("text") or delta.get("content") or "")
        parts += [call.get("function", {}).get("arguments") or "" for call in delta.get("tool_calls") or []]
    return "".join(parts)


@dataclass(slots=True)
class StreamTimes:
    """Times of one streamed answer, in ms from the start. `gaps_ms`: between consecutive content events."""

    started: float  # seconds of time.perf_counter()
    ttft_ms: float = 0.0  # 0: no token came
    last_ms: float = 0.0
    num_events: int = 0  # with content
    output_tokens: int = 0  # as usage says; else one per content event
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    gaps_ms: list[float] = field(default_factory=list)

    @property
    def tpot_ms(self) -> float:
        """(last - first) / (output tokens - 1); 0 for fewer than two tokens."""
        tokens = self.output_tokens or self.num_events
        return (self.last_ms - self.ttft_ms) / (tokens - 1) if tokens > 1 else 0.0

    def note(self, event: dict[str, Any], now: float) -> None:
        """Count one event that came at `now`. Raises: StreamError when it is an error event."""
        if "error" in event:
            raise StreamError(json.dumps(event["error"]))
        if usage := event.get("usage"):
            self.prompt_tokens = usage["prompt_tokens"]
            self.output_tokens = usage["completion_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        text = shown_text(event)
        if not text:
            return
        at_ms = (now - self.started) * 1000
        if self.num_events:
            self.gaps_ms.append(round(at_ms - self.last_ms, 3))
        else:
            self.ttft_ms = at_ms
        self.last_ms = at_ms
        self.num_events += 1
        self.text += text


def read_stream(readline: Callable[[], bytes], started: float) -> StreamTimes:
    """Read a whole stream. Raises: StreamError, json.JSONDecodeError."""
    times = StreamTimes(started)
    for data in events(readline):
        times.note(json.loads(data), time.perf_counter())
    return times
