"""The cheapest engine behind a router: `python -m loadtest.trivial_upstream --ports 9001,9002`.

One process and one loop for all ports, a fixed answer, bodies are not parsed: what is measured is in front of it.
"""

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Sequence
from typing import cast

import uvloop

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


def _answer(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


COMPLETION = _answer(
    {
        "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "mock",
        "choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 4096, "completion_tokens": 1, "total_tokens": 4097},
    }
)  # fmt: skip
# whatever a router asks of a worker before it sends it anything
ABOUT = _answer(
    {
        "status": "ok", "object": "list", "data": [{"id": "mock", "object": "model", "owned_by": "mock"}],
        "model_path": "mock", "served_model_name": "mock", "model_id": "mock", "dp_size": 1, "version": "0",
    }
)  # fmt: skip


class Connection(asyncio.Protocol):
    """Requests one after the other on one connection."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """asyncio's."""
        self._held += data
        while (end := self._held.find(b"\r\n\r\n")) >= 0:
            found = _LENGTH.search(self._held, 0, end + 2)
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self._held) < size:
                return
            is_post = self._held.startswith(b"POST")
            del self._held[:size]
            assert self._transport is not None
            self._transport.write(COMPLETION if is_post else ABOUT)


async def run(ports: Sequence[int]) -> None:
    """Until the process ends."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Connection, "127.0.0.1", port) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ports", required=True)
    uvloop.run(run([int(port) for port in parser.parse_args(sys.argv[1:]).ports.split(",")]))
