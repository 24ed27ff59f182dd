"""The page state machine: one table, from which the code acts and the documentation's diagram is drawn.

Everything that decides who may write a page's bytes is in TABLE. A pair (state, event) that has no row is our
bug. A borrower's ranks may map lent pages, to read them in place: such a page is pinned on the borrower's side of the
loan until they unmapped it or are dead (far.py), and stays leased until then, whatever became of the loan.
Source: ARCHITECTURE.md, "The page".
"""

from collections.abc import Callable
from enum import StrEnum
from typing import cast

from services.mempool.core.step_table import Step, StepTable
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


WRITER: dict[PageState, str] = {
    PageState.FREE: "nobody",
    PageState.GRANTED: "nobody yet; a caller of the nine calls: it",
    PageState.WRITING: "the engine that holds it",
    PageState.SEALED: "nobody",
    PageState.RETIRING: "nobody",
    PageState.LEASED: "the mempool only",
    PageState.QUARANTINED: "nobody, but its lost holder still could",
    PageState.WITHDRAWN: "nobody: its memory is on its way to the system, or back",
    PageState.RELEASED: "nobody: it has no memory",
}

_S, _E = PageState, PageEvent
TABLE: tuple[Step[PageState, PageEvent], ...] = (
    Step(_S.FREE, _E.GRANT, _S.GRANTED, "an attached engine has room in its quota"),
    Step(
        _S.FREE,
        _E.LEND,
        _S.LEASED,
        "set aside for an offer, on which loans are taken (loans.py)",
    ),
    Step(_S.GRANTED, _E.WRITE, _S.WRITING, "the holder says so, under the page's epoch"),
    Step(_S.GRANTED, _E.GIVE_BACK, _S.RETIRING, "the holder says that it will not write"),
    Step(_S.GRANTED, _E.HOLDER_LOST, _S.QUARANTINED, "the holder's connection ended"),
    Step(_S.WRITING, _E.SEAL, _S.SEALED, "the holder says that its writes are done; the hash is new"),
    Step(_S.WRITING, _E.DISCARD, _S.RETIRING, "the holder's writes are done; the hash is known"),
    Step(_S.WRITING, _E.GIVE_BACK, _S.RETIRING, "the holder says that it writes no more"),
    Step(_S.WRITING, _E.HOLDER_LOST, _S.QUARANTINED, "the holder's connection ended"),
    Step(_S.SEALED, _E.RETIRE, _S.RETIRING, "no pin; out of the index"),
    Step(_S.RETIRING, _E.DRAINED, _S.FREE, "no process maps it as an alias; epoch + 1"),
    Step(_S.LEASED, _E.LEASE_RETURNED, _S.RETIRING, "no loan has it, and no copy reads or writes it"),
    Step(_S.QUARANTINED, _E.ACKNOWLEDGED, _S.RETIRING, "the same process says that it writes no more"),
    Step(_S.QUARANTINED, _E.HOLDER_DEAD, _S.RETIRING, "its pidfd says that the process is dead"),
    Step(_S.QUARANTINED, _E.CLAIMED, _S.WRITING, "the same process reports it to a new mempool, same epoch"),
    Step(_S.FREE, _E.WITHDRAW, _S.WITHDRAWN, "nobody holds it; its memory shall go to the system"),
    Step(_S.WITHDRAWN, _E.UNMAPPED, _S.RELEASED, "each process that maps it unmapped it or is dead"),
    Step(_S.RELEASED, _E.RESTORED, _S.WITHDRAWN, "the system gave memory for it again"),
    Step(_S.WITHDRAWN, _E.MAPPED, _S.RETIRING, "every living process of the space maps its memory"),
)

_LIFE = StepTable("page", TABLE, name=lambda state: PageState(state).name.lower())
next_state = cast(Callable[[int, PageEvent], PageState], _LIFE.next)  # the page table is an array of integers


def diagram() -> str:
    """The table as Markdown: a Mermaid state diagram, then who may write and what each step needs."""
    return _LIFE.diagram("free", WRITER, "who may write the bytes")
