"""The memory market's part of the page at /: who lends what to whom, until when, and what happened."""

from collections.abc import Iterable, Sequence
from html import escape

from shared.wire.lending import LeaseView, MarketView, MempoolView, OfferView, ReclaimView

MAX_HISTORY_SHOWN = 40
_WHY_NOT = {
    "market.rebuilding": "granting nothing yet: waiting for the mempools to report to this leader",
    "market.standby": "granting nothing: this coordinator does not lead",
    "journal.down": "granting nothing: the journal does not answer",
    "journal.not_durable": "granting nothing: the journal's Redis is not on appendfsync always",
}
Cell = str | int


def render_market(market: MarketView) -> str:
    """Tables of leases, offers, reclaims, mempools, history; ended leases are in the history."""
    leases = [lease for lease in market.leases if lease.state != "ended"]
    offers = [view for view in market.offers if view.state != "closed"]
    state = "granting" if market.is_granting else _WHY_NOT.get(market.why_not, market.why_not)
    return (
        f"<h1>Memory market</h1><p>Term {market.term}, {escape(state)}.</p>"
        + _table("Leases", _LEASES, map(_lease, leases), "Nobody borrows.")
        + _table("Offers", _OFFERS, map(_offer, offers), "Nobody lends.")
        + _table("Reclaims", _RECLAIMS, map(_reclaim, market.reclaims), "No memory was asked back.")
        + _table("Mempools", _MEMPOOLS, map(_mempool, market.mempools), "No mempool has reported.")
        + _table("History", ("when", "what", "of", "detail"), _history(market), "Nothing has happened.")
    )


_LEASES = (
    "consumer",
    "borrows",
    "from",
    "for",
    "state",
    "ends in",
    "to give back",
    "within",
    "lease",
    "token",
)
_OFFERS = ("producer", "offers", "lent", "free", "in", "state", "offer")
_RECLAIMS = ("offer", "down to", "still over", "within", "state", "took", "reclaim")
_MEMPOOLS = ("mempool", "state", "boot", "heard", "fence", "memory free of total")


def _lease(lease: LeaseView) -> Sequence[Cell]:
    back = human_bytes(lease.length_bytes - lease.keep_bytes) if lease.state == "reclaiming" else ""
    return (
        lease.consumer,
        human_bytes(lease.length_bytes),
        f"{lease.producer} ({lease.mempool}, space {lease.space})",
        lease.purpose,
        lease.state,
        f"{lease.remaining_ms} ms",
        back,
        f"{lease.deadline_ms} ms" if back else "",
        lease.lease_id,
        f"{lease.token.term}.{lease.token.number}",
    )


def _offer(view: OfferView) -> Sequence[Cell]:
    offer = view.offer
    return (
        offer.producer,
        human_bytes(view.limit_bytes) if view.state != "proposed" else human_bytes(offer.length_bytes),
        human_bytes(view.leased_bytes),
        human_bytes(max(0, view.limit_bytes - view.leased_bytes)),
        f"{offer.mempool}, space {offer.space}",
        view.state,
        offer.offer_id,
    )


def _reclaim(view: ReclaimView) -> Sequence[Cell]:
    is_open = view.state == "open"
    return (
        view.order.offer_id,
        human_bytes(view.order.keep_bytes),
        human_bytes(view.over_bytes),
        f"{view.order.deadline_ms} ms" if is_open else "",
        view.state,
        "" if is_open else f"{view.took_ms} ms",
        view.order.reclaim_id,
    )


def _mempool(view: MempoolView) -> Sequence[Cell]:
    spaces = "; ".join(
        f"{space.name}: {human_bytes(space.free_bytes)} of {human_bytes(space.total_bytes)}"
        for space in view.spaces
    )
    fence = f"{view.fence.term}.{view.fence.number}"
    return (view.mempool, view.state, view.boot_generation, f"{view.age_ms} ms ago", fence, spaces)


def _history(market: MarketView) -> Iterable[Sequence[Cell]]:
    for entry in list(reversed(market.history))[:MAX_HISTORY_SHOWN]:
        when = f"{entry.age_ms / 1000:.1f} s ago" if entry.age_ms else "before this leader"
        yield (when, entry.event.replace("_", " "), entry.subject, entry.detail)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]], empty: str) -> str:
    lines = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows]
    if not lines:
        return f"<h2>{title}</h2><p>{empty}</p>"
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<h2>{title}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def human_bytes(count: int) -> str:
    """E.g. "1.5 GiB"."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
