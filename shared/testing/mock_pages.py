"""The mock engine's pages: what the connector does for vLLM, with bytes that prove themselves.

A mock block's content is its own hash, repeated. A page that is sealed under the expected epoch but holds
anything else is a broken promise of the pool (invariant 1), and the mock says so loudly instead of going on.
"""

from typing import TYPE_CHECKING

from shared.engine.interface import EngineRequest, HeldPages
from shared.engine.worker_config import WorkerSettings
from shared.errors import InvariantBroken
from shared.ids import BlockHash, Epoch, InstanceId, PageId
from shared.kv.block_hash import HASH_BYTES, hash_tail, pack_tokens
from shared.kv.layout import EngineDescription

if TYPE_CHECKING:
    from shared.mempool.engine_attachment import EngineAttachment

MOCK_BLOCK_BYTES = 4096
QUOTA_PAGES = 256


def _content(block_hash: BlockHash) -> bytes:
    return block_hash * (MOCK_BLOCK_BYTES // HASH_BYTES)


class MockPages:
    """This engine's attachment to its host's mempool. Nothing here waits."""

    def __init__(self, settings: WorkerSettings, description: EngineDescription) -> None:
        self._settings = settings
        self._description = description
        self._known: dict[BlockHash, tuple[PageId, Epoch]] = {}
        self._attachment: EngineAttachment | None = None

    def start(self) -> None:
        """Begin to attach; the attachment goes on trying by itself."""
        from shared.mempool.engine_attachment import EngineAttachment

        self._attachment = EngineAttachment(
            socket=self._settings.mempool_socket,
            instance=InstanceId(self._settings.instance),
            description=self._description,
            quota_pages=QUOTA_PAGES,
        )

    @property
    def connected(self) -> bool:
        """Attached now."""
        return self._attachment is not None and self._attachment.connected

    def check(self, held: HeldPages) -> int:
        """How many leading pages still hold what the lease promised; the rest must be computed.

        Raises: InvariantBroken when a page's word is right but its bytes are another block's.
        """
        attachment = self._attachment
        if attachment is None or not attachment.connected:
            return 0
        for i, (page, epoch, block_hash) in enumerate(zip(held.pages, held.epochs, held.hashes, strict=True)):
            if not attachment.is_sealed(page, epoch):
                return i
            got = bytes(attachment.page_view(page)[:MOCK_BLOCK_BYTES])
            if not attachment.is_sealed(page, epoch):
                return i
            if got != _content(block_hash):
                raise InvariantBroken(
                    f"page {page} under epoch {epoch} does not hold block {block_hash.hex()}"
                )
            self._known[block_hash] = (page, epoch)
        return len(held.pages)

    def save(self, request: EngineRequest, hashes: list[BlockHash]) -> None:
        """Put the prompt's blocks into pages, and lease them to the decode side if it is handed off."""
        attachment = self._attachment
        if attachment is None or not attachment.connected:
            return
        block = self._settings.block_tokens
        chain = [request.chain_seed, *hashes]
        wanted = [(h, chain[i], block) for i, h in enumerate(hashes)]
        tail = request.prompt_token_ids[len(hashes) * block :]
        if request.handoff_id and tail:
            wanted.append((hash_tail(chain[-1], pack_tokens(tail)), chain[-1], len(tail)))
        missing = [w for w in wanted if not self._is_current(w[0])]
        granted = attachment.take_pages(len(missing)) if missing else []
        self._write(attachment, missing[: len(granted)], granted)
        if request.handoff_id:
            ready: list[BlockHash] = []
            for block_hash, _, _ in wanted:
                if not self._is_current(block_hash):
                    break
                ready.append(block_hash)
            attachment.handoff_ready(request.handoff_id, ready, self._settings.handoff_ttl_ms)

    def _write(
        self,
        attachment: "EngineAttachment",
        blocks: list[tuple[BlockHash, BlockHash, int]],
        pages: list[tuple[PageId, Epoch]],
    ) -> None:
        from shared.mempool.engine_attachment import SealEntry

        if not pages:
            return
        attachment.writing(pages)
        entries = []
        for (block_hash, parent, valid), (page, epoch) in zip(blocks, pages, strict=True):
            attachment.page_view(page)[:MOCK_BLOCK_BYTES] = _content(block_hash)
            entries.append(SealEntry(page, epoch, block_hash, parent, valid))
            self._known[block_hash] = (page, epoch)
        attachment.seal(entries)

    def _is_current(self, block_hash: BlockHash) -> bool:
        entry = self._known.get(block_hash)
        if entry is None or self._attachment is None:
            return False
        if self._attachment.is_current(*entry):
            return True
        del self._known[block_hash]
        return False

    def close(self) -> None:
        """Detach; the mempool takes the granted pages back."""
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None
