"""Life of a lease as the coordinator sees it: state x event -> state, and what each event needs as proof.

    granted --listed--> held --reclaim--> reclaiming --fits--> held
       | overdue          |                  |
       v                  | released         | released (from granted and lapsing too)
    lapsing               +------> releasing <
    granted, lapsing, releasing --fenced--> ended;  held, reclaiming, releasing --unlisted--> ended

The coordinator only follows: bytes are lent when the owning mempool lists the lease, and free when its report
proves that they are (shared/wire/lending.py, rules 2 and 3). A pair that is not in the table cannot happen.
"""

from typing import Literal, NamedTuple

from shared.errors import InvariantBroken
from shared.wire.lending import LeaseState

Event = Literal["listed", "unlisted", "fenced", "overdue", "released", "reclaim", "fits", "gone"]


class EventRule(NamedTuple):
    """Who may cause the event, and by what proof."""

    writer: str
    proof: str


EVENTS: dict[Event, EventRule] = {
    "listed": EventRule("mempool", "its newest report lists the lease"),
    "unlisted": EventRule("mempool", "an older report listed the lease, its newest one does not"),
    "fenced": EventRule(
        "mempool", "never listed, and the report's fence is above the token, or the boot is a new one"
    ),
    "overdue": EventRule(
        "coordinator", "no report listed it within present_ms and the slack: the fence shall pass it"
    ),
    "released": EventRule("consumer", "a release with the lease's token"),
    "reclaim": EventRule("producer", "a reclaim leaves the offer fewer bytes than the lease's share"),
    "fits": EventRule("mempool", "its newest report lists the lease with no more than its share"),
    "gone": EventRule("coordinator", "the mempool was silent for forget_after_ms: its offers are closed too"),
}

TABLE: dict[tuple[LeaseState, Event], LeaseState] = {
    ("granted", "listed"): "held",
    ("granted", "fenced"): "ended",
    ("granted", "overdue"): "lapsing",
    ("granted", "released"): "releasing",
    ("granted", "gone"): "ended",
    ("lapsing", "listed"): "held",  # it was presented in time, and the report came late
    ("lapsing", "fenced"): "ended",
    ("lapsing", "released"): "releasing",
    ("lapsing", "gone"): "ended",
    ("held", "listed"): "held",
    ("held", "unlisted"): "ended",
    ("held", "released"): "releasing",
    ("held", "reclaim"): "reclaiming",
    ("held", "gone"): "ended",
    ("reclaiming", "listed"): "reclaiming",
    ("reclaiming", "unlisted"): "ended",
    ("reclaiming", "released"): "releasing",
    ("reclaiming", "fits"): "held",
    ("reclaiming", "gone"): "ended",
    ("releasing", "listed"): "releasing",
    ("releasing", "unlisted"): "ended",
    ("releasing", "fenced"): "ended",  # given up before any report listed it
    ("releasing", "released"): "releasing",
    ("releasing", "gone"): "ended",
    ("ended", "listed"): "held",  # the mempool was gone for long and is back: it is the truth
    ("ended", "released"): "ended",
}


def next_state(state: LeaseState, event: Event) -> LeaseState:
    """Where the event leads. Raises: InvariantBroken when it cannot happen in this state."""
    try:
        return TABLE[state, event]
    except KeyError:
        raise InvariantBroken(f"lease event {event} in state {state}") from None


def as_markdown() -> str:
    """The table for docs/memory-market.md."""
    lines = ["| state | event | next | who | proof |", "|---|---|---|---|---|"]
    lines += [
        f"| {state} | {event} | {then} | {EVENTS[event].writer} | {EVENTS[event].proof} |"
        for (state, event), then in TABLE.items()
    ]
    return "\n".join(lines) + "\n"
