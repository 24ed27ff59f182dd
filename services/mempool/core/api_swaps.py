"""swap_out and swap_in of the nine calls: which caller waits for which ticket of the tiers. No I/O."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.mempool.core.api_state import Holder, Home, held
from services.mempool.core.tiers import SwapDone, TierAction
from shared.errors import InvalidRequest
from shared.ids import SpaceId
from shared.wire import mempool_api as wire

if TYPE_CHECKING:
    from services.mempool.core.api import Api

SwapCall = wire.SwapOut | wire.SwapIn


class Swaps:
    """Of one Api."""

    def __init__(self, api: "Api") -> None:
        self._api = api
        # by tiers' space and ticket; the home is who was asked: instances may share a space, and come back in another
        self._calls: dict[tuple[SpaceId, int], tuple[Home, Holder, SwapCall]] = {}

    def swap(self, holder: Holder, call: SwapCall, now_ms: int) -> None:
        """Begin; the answer comes with the ticket's SwapDone. Raises: InvalidRequest, NotHeld, Overloaded."""
        if isinstance(call, wire.SwapOut):
            home = self._api.home(call.instance)
            if home.tiers is None:
                raise InvalidRequest(f"{home.instance} has one tier of memory")
            if not 0 <= call.num_blocks <= self._api.limits.max_blocks_per_call:
                raise InvalidRequest(f"{call.num_blocks} blocks")
            ticket, actions = home.tiers.swap_out(call.num_blocks, now_ms)
        else:
            stretches = self._api.stretches(call.addresses)
            home = self._api.home_of(stretches)
            held([holder], home, stretches)
            addresses = wire.one_by_one(stretches)
            if home.tiers is None:
                raise InvalidRequest(f"{home.instance} has one tier of memory")
            entries = [e for a in addresses if (e := holder.pinned(a)) and a.space == home.tiers.slow.space]
            if len(entries) < len(addresses):
                raise InvalidRequest("only indexed blocks in DRAM, pinned by the caller, are swapped in")
            ticket, actions = home.tiers.swap_in(entries, now_ms)
        space = home.tiers.fast.space
        self._calls[space, ticket] = home, holder, call
        holder.num_open += 1
        self.on_tiers(space, actions)

    def on_tiers(self, space: SpaceId, actions: Sequence[TierAction]) -> None:
        """Answer callers; tickets of others and copies go on to the shell."""
        for action in actions:
            mine = self._calls.pop((space, action.ticket), None) if isinstance(action, SwapDone) else None
            if mine is None or not isinstance(action, SwapDone):
                self._api.out.append(action)
            else:
                self._finish(*mine, action)

    def _finish(self, home: Home, holder: Holder, call: SwapCall, done: SwapDone) -> None:
        assert home.tiers is not None
        holder.num_open -= 1
        fast, slow = home.tiers.fast.space, home.tiers.slow.space
        if isinstance(call, wire.SwapOut):
            raw = home.pack_entries([(slow, entry) for entry in done.entries if entry is not None])
            self._api.answer(holder, wire.Addresses(call_id=call.call_id, addresses=raw))
            return
        if self._api.holders.get(holder.connection) is not holder:  # the caller left: nobody unpins later
            home.tiers.fast.index.unpin([entry for entry in done.entries if entry is not None])
            return
        out = b""
        for address, entry in zip(self._api.addresses(call.addresses), done.entries, strict=True):
            if entry is None:
                out += address.to_bytes()
                continue
            pins = holder.pins.setdefault(fast, {}).setdefault(entry.page, [])
            pins.append(entry)  # the pin that came with it
            if holder.pinned(address) is not None:
                self._api.unpin(holder, address.space, address.page)
            out += home.pack_entries([(fast, entry)])
        self._api.answer(holder, wire.Addresses(call_id=call.call_id, addresses=out))
