"""A mempool, a coordinator and the pages of a process that lends, in memory: what a Lender sees of them."""

import msgspec

from shared.aqua.lender import LAYOUT
from shared.aqua.own_space import describe
from shared.errors import PeerGone, PeerTimeout
from shared.ids import Epoch, InstanceId, SpaceId
from shared.wire import mempool as wire
from shared.wire.lending import LendingRefused, MarketView, MempoolView, Offer, OfferView, Token
from shared.wire.mempool_lending import LendingDone

BOOT, SPACE, PAGE = Epoch(7), SpaceId(3), 1 << 20
MOST = 8 * PAGE


class World:
    """A mempool and a coordinator, as far as a Lender sees them; `fails`: what is not answered, or how."""

    def __init__(self):
        self.fails = {}
        self.memory_bytes = 0  # of the process's space
        self.space = SPACE
        self.offers = {}  # the coordinator's, by key
        self.open = {}  # in force at the mempool: id -> bytes
        self.closed = set()  # there
        self.leased = 0  # pages that do not come back by themselves
        self.rate = 0  # that the mempool has measured
        self.deadlines_ms = []
        self.rival_looks, self.rivals = 0, ["engine p"]  # for so many looks these are attached under the name
        self.coming = []  # what the next looks find of `leased`; None: no answer

    boot_generation = BOOT

    def told(self):
        """The coordinator's offers that it would tell the mempool of."""
        return [offer for offer, target in self.offers.values() if target]

    async def market(self):
        view = MempoolView(
            mempool=InstanceId("m"), address="", boot_generation=BOOT, state="live", age_ms=0, fence=Token(1, 0)
        )  # fmt: skip
        return MarketView(
            term=1,
            is_granting=True,
            why_not="",
            mempools=[view],
            offers=[
                OfferView(offer=o, state="open", limit_bytes=left, leased_bytes=left)
                for o, left in self.offers.values()
                if left
            ],
            leases=[],
            reclaims=[],
            history=[],
        )

    async def offer(self, body, *, key=""):
        how = self.fails.get("offer")
        if how == "lost":
            raise PeerGone("nobody answers")
        if how == "refused":
            return LendingRefused(code="market.full", message="")
        if key not in self.offers:
            offer = Offer(
                offer_id=f"o{len(self.offers)}", producer_epoch=body.producer_epoch,
                producer=body.producer, mempool=body.mempool, boot_generation=BOOT,
                space=body.space, length_bytes=body.length_bytes, key=key,
            )  # fmt: skip
            self.offers[key] = (offer, body.length_bytes)
        if how == "late":
            raise PeerTimeout("the answer came late")
        if how == "not stored":
            return LendingRefused(code="journal.down", message="")
        return OfferView(offer=self.offers[key][0], state="proposed", limit_bytes=0, leased_bytes=0)

    async def reclaim(self, ask):
        for key, (offer, _) in self.offers.items():
            if offer.offer_id == ask.offer_id:
                self.offers[key] = (offer, 0)

    async def present(self, what, *, timeout_ms=0):
        how = self.fails.get("present")
        if how == "never":
            return None
        if isinstance(what, Offer):
            if how == "stale":
                return wire.CallFailed(call_id=1, code="epoch.stale", reason="")
            if how == "refused" or what.offer_id in self.closed:
                return wire.CallFailed(call_id=1, code="offer.ended", reason="")
            num_bytes = self.open.setdefault(what.offer_id, what.length_bytes)
            answer = LendingDone(call_id=1, num_bytes=num_bytes, budget_bytes_per_s=self.rate)
        else:
            if what.offer_id not in self.open:
                return wire.CallFailed(call_id=1, code="offer.unknown", reason="")
            self.deadlines_ms.append(what.deadline_ms)
            if what.keep_bytes:
                self.open[what.offer_id] = min(self.open[what.offer_id], what.keep_bytes)
            else:
                del self.open[what.offer_id]
                self.closed.add(what.offer_id)
            answer = LendingDone(call_id=1, num_bytes=0)
        return None if self.fails.pop("present", "") == "once" else answer

    async def status(self):
        if self.coming:
            found = self.coming.pop(0)
            if found is None:
                return None
            self.leased = found
        leased = self.leased + sum(self.open.values()) // PAGE
        space = wire.SpaceStatus(
            number=self.space, content_key="mine", devices=[], num_pages=8, page_bytes=PAGE,
            pages_by_state={"leased": leased}, num_indexed=0, num_pinned=0, engines=["p"],
        )  # fmt: skip
        spaces = [] if self.space is None else [space]
        if self.rival_looks:
            self.rival_looks -= 1
            key = describe("p", PAGE, LAYOUT, only_lends=True).content_key
            spaces.append(msgspec.structs.replace(space, number=9, content_key=key, engines=self.rivals))
        return type("Status", (), {"spaces": spaces})

    async def release_memory(self, num_bytes, *, wait_ms, space):
        if space != self.space or self.fails.pop("release", ""):
            return None
        lent_bytes = sum(self.open.values()) + self.leased * PAGE
        self.memory_bytes -= min(num_bytes, self.memory_bytes - lent_bytes)
        return wire.MemoryChanged(call_id=1, num_bytes=num_bytes, released_bytes=0)

    async def regain_memory(self, num_bytes, *, wait_ms, space):
        if self.fails.get("regain"):
            raise PeerTimeout("no answer")
        self.memory_bytes = MOST

    def be_patient(self, patience_ms):
        self.patience_ms = patience_ms

    async def close(self):
        pass


class Own:
    """OwnSpace, whose memory is there once it is attached."""

    world: World
    boot_generation = BOOT
    description = type("Description", (), {"content_key": "mine"})
    page_bytes = PAGE

    def __init__(self, *_, **__):
        self.world.memory_bytes, self.world.own, self.came_back = MOST, self, False
        if self.world.space is None:
            self.world.space = SpaceId(5)

    async def number(self, _):
        return self.world.space

    def let_memory_go(self):
        pass

    def come_back(self):
        self.came_back = True

    def close(self):
        pass
