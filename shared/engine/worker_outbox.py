"""Replies on their way to gateways: all of one pass of the event loop is one message per gateway.

An engine step wakes all its requests in one pass, so one Tokens message carries a step's output. Terminal
messages follow the tokens that came before them, in order.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from shared.errors import Overloaded, PeerGone
from shared.wire.requests import (
    Failed,
    Finished,
    Prefilled,
    PromptScored,
    TokenChunk,
    Tokens,
    WorkerToGateway,
)

Terminal = Prefilled | Finished | Failed


class Sender(Protocol):
    """RouterServer.send."""

    def __call__(self, identity: bytes, message: WorkerToGateway, *, more: bool = False) -> int: ...


@dataclass(slots=True)
class _Pending:
    chunks: list[TokenChunk] = field(default_factory=list)
    terminals: list[Terminal] = field(default_factory=list)
    scored: list[PromptScored] = field(default_factory=list)


class Outbox:
    """One per worker; used only from the loop.

    Args: on_lost: the gateway cannot be reached or does not read; what was pending for it is dropped.
    """

    def __init__(self, send: Sender, on_lost: Callable[[bytes, str], None]) -> None:
        self._send = send
        self._on_lost = on_lost
        self._pending: dict[bytes, _Pending] = {}
        self._scheduled = False
        self.num_messages = 0
        self.num_chunks = 0

    def chunk(self, identity: bytes, chunk: TokenChunk) -> None:
        """Queue new tokens of one choice."""
        self._of(identity).chunks.append(chunk)

    def scored(self, identity: bytes, message: PromptScored) -> None:
        """Queue a prompt's log probabilities: they go out before the chunks of the same pass."""
        self._of(identity).scored.append(message)

    def terminal(self, identity: bytes, message: Terminal) -> None:
        """Queue the end of an attempt."""
        self._of(identity).terminals.append(message)

    def _of(self, identity: bytes) -> _Pending:
        pending = self._pending.get(identity)
        if pending is None:
            pending = self._pending[identity] = _Pending()
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)
        return pending

    def flush(self) -> None:
        """Send everything now."""
        self._scheduled = False
        pending, self._pending = self._pending, {}
        for identity, item in pending.items():
            messages: list[WorkerToGateway] = [*item.scored]
            if item.chunks:
                messages.append(Tokens(chunks=item.chunks))
                self.num_chunks += len(item.chunks)
            messages += item.terminals
            self.num_messages += len(messages)
            last = messages.pop()
            try:
                for message in messages:
                    self._send(identity, message, more=True)
                self._send(identity, last)
            except (PeerGone, Overloaded) as error:
                self._on_lost(identity, error.message)
