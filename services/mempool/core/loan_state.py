"""The life of a loan: one table, from which the code acts and the documentation's diagram is drawn.

A pair (state, event) that has no row is our bug. Source: AQUA, section 6; ARCHITECTURE.md, "The page".
"""

from enum import StrEnum

from services.mempool.core.step_table import Step, StepTable


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
    MET = "met"
    SHRUNK = "shrunk"
    RETURNED = "returned"


HOLDS: dict[LoanState, str] = {
    LoanState.HELD: "blocks that leave the consumer's space",
    LoanState.RETURNING: "blocks on their way to host memory; no new ones come",
    LoanState.DROPPING: "of what its deadline asks for, only what copies on their way still read or write",
    LoanState.ENDED: "nothing: its pages are set aside again, or the producer's",
}

_S, _E = LoanState, LoanEvent
TABLE: tuple[Step[LoanState, LoanEvent], ...] = (
    Step(_S.HELD, _E.RENEW, _S.HELD, "the loan is known, and its time is not over"),
    Step(_S.HELD, _E.RELEASE, _S.RETURNING, "the consumer says that it is done with it"),
    Step(_S.HELD, _E.LAPSE, _S.RETURNING, "its time is over by this mempool's clock"),
    Step(_S.HELD, _E.CONSUMER_DEAD, _S.RETURNING, "no process of the consumer's space lives (pidfd)"),
    Step(_S.HELD, _E.RECLAIM, _S.RETURNING, "its offer is worth less from now on"),
    Step(_S.RETURNING, _E.RELEASE, _S.RETURNING, "as above; each deadline is for what it asks for"),
    Step(_S.RETURNING, _E.LAPSE, _S.RETURNING, "as above"),
    Step(_S.RETURNING, _E.CONSUMER_DEAD, _S.RETURNING, "as above"),
    Step(_S.RETURNING, _E.RECLAIM, _S.RETURNING, "as above"),
    Step(_S.RETURNING, _E.DEADLINE, _S.DROPPING, "its deadline has passed"),
    Step(
        _S.RETURNING, _E.MET, _S.RETURNING, "what its next deadline asks for is back; a later one wants more"
    ),
    Step(_S.RETURNING, _E.SHRUNK, _S.HELD, "what was to come back is back, and it keeps some"),
    Step(_S.RETURNING, _E.RETURNED, _S.ENDED, "no page of it is left"),
    Step(_S.DROPPING, _E.RELEASE, _S.DROPPING, "as above"),
    Step(_S.DROPPING, _E.LAPSE, _S.DROPPING, "as above"),
    Step(_S.DROPPING, _E.CONSUMER_DEAD, _S.DROPPING, "as above"),
    Step(_S.DROPPING, _E.RECLAIM, _S.DROPPING, "as above"),
    Step(_S.DROPPING, _E.MET, _S.RETURNING, "as above"),
    Step(_S.DROPPING, _E.SHRUNK, _S.HELD, "as above"),
    Step(_S.DROPPING, _E.RETURNED, _S.ENDED, "no page of it is left: no copy reads or writes one"),
)
_LIFE = StepTable("loan", TABLE)
next_state = _LIFE.next


def diagram() -> str:
    """The table as Markdown: a Mermaid state diagram, what lies in the pages, and what each step needs."""
    return _LIFE.diagram("held: take", HOLDS, "what its pages hold, which only the mempool writes")
