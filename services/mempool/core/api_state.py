"""What the nine calls act on: homes of instances, what each connection holds, actions and bounds. No I/O."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Protocol

from services.mempool.core.entry import Entry
from services.mempool.core.locations import Locations
from services.mempool.core.page_state import PageEvent
from services.mempool.core.radix import Index
from services.mempool.core.tiers import TierAction, Tiers
from shared.errors import InvalidRequest, NotHeld, StaleEpoch
from shared.ids import Epoch, InstanceId, PageId, SpaceId
from shared.wire import mempool_api as wire
from shared.wire.mempool_api import AddressStretch, Medium, PageAddress


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """Bounds of everything that a caller could make grow."""

    max_blocks_per_call: int = 65_536
    max_calls_open: int = 1_024  # of one connection
    max_moves: int = 1_024
    max_held_ratio: float = 0.5  # of a space's pages: how many one connection may hold that are not sealed
    max_timeout_ms: int = 60_000


class Allocator(Protocol):
    """Pages of one space (OwnPages; an array in tests). All lists are of pages in range."""

    space: SpaceId
    index: Index

    @property
    def num_pages(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    def take(self, count: int) -> tuple[list[PageId], list[Epoch]]: ...

    def first_stale(self, pages: Sequence[PageId], epochs: Sequence[Epoch]) -> PageId | None: ...

    def epochs_of(self, pages: Iterable[PageId]) -> list[Epoch]: ...

    def begin(self, pages: Iterable[PageId]) -> None: ...

    def seal(self, entries: Iterable[Entry]) -> None: ...

    def give_up(self, pages: Iterable[PageId]) -> None: ...

    def retire(self, entries: Sequence[Entry]) -> None: ...

    def lose(self, pages: Iterable[PageId]) -> None: ...

    def recover(self, pages: Iterable[PageId], proof: PageEvent = ...) -> None: ...

    def evict(self) -> Entry | None: ...


@dataclass(slots=True)
class Home:
    """Where the pages of one instance are. `places` asks hbm first, then dram. `tiers` moves between the two."""

    instance: InstanceId
    places: Locations
    hbm: Allocator | None = None
    dram: Allocator | None = None
    tiers: Tiers | None = None
    block_tokens: int = 16
    leased: Sequence[Allocator] = ()  # pages lent to it, a space for each lender
    is_for_callers: bool = False  # no engine works in its pages: callers may hold all of them

    @property
    def key(self) -> int:
        """Stands for the instance in addresses."""
        return wire.instance_key(self.instance)

    def spaces(self) -> Iterator[tuple[Medium, Allocator]]:
        """Its media, the fastest first."""
        if self.hbm is not None:
            yield Medium.HBM, self.hbm
        if self.dram is not None:
            yield Medium.DRAM, self.dram
        for lent in self.leased:
            yield Medium.LEASED, lent

    def room(self, medium: Medium, space: Allocator, num_held: int, max_ratio: float) -> int:
        """How many more pages of a space one caller may take."""
        ratio = 1.0 if self.is_for_callers or medium is Medium.LEASED else max_ratio
        return max(0, int(ratio * space.num_pages) - num_held)

    def space(self, number: SpaceId) -> tuple[Medium, Allocator]:
        """Raises: InvalidRequest for a space that is not of this instance."""
        for medium, allocator in self.spaces():
            if allocator.space == number:
                return medium, allocator
        raise InvalidRequest(f"space {number} is not of {self.instance}")

    def pack(
        self, medium: Medium, allocator: Allocator, pages: Sequence[PageId], epochs: Sequence[Epoch]
    ) -> bytes:
        """Addresses of pages of one of its spaces."""
        return wire.pack_addresses(self.key, medium, allocator.space, pages, epochs)

    def pack_entries(self, entries: Sequence[tuple[SpaceId, Entry]]) -> bytes:
        """Addresses of indexed pages, now."""
        out: list[bytes] = []
        for number, group in groupby(entries, key=itemgetter(0)):
            medium, space = self.space(number)
            pages = [entry.page for _, entry in group]
            out.append(self.pack(medium, space, pages, space.epochs_of(pages)))
        return b"".join(out)


Page = tuple[SpaceId, PageId]
Beside = Callable[["Holder", Home, bytes], bytes]  # what a caller gets with pages that it took


class Homes(dict[InstanceId, Home]):
    """By instance. One that came back with other pages has another home, and one whose space has ended none: of spaces
    of before, what callers still have there is remembered."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[SpaceId, Allocator] = {}

    def __setitem__(self, instance: InstanceId, home: Home) -> None:
        self.end(instance)
        super().__setitem__(instance, home)

    def end(self, instance: InstanceId) -> None:
        """Its space ends; the host memory behind that may not."""
        if (before := self.pop(instance, None)) is not None:
            self._before.update((each.space, each) for _, each in before.spaces())

    def forget(self, space: SpaceId) -> None:
        """The space is over: no holder has anything there."""
        self._before.pop(space, None)

    def allocator(self, space: SpaceId) -> Allocator:
        """Of a space that a holder has pages of."""
        now = (each for home in self.values() for _, each in home.spaces() if each.space == space)
        return next(now, None) or self._before[space]


@dataclass(slots=True)
class Holder:
    """One connection and what it holds. `process`: it maps the pages, and may write its own until proven dead."""

    connection: int
    instance: InstanceId
    process: int | None = None
    receives: bool = False
    is_mempool: bool = False
    owned: dict[SpaceId, dict[PageId, Epoch]] = field(default_factory=dict)
    pins: dict[SpaceId, dict[PageId, list[Entry]]] = field(
        default_factory=dict
    )  # one item a pin; no empty list
    remote: dict[InstanceId, set[bytes]] = field(default_factory=dict)  # single addresses at other mempools
    num_open: int = 0

    def owns(self, address: PageAddress) -> bool:
        """Whether it allocated this page and the address is current."""
        return self.owned.get(address.space, {}).get(address.page) == address.epoch

    def owns_all(self, stretch: AddressStretch) -> bool:
        """Whether owns() is true of every address."""
        owned = self.owned.get(stretch.space)
        return bool(owned) and list(map(owned.get, stretch.pages)) == stretch.epochs

    def owns_none(self, stretch: AddressStretch) -> bool:
        """Whether it allocated none of these pages, whatever their epochs."""
        owned = self.owned.get(stretch.space)
        return not owned or owned.keys().isdisjoint(stretch.pages)

    def has_pinned_all(self, stretch: AddressStretch) -> bool:
        """Whether pinned() finds something at every address."""
        pins = self.pins.get(stretch.space)
        return bool(pins) and all(map(pins.__contains__, stretch.pages))

    def add(self, space: SpaceId, pages: Sequence[PageId], epochs: Sequence[Epoch]) -> None:
        """Pages that are its own from now on."""
        self.owned.setdefault(space, {}).update(zip(pages, epochs, strict=True))

    def pinned(self, address: PageAddress) -> Entry | None:
        """The entry that it has pinned at this address."""
        entries = self.pins.get(address.space, {}).get(address.page)
        return entries[-1] if entries else None


@dataclass(frozen=True, slots=True)
class Reply:
    """To one connection."""

    connection: int
    message: wire.FromMempoolApi


@dataclass(frozen=True, slots=True)
class CallPeer:
    """To the mempool that serves `instance`; its answer goes to Api.on_peer_reply."""

    instance: InstanceId
    message: wire.ToMempoolApi


@dataclass(frozen=True, slots=True)
class MovePages:
    """Copy page by page into the targets, which are of this mempool; answer with Api.on_moved(move_id, ...), always.

    `source`: an instance of this mempool, or of the peer whose own number for this is `order`. Sources are pinned where
    they are. The mover checks their epochs after the last byte and ends by timeout_ms.
    """

    move_id: int
    source: InstanceId
    sources: Sequence[AddressStretch]
    target: InstanceId
    targets: Sequence[AddressStretch]  # together as many as the sources
    timeout_ms: int
    order: int | None = None


ApiAction = Reply | CallPeer | MovePages | TierAction


def nothing_beside(_holder: "Holder", _home: Home, _taken: bytes) -> bytes:
    """Pages that were taken come alone."""
    return b""


def serves(mem_type: wire.MemType, medium: Medium) -> bool:
    """Whether memory of this type may be of this medium: mixed is the instance's own."""
    return mem_type == medium.name.lower() or (mem_type == "mixed" and medium is not Medium.LEASED)


def is_current(allocator: Allocator, address: PageAddress) -> bool:
    """Whether the page is still the one that the address means."""
    return allocator.first_stale([address.page], [address.epoch]) is None


def check_can_be_blocks(home: Home, stretches: Sequence[AddressStretch]) -> None:
    """Raises: InvalidRequest for pages that are named twice, and for lent ones: whoever pins a block there would keep
    its lender's pages for as long as it likes."""
    if names_twice(stretches):
        raise InvalidRequest("an address is named twice")
    lent = {each.space for each in home.leased}
    if any(stretch.space in lent for stretch in stretches):
        raise InvalidRequest(
            "lent pages hold no blocks that others could find: they go when their lender wants them"
        )


def names_twice(stretches: Iterable[AddressStretch]) -> bool:
    """Whether a page is there more than once, under whatever epoch."""
    seen: dict[SpaceId, set[PageId]] = {}
    for stretch in stretches:
        named = seen.setdefault(stretch.space, set())
        before = len(named)
        named.update(stretch.pages)
        if len(named) - before < len(stretch.pages):
            return True
    return False


def held(holders: Collection[Holder], home: Home, stretches: Sequence[AddressStretch]) -> None:
    """Check that every address is current, named once, and held by one of these connections.

    Raises: StaleEpoch, NotHeld, InvalidRequest; nothing has changed. Cost: 0.2 us a page.
    """
    if names_twice(stretches):
        raise InvalidRequest("an address is named twice")
    for stretch in stretches:
        _, allocator = home.space(stretch.space)
        stale = allocator.first_stale(stretch.pages, stretch.epochs)
        if stale is not None:
            raise StaleEpoch(f"page {stale} of space {stretch.space} was reused since")
        if any(holder.has_pinned_all(stretch) or holder.owns_all(stretch) for holder in holders):
            continue
        for address in stretch.addresses():
            if not any(holder.owns(address) or holder.pinned(address) for holder in holders):
                raise NotHeld(f"page {address.page} of space {stretch.space} is not held by the caller")


def owned(holders: Sequence[Holder], stretches: Iterable[AddressStretch]) -> bool:
    """Whether each address is of a page that one of these connections has allocated."""
    return all(
        any(holder.owns_all(stretch) for holder in holders)
        or all(any(holder.owns(address) for holder in holders) for address in stretch.addresses())
        for stretch in stretches
    )


def side_by_side(
    sources: Sequence[AddressStretch], targets: Sequence[AddressStretch]
) -> Iterator[tuple[AddressStretch, AddressStretch]]:
    """As many addresses on each side, position by position: stretches that are cut to equal lengths."""
    behind = iter(sources)
    source: AddressStretch | None = None
    for whole in targets:
        target = whole
        while target.pages:
            if source is None or not source.pages:
                source = next(behind)
            count = min(len(source.pages), len(target.pages))
            if count == len(source.pages) == len(target.pages):
                yield source, target
            else:
                yield source.first(count), target.first(count)
            source, target = source.behind(count), target.behind(count)
