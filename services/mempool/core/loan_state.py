"""The life of a loan: one table, from which the code acts and the documentation's diagram is drawn.

A pair (state, event) that has no row is our bug. Source: AQUA, section 6; ARCHITECTURE.md, "The page".
"""

from enum import StrEnum
from typing import NamedTuple

from shared.errors import InvariantBroken


class LoanState(StrEnum):
    """Of one loan. Who writes its pages: the mempool, in every state."""

    HELD = "held"
    RETURNING = "returning"
    DROPPING = "dropping"
    ENDED = "ended"


class LoanEvent(StrEnum):
    """What can happen to a loan that was taken."""

    RENEW = "renew"
    RELEASE = "release"
    LAPSE = "lapse"
    CONSUMER_DEAD = "consumer_dead"
    RECLAIM = "reclaim"
    DEADLINE = "deadline"
    SHRUNK = "shrunk"
    RETURNED = "returned"


class LoanStep(NamedTuple):
    """One row: `proof` is what the mempool must know before it applies the event."""

    state: LoanState
    event: LoanEvent
    target: LoanState
    proof: str


HOLDS: dict[LoanState, str] = {
    LoanState.HELD: "blocks that leave the consumer's space",
    LoanState.RETURNING: "blocks on their way to host memory; no new ones come",
    LoanState.DROPPING: "only what copies on their way still read or write",
    LoanState.ENDED: "nothing: its pages are set aside again, or the producer's",
}

_S, _E = LoanState, LoanEvent
TABLE: tuple[LoanStep, ...] = (
    LoanStep(_S.HELD, _E.RENEW, _S.HELD, "the loan is known, and its time is not over"),
    LoanStep(_S.HELD, _E.RELEASE, _S.RETURNING, "the consumer says that it is done with it"),
    LoanStep(_S.HELD, _E.LAPSE, _S.RETURNING, "its time is over by this mempool's clock"),
    LoanStep(_S.HELD, _E.CONSUMER_DEAD, _S.RETURNING, "no process of the consumer's space lives (pidfd)"),
    LoanStep(_S.HELD, _E.RECLAIM, _S.RETURNING, "its offer is worth less from now on"),
    LoanStep(_S.RETURNING, _E.RELEASE, _S.RETURNING, "as above; the earliest deadline counts"),
    LoanStep(_S.RETURNING, _E.LAPSE, _S.RETURNING, "as above"),
    LoanStep(_S.RETURNING, _E.CONSUMER_DEAD, _S.RETURNING, "as above"),
    LoanStep(_S.RETURNING, _E.RECLAIM, _S.RETURNING, "as above"),
    LoanStep(_S.RETURNING, _E.DEADLINE, _S.DROPPING, "its deadline has passed"),
    LoanStep(_S.RETURNING, _E.SHRUNK, _S.HELD, "what was to come back is back, and it keeps some"),
    LoanStep(_S.RETURNING, _E.RETURNED, _S.ENDED, "no page of it is left"),
    LoanStep(_S.DROPPING, _E.RELEASE, _S.DROPPING, "as above"),
    LoanStep(_S.DROPPING, _E.LAPSE, _S.DROPPING, "as above"),
    LoanStep(_S.DROPPING, _E.CONSUMER_DEAD, _S.DROPPING, "as above"),
    LoanStep(_S.DROPPING, _E.RECLAIM, _S.DROPPING, "as above"),
    LoanStep(_S.DROPPING, _E.SHRUNK, _S.HELD, "as above"),
    LoanStep(_S.DROPPING, _E.RETURNED, _S.ENDED, "no page of it is left: no copy reads or writes one"),
)
_TARGETS = {(row.state, row.event): row.target for row in TABLE}
assert len(_TARGETS) == len(TABLE), "two rows for one (state, event)"


def next_state(state: LoanState, event: LoanEvent) -> LoanState:
    """Raises: InvariantBroken when the table has no such row."""
    target = _TARGETS.get((state, event))
    if target is None:
        raise InvariantBroken(f"no loan goes through {event} in state {state}")
    return target


def diagram() -> str:
    """The table as Markdown: a Mermaid state diagram, what lies in the pages, and what each step needs."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> held: take"]
    lines += [f"    {r.state} --> {r.target}: {r.event}" for r in TABLE if r.state != r.target]
    lines += ["```", "", "| loan | what its pages hold, which only the mempool writes |", "|---|---|"]
    lines += [f"| {state} | {HOLDS[state]} |" for state in LoanState]
    lines += ["", "| loan | event | next | proof |", "|---|---|---|---|"]
    lines += [f"| {r.state} | {r.event} | {r.target} | {r.proof} |" for r in TABLE]
    return "\n".join(lines) + "\n"
