"""What a desk wishes of the coordinator, what comes back, and what it says for the log. No I/O."""

from typing import Any, NamedTuple

from shared.wire.lending import (
    AskLease,
    AskReclaim,
    Grant,
    LendingRefused,
    OfferMemory,
    OfferView,
    ReclaimOrder,
)

Answer = OfferView | Grant | ReclaimOrder | LendingRefused | None


class Wish(NamedTuple):
    """To be said to the coordinator, under `key`; the answer goes to Desk.answered()."""

    space: int
    body: OfferMemory | AskLease | AskReclaim
    key: str


class Word(NamedTuple):
    """Something that was decided, for the log: event and ids."""

    event: str
    ids: dict[str, Any]
