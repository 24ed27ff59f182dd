"""The connector's worker side: copies blocks between the KV cache and pages.

Loads run on a thread of their own, between and beside engine steps; each page's word is read before
and after its copy, and a page that changed fails its block, which vLLM then recomputes. Saves run at the end
of the step's forward pass, in the engine's thread, and are sealed when the bytes are in the page.
"""

import logging
import queue
import threading
import time

from shared.engine import pool
from shared.engine.block_copy import BlockCopier
from shared.engine.connector_meta import LoadBlocks, StepPlan
from shared.ids import BlockHash, Epoch, HandoffId, PageId
from shared.mempool.engine_attachment import SealEntry

logger = logging.getLogger(__name__)


class WorkerSide:
    """One per engine process with KV tensors."""

    def __init__(self, copier: BlockCopier, attachment: pool.PoolAttachment, handoff_ttl_ms: int) -> None:
        self.copier = copier
        self.attachment = attachment
        self.handoff_ttl_ms = handoff_ttl_ms
        self._jobs: queue.SimpleQueue[LoadBlocks | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._received: set[str] = set()
        self._failed: set[int] = set()
        self._thread = threading.Thread(target=self._load_forever, name="quire-load", daemon=True)
        self._thread.start()

    def start_loads(self, plan: StepPlan) -> None:
        """Queue the step's loads; returns at once."""
        for load in plan.loads:
            self._jobs.put(load)

    def save(self, plan: StepPlan) -> None:
        """Write, seal and hand off what this step completed. Runs after the forward pass."""
        saves, plan.saves = plan.saves, []
        if saves:
            owned = [(PageId(s.page), Epoch(s.epoch)) for s in saves]
            self.attachment.writing(owned)
            self.copier.save(
                [s.block for s in saves], [self.attachment.page_view(PageId(s.page)) for s in saves]
            )
            self.attachment.seal(
                [
                    SealEntry(
                        PageId(s.page),
                        Epoch(s.epoch),
                        BlockHash(s.block_hash),
                        BlockHash(s.parent),
                        s.valid_tokens,
                    )
                    for s in saves
                ]
            )
        handoffs, plan.handoffs = plan.handoffs, []
        for handoff in handoffs:
            hashes = [BlockHash(h) for h in handoff.hashes]
            self.attachment.handoff_ready(HandoffId(handoff.handoff_id), hashes, self.handoff_ttl_ms)

    def drop(self, plan: StepPlan) -> None:
        """The step ended without its forward pass: hand unused pages back."""
        if plan.saves:
            self.attachment.give_back([(PageId(s.page), Epoch(s.epoch)) for s in plan.saves])
            plan.saves = []

    def take_received(self) -> set[str]:
        """Requests whose loads ended since the last call, whole or with failed blocks."""
        with self._lock:
            out, self._received = self._received, set()
        return out

    def take_failed(self) -> set[int]:
        """Cache blocks whose load failed since the last call."""
        with self._lock:
            out, self._failed = self._failed, set()
        return out

    def close(self) -> None:
        """Ends the load thread."""
        self._jobs.put(None)
        self._thread.join(timeout=5.0)

    def _load_forever(self) -> None:
        while (load := self._jobs.get()) is not None:
            started = time.perf_counter()
            try:
                failed = self._load(load)
            except Exception:
                # whatever went wrong, the request must come back: all its blocks are recomputed
                logger.exception("load of request %s failed", load.request_id)
                failed = set(load.blocks)
            pool.fetch_ms[load.request_id] = (time.perf_counter() - started) * 1e3
            if failed:
                pool.failed_blocks[load.request_id] = len(failed)
            with self._lock:
                self._failed |= failed
                self._received.add(load.request_id)

    def _load(self, load: LoadBlocks) -> set[int]:
        views = [self.attachment.page_view(PageId(page)) for page in load.pages]
        staged = None
        if self.copier.device.type != "cpu":
            staged = self.copier.stage(views)
        failed: set[int] = set()
        for page, epoch, block, view in zip(load.pages, load.epochs, load.blocks, views, strict=True):
            if not self.attachment.is_sealed(PageId(page), Epoch(epoch)):
                failed.add(block)
                continue
            if staged is None:
                self.copier.load_one(view, block)
                if not self.attachment.is_sealed(PageId(page), Epoch(epoch)):
                    failed.add(block)
        if staged is not None:
            self.copier.upload(staged, load.blocks)
        return failed
