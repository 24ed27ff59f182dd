"""This engine process's attachment to its host's mempool, shared by both sides of the connector.

vLLM builds the connector twice in one process (scheduler side, worker side) and gives them no common
object, so the attachment is a module global, set once by the worker side, which knows the tensors.
"""

from typing import Any, Protocol

from shared.ids import BlockHash, Epoch, HandoffId, PageId


class PoolAttachment(Protocol):
    """What the connector asks of shared/mempool/engine_attachment.py. Nothing here blocks or raises."""

    @property
    def connected(self) -> bool: ...

    def take_pages(self, count: int) -> list[tuple[PageId, Epoch]]: ...

    def give_back(self, pages: list[tuple[PageId, Epoch]]) -> None: ...

    def page_view(self, page: PageId) -> memoryview: ...

    def is_sealed(self, page: PageId, epoch: Epoch) -> bool: ...

    def is_current(self, page: PageId, epoch: Epoch) -> bool: ...

    def writing(self, pages: list[tuple[PageId, Epoch]]) -> None: ...

    def seal(self, entries: list[Any]) -> None: ...

    def handoff_ready(self, handoff_id: HandoffId, hashes: list[BlockHash], ttl_ms: int) -> None: ...

    def close(self) -> None: ...


_attachment: PoolAttachment | None = None
fetch_ms: dict[str, float] = {}  # request id -> time its last load took; written by the load thread
failed_blocks: dict[str, int] = {}  # request id -> blocks that changed under the copy


def set_attachment(attachment: PoolAttachment | None) -> None:
    """Once, by the worker side, when the KV tensors exist."""
    global _attachment
    _attachment = attachment


def attachment() -> PoolAttachment | None:
    """None: this engine has no pool (none configured, or its ranks live in other processes)."""
    return _attachment
