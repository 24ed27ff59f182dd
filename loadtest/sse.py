"""Reading a stream of server-sent events line by line, and what a reader measures: TTFT and TPOT.

Lines must come from the raw stream (`readline`): clients that collect blocks first (locust's iter_lines waits
for 1024 bytes) move every time to the right. Reading goes on past [DONE] to the end of the response, so that
the connection can be used again.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_LINE_BYTES = 1 << 20


class StreamError(Exception):
    """The stream did not end as one must: an error event, no [DONE], or something that is no event of an answer."""


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
            try:
                yield data.decode()
            except UnicodeDecodeError as error:
                raise StreamError(f"not UTF-8: {data[:80]!r}") from error
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


def shown_ids(event: dict[str, Any]) -> list[int]:
    """Token ids that an event carries (`return_token_ids`, which we and vLLM have)."""
    return [one for choice in event.get("choices") or [] for one in choice.get("token_ids") or []]


@dataclass(slots=True)
class StreamTimes:
    """Times of one streamed answer, in ms from the start. `gaps_ms`: between consecutive content events.

    A content event shows text, or carries the ids of tokens that show none.
    """

    started: float  # seconds of time.perf_counter()
    ttft_ms: float = 0.0  # 0: no content came
    last_ms: float = 0.0  # of the last content event
    ended_ms: float = 0.0  # of it, or of the event behind it that says why the answer ended
    num_events: int = 0  # with content
    output_tokens: int = 0  # as usage says; else one per content event
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    gaps_ms: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # where they were asked for
    receipt: dict[str, Any] | None = None  # Quire's, where it was asked for

    @property
    def tpot_ms(self) -> float:
        """(end - first) / (output tokens - 1); 0 for fewer than two tokens, or where none was seen.

        Tokens that show no text before the first that does make it too short by their share, unless ids tell of them.
        """
        tokens = self.output_tokens or self.num_events
        return (self.ended_ms - self.ttft_ms) / (tokens - 1) if tokens > 1 and self.num_events else 0.0

    def take(self, data: str, now: float) -> None:
        """Count one event's data, which came at `now`. Raises: StreamError: an error, or no event of an answer."""
        try:
            self.note(json.loads(data), now)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise StreamError(f"no event of an answer: {data[:80]!r}: {error!r}") from error

    def note(self, event: dict[str, Any], now: float) -> None:
        """Count one event that came at `now`.

        Raises: StreamError when it is an error event; what its fields raise where they are not what they should be.
        """
        if "error" in event:
            raise StreamError(json.dumps(event["error"]))
        if usage := event.get("usage"):
            self.prompt_tokens = _count(usage["prompt_tokens"])
            self.output_tokens = _count(usage["completion_tokens"])
            self.cached_tokens = _count((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        if receipt := event.get("quire_receipt"):
            self.receipt = receipt
        text, ids = shown_text(event), shown_ids(event)
        self.token_ids += ids
        at_ms = (now - self.started) * 1000
        if any(choice.get("finish_reason") for choice in event.get("choices") or []):
            self.ended_ms = at_ms
        if not text and not ids:
            return
        if self.num_events:
            self.gaps_ms.append(round(at_ms - self.last_ms, 3))
        else:
            self.ttft_ms = at_ms
        self.last_ms = self.ended_ms = at_ms
        self.num_events += 1
        self.text += text


def _count(number: Any) -> int:
    """Of tokens. Raises: TypeError, ValueError."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{number!r} is no number of tokens")
    if number < 0:
        raise ValueError(f"{number} tokens")
    return number


def read_pieces(
    pieces: Sequence[tuple[float, bytes]], started: float, times: StreamTimes | None = None
) -> StreamTimes:
    """The same from a response that came in pieces: an event's time is that of the piece that ended it.

    Args: pieces: (arrival in seconds of time.perf_counter(), bytes). times: filled, for those who want a part, too.
    Raises: StreamError.
    """
    times = times or StreamTimes(started)
    at, held = 0.0, b""
    lines: deque[tuple[float, bytes]] = deque()
    for at, data in pieces:
        *whole, held = (held + data).split(b"\n")
        lines.extend((at, line + b"\n") for line in whole)
    if held:
        lines.append((at, held))
    now = started

    def readline() -> bytes:
        nonlocal now
        if not lines:
            return b""
        now, line = lines.popleft()
        return line

    for data in events(readline):
        times.take(data, now)
    return times


def read_stream(
    readline: Callable[[], bytes], started: float, times: StreamTimes | None = None
) -> StreamTimes:
    """Read a whole stream. Args: times: filled meanwhile, for those who are stopped. Raises: StreamError."""
    times = times or StreamTimes(started)
    for data in events(readline):
        times.take(data, time.perf_counter())
    return times
