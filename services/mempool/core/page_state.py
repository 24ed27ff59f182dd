"""The page state machine: one table, from which the code acts and the documentation's diagram is drawn.

Everything that decides who may write a page's bytes is in TABLE. A pair (state, event) that has no row is our
bug. Source: ARCHITECTURE.md, "The page".
"""

from enum import StrEnum
from typing import NamedTuple

from shared.errors import InvariantBroken
from shared.kv.page import PageState


class PageEvent(StrEnum):
    """What can happen to a page. Only the mempool makes these happen; engines ask."""

    GRANT = "grant"
    WRITE = "write"
    SEAL = "seal"
    DISCARD = "discard"
    GIVE_BACK = "give_back"
    RETIRE = "retire"
    DRAINED = "drained"
    LEND = "lend"
    LEASE_RETURNED = "lease_returned"
    HOLDER_LOST = "holder_lost"
    ACKNOWLEDGED = "acknowledged"
    HOLDER_DEAD = "holder_dead"
    CLAIMED = "claimed"
    WITHDRAW = "withdraw"
    UNMAPPED = "unmapped"
    RESTORED = "restored"
    MAPPED = "mapped"


class Transition(NamedTuple):
    """One row: `proof` is what the mempool must know before it applies the event."""

    state: PageState
    event: PageEvent
    target: PageState
    proof: str


WRITER: dict[PageState, str] = {
    PageState.FREE: "nobody",
    PageState.GRANTED: "nobody yet",
    PageState.WRITING: "the engine that holds it",
    PageState.SEALED: "nobody",
    PageState.RETIRING: "nobody",
    PageState.LEASED: "the mempool only",
    PageState.QUARANTINED: "nobody, but its lost holder still could",
    PageState.ORPHANED: "nobody, but its lost borrower may still read it",
    PageState.WITHDRAWN: "nobody: its memory is on its way to the system, or back",
    PageState.RELEASED: "nobody: it has no memory",
}

_S, _E = PageState, PageEvent
TABLE: tuple[Transition, ...] = (
    Transition(_S.FREE, _E.GRANT, _S.GRANTED, "an attached engine has room in its quota"),
    Transition(
        _S.FREE,
        _E.LEND,
        _S.LEASED,
        "set aside for an offer, on which loans are taken (loans.py)",
    ),
    Transition(_S.GRANTED, _E.WRITE, _S.WRITING, "the holder says so, under the page's epoch"),
    Transition(_S.GRANTED, _E.GIVE_BACK, _S.RETIRING, "the holder says that it will not write"),
    Transition(_S.GRANTED, _E.HOLDER_LOST, _S.QUARANTINED, "the holder's connection ended"),
    Transition(_S.WRITING, _E.SEAL, _S.SEALED, "the holder says that its writes are done; the hash is new"),
    Transition(_S.WRITING, _E.DISCARD, _S.RETIRING, "the holder's writes are done; the hash is known"),
    Transition(_S.WRITING, _E.GIVE_BACK, _S.RETIRING, "the holder says that it writes no more"),
    Transition(_S.WRITING, _E.HOLDER_LOST, _S.QUARANTINED, "the holder's connection ended"),
    Transition(_S.SEALED, _E.RETIRE, _S.RETIRING, "no pin; out of the index"),
    Transition(_S.RETIRING, _E.DRAINED, _S.FREE, "no process maps it as an alias; epoch + 1"),
    Transition(_S.LEASED, _E.LEASE_RETURNED, _S.RETIRING, "no loan has it, and no copy reads or writes it"),
    Transition(_S.LEASED, _E.HOLDER_LOST, _S.ORPHANED, "the borrower's lease ended unanswered"),
    Transition(_S.QUARANTINED, _E.ACKNOWLEDGED, _S.RETIRING, "the same process says that it writes no more"),
    Transition(_S.QUARANTINED, _E.HOLDER_DEAD, _S.RETIRING, "its pidfd says that the process is dead"),
    Transition(
        _S.QUARANTINED, _E.CLAIMED, _S.WRITING, "the same process reports it to a new mempool, same epoch"
    ),
    Transition(_S.ORPHANED, _E.ACKNOWLEDGED, _S.RETIRING, "the same process says that it unmapped the page"),
    Transition(_S.ORPHANED, _E.HOLDER_DEAD, _S.RETIRING, "its pidfd says that the process is dead"),
    Transition(_S.FREE, _E.WITHDRAW, _S.WITHDRAWN, "nobody holds it; its memory shall go to the system"),
    Transition(_S.WITHDRAWN, _E.UNMAPPED, _S.RELEASED, "each process that maps it unmapped it or is dead"),
    Transition(_S.RELEASED, _E.RESTORED, _S.WITHDRAWN, "the system gave memory for it again"),
    Transition(_S.WITHDRAWN, _E.MAPPED, _S.RETIRING, "every living process of the space maps its memory"),
)

_TARGETS: dict[tuple[int, PageEvent], PageState] = {(row.state, row.event): row.target for row in TABLE}
assert len(_TARGETS) == len(TABLE), "two rows for one (state, event)"


def next_state(state: int, event: PageEvent) -> PageState:
    """The state after `event`.

    Raises: InvariantBroken when the table has no such row.
    Cost: one dictionary look-up.
    """
    target = _TARGETS.get((state, event))
    if target is None:
        raise InvariantBroken(f"no page goes through {event} in state {PageState(state).name.lower()}")
    return target


def diagram() -> str:
    """The table as Markdown: a Mermaid state diagram, then who may write and what each step needs."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> free"]
    lines += [f"    {r.state.name.lower()} --> {r.target.name.lower()}: {r.event}" for r in TABLE]
    lines += ["```", "", "| state | who may write the bytes |", "|---|---|"]
    lines += [f"| {state.name.lower()} | {WRITER[state]} |" for state in PageState]
    lines += ["", "| state | event | next | proof |", "|---|---|---|---|"]
    lines += [f"| {r.state.name.lower()} | {r.event} | {r.target.name.lower()} | {r.proof} |" for r in TABLE]
    return "\n".join(lines) + "\n"
