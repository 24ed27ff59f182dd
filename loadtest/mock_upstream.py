"""A tiny OpenAI-like server behind measured proxies: answers at once, streams one token per tick to all.

python -m loadtest.mock_upstream --port PORT --step-ms 50

Its ticks are an engine's steps: every running stream gets its next token in the same tick, as from vLLM.
The first token leaves with the request, so that a proxy's added TTFT is all there is to see.
"""

import argparse
import asyncio
import json
from typing import Any

import httptools

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n"
_BASE = {"id": "chatcmpl-mock", "created": 1, "model": "mock"}


def _event(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    body = {**_BASE, "object": "chat.completion.chunk", "choices": [choice]}
    return _chunk(b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_FIRST = _event({"role": "assistant", "content": ""}) + _event({"content": " token"})
# Different ones: LiteLLM ends a stream that repeats itself.
_NEXT = [_event({"content": f" token{number}"}) for number in range(8)]
_LAST = _event({}, "length") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Upstream:
    """All streams of the server."""

    def __init__(self) -> None:
        self.streams: dict[Connection, int] = {}  # to tokens left

    async def run(self, step_s: float) -> None:
        """Tick for ever."""
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        while True:
            next_at = max(next_at + step_s, loop.time())
            await asyncio.sleep(next_at - loop.time())
            for connection, left in list(self.streams.items()):
                token = _NEXT[left % len(_NEXT)]
                connection.send(token if left > 1 else token + _LAST)
                if left > 1:
                    self.streams[connection] = left - 1
                else:
                    del self.streams[connection]


class Connection(asyncio.Protocol):
    """One client connection. httptools calls the on_... methods."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._upstream.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        request = json.loads(self._body) if self._body else {}
        self._parser = httptools.HttpRequestParser(self)
        if request.get("stream"):
            self._stream(int(request.get("max_tokens") or 16))
            return
        message = {"role": "assistant", "content": " token" * 2}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
        usage = {"prompt_tokens": 64, "completion_tokens": 2, "total_tokens": 66}
        models = [{"id": "mock", "object": "model", "created": 1, "owned_by": "mock"}]
        body = {**_BASE, "object": "chat.completion", "choices": [choice], "usage": usage, "data": models}
        data = json.dumps(body).encode()
        self.send(_HEAD % (b"application/json", b"content-length: %d\r\n" % len(data)) + data)

    def _stream(self, num_tokens: int) -> None:
        self.send(_HEAD % (b"text/event-stream", b"transfer-encoding: chunked\r\n"))
        self.send(_FIRST if num_tokens > 1 else _FIRST + _LAST)
        if num_tokens > 1:
            self._upstream.streams[self] = num_tokens - 1

    def send(self, data: bytes) -> None:
        """One write."""
        if self._transport is not None:
            self._transport.write(data)


async def _serve(port: int, step_ms: float) -> None:
    upstream = Upstream()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(upstream), "127.0.0.1", port)
    async with server:
        await upstream.run(step_ms / 1000)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=50.0)
    options = parser.parse_args()
    asyncio.run(_serve(options.port, options.step_ms))


if __name__ == "__main__":
    main()
