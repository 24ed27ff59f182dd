"""Parked requests' whole blocks leave the engine's memory and come back: what fair_scheduler.py needs for it.

Asks the mempool through the quota's one-way messages and hears its answers at step boundaries; nothing here waits
(decision 0003). Blocks leave only when the mempool has said that they are kept elsewhere; the last, partial block
stays, and private blocks do. What others here use leaves this request's block table only, and its page goes with the
last of them: else parked requests that share blocks would keep these here, whoever lacks pages. While a request is away
its block table has vLLM's null block in their places; it is scheduled when all of them are back, and its worker then
hears its table anew, as of every resumed request. A block that was lost makes the request compute from there on again,
and is counted.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from shared.engine.page_pool import LEASED, SEALED, PageBlockPool
from shared.engine.page_swaps import GROUP
from shared.fair.away import (
    LOOK_AGAIN_S,
    MAX_HASHES,
    NO_SPACE_S,
    PROBE_BYTES,
    Absences,
    Block,
    Swap,
    SwapRate,
    SwapState,
)
from shared.ids import BlockHash, Epoch, LeaseId, PageId
from shared.kv.words import u32_list, u64_list
from shared.mempool.page_quota import PageQuota, SealedPage
from shared.wire.mempool_swap import NO_PAGE, SwappedIn, SwappedOut

PATIENCE_S = 15.0  # who waits so long for its blocks is computed again: the mempool may stand still
MAX_NOTED = 64  # swaps of one request that its trace tells of

Lease = tuple[LeaseId, list[KVCacheBlock]]


class Swapper:
    """Of one engine core; its thread alone, but for `lost_pool()`, under the scheduler's lock.

    Args:
        tables: block tables by request.
        lost: called with a request of which a block was lost, or did not come: it must be computed again.
        end_lease: called with a request's id whose lease serves it no more.
    """

    def __init__(
        self,
        quota: PageQuota,
        pages: PageBlockPool,
        tables: dict[str, list[KVCacheBlock]],
        block_tokens: int,
        block_bytes: int,
        counts: Counter[str],
        rate: SwapRate,
        *,
        lost: Callable[[Request], None],
        end_lease: Callable[[str], None],
    ) -> None:
        self._quota, self._pages, self._tables = quota, pages, tables
        self._block_tokens, self._block_bytes = block_tokens, block_bytes
        self.counts, self.rate = counts, rate
        self._lost, self._end_lease = lost, end_lease
        self.absences = Absences()
        self._refused_s: dict[str, float] = {}  # requests of which nothing could leave, when
        # by request, for its trace: (way, begin, end, blocks), times in ns since the epoch
        self.noted: dict[str, list[tuple[str, int, int, int]]] = {}

    # -- out ------------------------------------------------------------------------------------------

    def begin_out(self, request: Request, lease: Lease | None, *, shared: bool = False) -> int:
        """Ask for everything of a parked request that may leave. Returns: how many pages are free then.

        The request is in no step, begun or to come. `shared`: also where that is no page, as others use them all.
        """
        request_id = request.request_id
        if self.absences.state(request_id) is not None or self._quota.lost:
            return 0
        if self._pages.clock() < self._refused_s.get(request_id, -NO_SPACE_S) + NO_SPACE_S:
            return 0
        if lease is not None and not any(self._pages.kinds[b.block_id] == LEASED for b in lease[1]):
            self._end_lease(request_id)  # all of its blocks are this engine's own
            lease = None
        alone, others = self._movable(request, lease)
        if alone or (shared and others):
            positions = sorted([*alone, *others[: MAX_HASHES - len(alone)]])
            blocks = {position: _block(request, position) for position in positions}
            swap = self.absences.leave(request_id, blocks, self._pages.clock())
            swap.alone = frozenset(alone)
            self._quota.swap_out(swap.number, swap.hashes())
        return len(alone)

    def _movable(self, request: Request, lease: Lease | None) -> tuple[list[int], list[int]]:
        """Positions of whole blocks whose pages nobody else here uses (leased ones: if they all may go), and of those
        that others use too. At most MAX_HASHES of the first, the last ones: the mempool frees prompts from their ends.
        """
        table = self._tables.get(request.request_id, [])
        whole = min(request.num_computed_tokens // self._block_tokens, len(request.block_hashes), len(table))
        leased = self._leased_alone(table, lease)
        kinds, counts = self._pages.kinds, self._pages.lease_counts
        alone: list[int] = []
        others: list[int] = []
        for position, block in enumerate(table[:whole]):
            number, kind = block.block_id, kinds[block.block_id]
            if block.is_null or kind not in (SEALED, LEASED):
                continue
            own = kind == SEALED and block.ref_cnt == 1 and number not in counts
            (alone if own or number in leased else others).append(position)
        return alone[-MAX_HASHES:], others

    def _leased_alone(self, table: list[KVCacheBlock], lease: Lease | None) -> set[int]:
        """Blocks that the request's own lease brought, where nobody else uses any of them."""
        if lease is None:
            return set()
        mine = {block.block_id for block in table}
        leased = [b for b in lease[1] if self._pages.kinds[b.block_id] == LEASED]
        alone = all(
            self._pages.lease_counts[b.block_id] == 1 and b.ref_cnt <= 1 + (b.block_id in mine)
            for b in leased
        )
        return {b.block_id for b in leased} if alone else set()

    def probe(self, request: Request) -> None:
        """Measure the way out with blocks that stay, the newest first: older ones may be there already."""
        table = self._tables.get(request.request_id, [])
        most = min(MAX_HASHES, max(1, PROBE_BYTES // self._block_bytes))
        found: dict[int, Block] = {}
        for position in reversed(range(min(len(table), len(request.block_hashes)))):
            if self._pages.kinds[table[position].block_id] == SEALED and len(found) < most:
                found[position] = _block(request, position)
        if found and not self._quota.lost:
            swap = self.absences.probe(found, self._pages.clock())
            self._quota.swap_out(swap.number, swap.hashes())

    # -- in -------------------------------------------------------------------------------------------

    def bring(self, request: Request, spare: int) -> bool:
        """Ask for everything that is away, if there are pages for it beyond `spare`. False: not yet."""
        request_id = request.request_id
        table = self._tables[request_id]
        swap = self.absences.of(request_id)
        if swap is None or swap.state is SwapState.COMING:
            return True
        if self._quota.lost or not self.absences.may_come(request_id):
            return False
        here = self._found_here(swap) if self._may_be_here(swap, spare) else {}
        count = len(swap.blocks) - len(here)
        if count and count + spare > len(self._pages.stock):
            # it takes none of those that are here: who waits would keep their pages from all others
            swap.looked_s = self._pages.clock()
            self._pages.refill(count + spare)
            return False
        for position, block in here.items():
            self._pages.touch([block])
            table[position] = block
            self.absences.found(request_id, position)
        if not count:
            self._quota.swap_drop(swap.number)
            return True
        self.absences.come(request_id, self._pages.clock())
        self._quota.swap_in(swap.number, swap.hashes(), self._pages.give(count))
        return True

    def _may_be_here(self, swap: Swap, spare: int) -> bool:
        """Whether there are pages for all of it, or somebody else has its first block. Who waits for pages is asked
        about in every step, and looking for each of its blocks costs as much as a step of the scheduler.
        """
        if len(swap.blocks) + spare <= len(self._pages.stock):
            return True
        if self._pages.clock() < swap.looked_s + LOOK_AGAIN_S:
            return False
        first = next(iter(swap.blocks.values()))
        return self._pages.get_cached_block(first.block_hash, [GROUP]) is not None

    def _found_here(self, swap: Swap) -> dict[int, KVCacheBlock]:
        """Blocks of those that are away that somebody else has here, computed or brought, by position."""
        found = {p: self._pages.get_cached_block(b.block_hash, [GROUP]) for p, b in swap.blocks.items()}
        return {position: cached[0] for position, cached in found.items() if cached is not None}

    def forget(self, request_id: str) -> None:
        """It is over, runs with blocks that were leaving, or is computed again."""
        self._refused_s.pop(request_id, None)
        number = self.absences.forget(request_id)
        if number is not None:
            self._quota.swap_drop(number)

    # -- what the mempool answers ---------------------------------------------------------------------

    def hear(self, requests: dict[str, Request]) -> None:
        """Answers since the last call. At a step boundary."""
        for message, at_s in self._quota.take_swapped():
            if isinstance(message, SwappedOut):
                self._on_out(message, at_s, requests)
            else:
                self._on_in(message, at_s, requests)
        if self.absences.is_waiting:
            self._give_up_late_ones(requests)

    def _on_out(self, message: SwappedOut, at_s: float, requests: dict[str, Request]) -> None:
        swap, positions = self.absences.left(message.swap, message.kept)
        if swap is None:
            return
        self.rate.add(message.blocks_copied * self._block_bytes, at_s - swap.asked_s, at_s)
        if message.kept and not any(message.kept) and not (swap.is_forgotten and not swap.is_probe):
            self._refuse(swap, at_s)
        if swap.is_probe:
            self.rate.probed(at_s)
            self._quota.swap_drop(swap.number)
        if swap.is_forgotten or swap.state is not SwapState.AWAY or not positions:
            return
        stay = self._before_what_stays(swap, positions)
        self.absences.stays(swap, stay)
        positions = positions[len(stay) :]
        # what nobody else has found no room
        if not positions or (swap.alone and swap.alone.isdisjoint(positions)):
            self._refuse(swap, at_s)
            self.absences.stays(swap, positions)
            self._quota.swap_drop(swap.number)
            return
        self._let_go(swap, positions)
        self._count("out", len(positions), swap, at_s)

    def _before_what_stays(self, swap: Swap, positions: list[int]) -> list[int]:
        """Of these in ascending order, those behind which a block of the prompt stays here: their pages would not be
        free, as the mempool frees prompts from their ends, and the request would lack them for nothing.
        """
        kinds, leave = self._pages.kinds, set(positions)
        stays = (
            position
            for position, block in enumerate(self._tables[swap.request_id])
            if position not in leave and kinds[block.block_id] in (SEALED, LEASED)
        )
        last = max(stays, default=-1)
        return [position for position in positions if position < last]

    def _refuse(self, swap: Swap, at_s: float) -> None:
        """Nothing of it is kept. Of one request that says little: its blocks may not be what the mempool knows. Two of
        them within NO_SPACE_S mean that there is no room, and for so long nobody takes turns.
        """
        self.counts["swaps_refused"] += 1
        self._refused_s = {name: s for name, s in self._refused_s.items() if at_s < s + NO_SPACE_S}
        self._refused_s[swap.request_id] = at_s
        if swap.is_probe or len(self._refused_s) > 1:
            self.rate.none_until_s = at_s + NO_SPACE_S

    def _is_alone(self, block: KVCacheBlock) -> bool:
        """Whether the one request that has it, perhaps with its lease, is all that uses it here."""
        kind = self._pages.kinds[block.block_id]
        return (kind == SEALED and block.ref_cnt == 1) or (kind == LEASED and block.ref_cnt == 2)

    def _let_go(self, swap: Swap, positions: list[int]) -> None:
        """Blocks that are kept elsewhere leave the block table, and this engine's memory if nobody else uses them."""
        table, kinds = self._tables[swap.request_id], self._pages.kinds
        blocks = [table[position] for position in positions]
        swap.num_shared = sum(not self._is_alone(block) for block in blocks)
        for position, block in zip(positions, blocks, strict=True):
            table[position] = self._pages.null_block
            if kinds[block.block_id] == LEASED:
                block.ref_cnt -= 1
        self._pages.leave([block for block in blocks if kinds[block.block_id] == SEALED])
        if not any(kinds[block.block_id] == LEASED for block in table):
            self._end_lease(swap.request_id)  # it serves nobody but others, who have their own

    def _on_in(self, message: SwappedIn, at_s: float, requests: dict[str, Request]) -> None:
        swap = self.absences.came(message.swap)
        if swap is None:
            return
        request = requests.get(swap.request_id)
        pages = zip(u32_list(message.pages), u64_list(message.epochs), strict=True)
        num_lost = num_came = 0
        for (position, named), (page, epoch) in zip(swap.blocks.items(), pages, strict=True):
            if page == NO_PAGE:
                num_lost += 1
                continue
            num_came += 1
            sealed = SealedPage(
                PageId(page), Epoch(epoch), named.block_hash, named.parent, self._block_tokens
            )
            block = self._pages.adopt(sealed)
            if swap.is_forgotten or request is None:
                self._pages.free_blocks([block])  # a cached block like others
            else:
                self._tables[swap.request_id][position] = block
        self.rate.add(
            (message.blocks_dram + message.blocks_peer) * self._block_bytes, at_s - swap.asked_s, at_s
        )
        self.counts["swap_blocks_lost"] += num_lost
        self._count("in", num_came, swap, at_s)
        if num_lost and request is not None and not swap.is_forgotten:
            self._lost(request)

    def _give_up_late_ones(self, requests: dict[str, Request]) -> None:
        now_s = self._pages.clock()
        for swap in self.absences.all():
            if swap.state is SwapState.COMING and now_s - swap.asked_s > PATIENCE_S:
                self.counts["swaps_given_up"] += 1
                self._lost(requests[swap.request_id])

    def lost_pool(self) -> None:
        """The engine is attached to the mempool's successor: it is asked to keep what is away, as far as it has it."""
        for request_id in self.absences.lost_pool():
            swap = self.absences.again(request_id, self._pages.clock())
            self._quota.swap_out(swap.number, swap.hashes())

    def _count(self, way: str, num_blocks: int, swap: Swap, at_s: float) -> None:
        self.counts[f"swapped_{way}_blocks"] += num_blocks
        self.counts[f"swapped_{way}_bytes"] += num_blocks * self._block_bytes
        self.counts[f"swaps_{way}"] += 1
        self.counts[f"swaps_{way}_us"] += round((at_s - swap.asked_s) * 1e6)
        if swap.is_forgotten or not num_blocks:
            return
        noted = self.noted.setdefault(swap.request_id, [])
        if len(noted) < MAX_NOTED:
            wall_s = time.time() - self._pages.clock()
            begin, end = (int((wall_s + s) * 1e9) for s in (swap.asked_s, at_s))
            noted.append((way, begin, end, num_blocks))


def _block(request: Any, position: int) -> Block:
    hashes = request.block_hashes
    parent = hashes[position - 1] if position else request.quire_seed
    return Block(BlockHash(hashes[position]), BlockHash(parent))
