"""The connector's scheduler side: decides which blocks to load and which to save. No copies, no sockets.

It acts on public fields of vLLM's requests and scheduler output, and on the block pool's event queue
(private; see cache events below). Save rule: every full block is written to a granted page in the step that
completes it, so nothing is ever owed when a request ends, and no block's freeing is delayed.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from shared.engine import pool
from shared.engine.cache_events import CacheEventSender
from shared.engine.choice_totals import ChoiceTotals
from shared.engine.connector_meta import Handoff, LoadBlocks, SaveBlock, StepPlan
from shared.engine.request_kv import RequestKv
from shared.ids import BlockHash, Epoch, PageId
from shared.kv.block_hash import chain_seed
from shared.kv.layout import num_blocks
from shared.kv.words import u32_list, u64_list

logger = logging.getLogger(__name__)

MAX_KNOWN_PAGES = 1 << 20


class SchedulerSide:
    """One per engine. Called only from the engine core's thread."""

    def __init__(self, block_tokens: int, block_bytes: int, events: CacheEventSender | None) -> None:
        self.block_tokens = block_tokens
        self.block_bytes = block_bytes
        self.events = events
        self.requests: dict[str, RequestKv] = {}
        self.plan = StepPlan()
        self.totals = ChoiceTotals()
        self.loading: dict[bytes, str] = {}  # hash -> request that loads it now
        self.loads_of: dict[str, list[bytes]] = {}
        self.known: OrderedDict[bytes, tuple[PageId, Epoch]] = OrderedDict()
        self.ours_of: dict[bytes, BlockHash] = {}  # vLLM's block hash -> ours, for cache events

    # -- requests ---------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Take the pages that the worker's front leased for it."""
        params = request.kv_transfer_params or {}
        if params.get("private"):
            return  # nothing of it is saved, nor said to anybody
        kv = RequestKv(
            block_tokens=self.block_tokens,
            seed=params.get("seed") or chain_seed("", ""),
            # what is held ends here, at times in the middle of a block
            num_prompt_tokens=params.get("handed_tokens") or request.num_prompt_tokens,
            handoff_id=params.get("handoff_id") or "",
        )
        if params.get("pages"):
            kv.offer(
                u32_list(params["pages"]),
                u64_list(params["epochs"]),
                params["hashes"],
                params["valid_tokens"],
                request.prompt_token_ids or [],
            )
            if kv.loadable is not None:
                held = zip(kv.loadable.hashes, kv.loadable.pages, kv.loadable.epochs, strict=True)
                for block_hash, page, epoch in held:
                    self._learn(block_hash, PageId(page), Epoch(epoch))
        self.requests[request.request_id] = kv

    def num_new_matched_tokens(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        """Tokens beyond num_computed that held pages cover. None: another request loads them; ask again."""
        kv = self.requests.get(request.request_id)
        attachment = pool.attachment()
        if (
            kv is None
            or kv.loadable is None
            or kv.load_tried
            or attachment is None
            or not attachment.connected
        ):
            return 0, False
        first = num_computed // self.block_tokens
        held = kv.loadable
        good = first
        while good < len(held.pages) and attachment.is_sealed(
            PageId(held.pages[good]), Epoch(held.epochs[good])
        ):
            good += 1
        covered = min(kv.num_loadable_tokens(good), request.num_tokens)
        if covered <= num_computed:
            return 0, False
        if any(h in self.loading for h in held.hashes[first : num_blocks(covered, self.block_tokens)]):
            return None, False
        kv.tokens_offered = covered
        return covered - num_computed, True

    def after_alloc(self, request: Request, block_ids: list[int], num_external: int) -> None:
        """The cache has blocks for the tokens to load: plan the copies. Blocks held locally are not moved."""
        kv = self.requests.get(request.request_id)
        if num_external <= 0 or kv is None or kv.loadable is None:
            return
        held = kv.loadable
        first = (kv.tokens_offered - num_external) // self.block_tokens
        last = num_blocks(kv.tokens_offered, self.block_tokens)
        kv.load_tried = True
        kv.tokens_loaded, kv.blocks_loaded, kv.blocks_local = num_external, last - first, first
        kv.is_told = False  # perhaps that it needed none, before it was preempted
        keys: list[bytes] = list(held.hashes[first:last])
        self.loads_of[request.request_id] = keys
        self.loading.update(dict.fromkeys(keys, request.request_id))
        self.plan.loads.append(
            LoadBlocks(
                request.request_id, held.pages[first:last], held.epochs[first:last], block_ids[first:last]
            )
        )

    def loads_ended(self, request_ids: set[str]) -> None:
        """The worker side finished these loads, whole or with failed blocks."""
        for request_id in request_ids:
            for key in self.loads_of.pop(request_id, ()):
                if self.loading.get(key) == request_id:
                    del self.loading[key]
            if request_id not in self.requests:  # its client left meanwhile: nobody asks how long it took
                pool.fetch_ms.pop(request_id, None)
                pool.failed_blocks.pop(request_id, None)

    def finished(self, request: Request) -> dict[str, Any]:
        """What the front's receipt says about the KV of the request, of all its choices that have ended."""
        request_id = request.request_id
        kv = self.requests.pop(request_id, None)
        return self.totals.add(request_id, self._untold(request_id, kv))

    def told_first(self, request_id: str) -> dict[str, Any]:
        """With the request's first output: its loads are over."""
        return self.totals.add(request_id, self._untold(request_id, self.requests.get(request_id)))

    def _untold(self, request_id: str, kv: RequestKv | None) -> dict[str, Any]:
        """What was loaded for it; {} when that was told already."""
        if kv is None or kv.is_told:
            return {}
        kv.is_told = True
        return {
            "tokens_loaded": kv.tokens_loaded,
            "blocks_loaded": kv.blocks_loaded,
            "blocks_local": kv.blocks_local,
            "bytes_loaded": kv.blocks_loaded * self.block_bytes,
            "fetch_ms": pool.fetch_ms.pop(request_id, 0.0),
            "failed_blocks": pool.failed_blocks.pop(request_id, 0),
        }

    # -- steps ------------------------------------------------------------------------------------

    def build_plan(self, output: SchedulerOutput, requests: dict[str, Request]) -> StepPlan:
        """Plan the saves of the blocks, and the hand-offs of the prompts, that this step completes."""
        for new in output.scheduled_new_reqs:
            if (kv := self.requests.get(new.req_id)) is not None:
                kv.block_ids = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            if (kv := self.requests.get(request_id)) is None:
                continue
            new_ids = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                kv.block_ids = list(new_ids[0]) if new_ids else []
            elif new_ids:
                kv.block_ids.extend(new_ids[0])
        attachment = pool.attachment()
        for request_id, count in output.num_scheduled_tokens.items():
            kv, request = self.requests.get(request_id), requests.get(request_id)
            if kv is None or request is None:
                continue
            have = min(request.num_computed_tokens + count, request.num_tokens)
            kv.extend_chain(request.all_token_ids, have)
            self._map_hashes(request, kv)
            if attachment is not None and attachment.connected:
                self._plan_saves(kv, request, have, attachment)
        plan, self.plan = self.plan, StepPlan()
        return plan

    def _plan_saves(
        self, kv: RequestKv, request: Request, have: int, attachment: pool.PoolAttachment
    ) -> None:
        full = have // self.block_tokens
        wanted = [(i, kv.chain[i], self.block_tokens) for i in range(kv.num_saved_blocks, full)]
        prompt_done = have >= kv.num_prompt_tokens and not kv.handed_off and bool(kv.handoff_id)
        if prompt_done:
            prompt_blocks = kv.num_prompt_tokens // self.block_tokens
            # blocks that an earlier chunk could not save, or that the pool dropped since, get a second chance
            wanted = [(i, kv.chain[i], self.block_tokens) for i in range(prompt_blocks)] + [
                w for w in wanted if w[0] >= prompt_blocks
            ]
            tail = kv.tail_hash(request.all_token_ids)
            if tail is not None:
                wanted.append((prompt_blocks, tail, kv.num_prompt_tokens % self.block_tokens))
        missing = [w for w in wanted if not self._in_pool(w[1], attachment)]
        granted = attachment.take_pages(len(missing)) if missing else []
        for (index, block_hash, valid), (page, epoch) in zip(missing, granted, strict=False):
            self.plan.saves.append(
                SaveBlock(kv.block_ids[index], page, epoch, block_hash, kv.parent_of(index), valid)
            )
            self._learn(block_hash, page, epoch)
        kv.num_saved_blocks = max(kv.num_saved_blocks, full)
        if prompt_done:
            kv.handed_off = True
            ready: list[bytes] = []
            for _, block_hash, _ in sorted(wanted, key=lambda w: w[0]):
                if not self._in_pool(block_hash, attachment):
                    break
                ready.append(block_hash)
            ready = ready[: num_blocks(kv.num_prompt_tokens, self.block_tokens)]
            self.plan.handoffs.append(Handoff(kv.handoff_id, ready))

    def _in_pool(self, block_hash: bytes, attachment: pool.PoolAttachment) -> bool:
        entry = self.known.get(block_hash)
        if entry is None:
            return False
        if attachment.is_current(*entry):
            self.known.move_to_end(block_hash)
            return True
        del self.known[block_hash]
        return False

    def _learn(self, block_hash: bytes, page: PageId, epoch: Epoch) -> None:
        self.known[block_hash] = (page, epoch)
        if len(self.known) > MAX_KNOWN_PAGES:
            self.known.popitem(last=False)

    # -- cache events -----------------------------------------------------------------------------

    def _map_hashes(self, request: Request, kv: RequestKv) -> None:
        if self.events is None:
            return
        limit = min(len(request.block_hashes), len(kv.chain))
        for i in range(limit - 1, -1, -1):
            key = bytes(request.block_hashes[i])
            if key in self.ours_of:
                break
            self.ours_of[key] = kv.chain[i]

    def publish_events(self, events: list[Any], is_cached: Callable[[bytes], bool]) -> None:
        """Translate the block pool's events into our hashes and send them to the front.

        Args: is_cached: whether the cache has such a block now: a block that leaves may not be the only one.
        """
        if self.events is None:
            return
        for event in events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.ours_of.clear()
                self.events.send("cleared", [])
                continue
            hashes = [bytes(h) for h in event.block_hashes]
            if kind == "BlockStored":
                stored = [self.ours_of[h] for h in hashes if h in self.ours_of]
                self.events.send("stored", stored)
            elif kind == "BlockRemoved":
                gone = [h for h in hashes if not is_cached(h)]
                removed = [ours for h in gone if (ours := self.ours_of.pop(h, None)) is not None]
                self.events.send("removed", removed)
