"""A life in states as one table, on which the code acts and from which the documentation is drawn."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from shared.errors import InvariantBroken

S = TypeVar("S", bound=Hashable)
E = TypeVar("E", bound=StrEnum)


class Step(NamedTuple, Generic[S, E]):
    """One row: `proof` is what the mempool must know before it applies the event."""

    state: S
    event: E
    target: S
    proof: str


class StepTable(Generic[S, E]):
    """Args: what: whose life; name: of a state, for people."""

    def __init__(
        self, what: str, steps: Sequence[Step[S, E]], *, name: Callable[[S], str] = lambda state: str(state)
    ) -> None:
        self.steps = steps
        self._what, self._name = what, name
        self._targets = {(step.state, step.event): step.target for step in steps}
        assert len(self._targets) == len(steps), "two rows for one (state, event)"

    def next(self, state: S, event: E) -> S:
        """The state after the event.

        Raises: InvariantBroken when no row has the pair: our bug.
        Cost: one dictionary look-up.
        """
        target = self._targets.get((state, event))
        if target is None:
            raise InvariantBroken(f"no {self._what} goes through {event} in state {self._name(state)}")
        return target

    def diagram(self, begin: str, meanings: Mapping[S, str], column: str) -> str:
        """As Markdown: a Mermaid state diagram, a word on each state, and what each step needs.

        Args: begin: "state" or "state: event" of the first arrow; column: what `meanings` say.
        """
        rows = [(self._name(s.state), s.event, self._name(s.target), s.proof) for s in self.steps]
        lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {begin}"]
        lines += [f"    {state} --> {then}: {event}" for state, event, then, _ in rows if state != then]
        lines += ["```", "", f"| {self._what} | {column} |", "|---|---|"]
        lines += [f"| {self._name(state)} | {meaning} |" for state, meaning in meanings.items()]
        lines += ["", f"| {self._what} | event | next | proof |", "|---|---|---|---|"]
        lines += [f"| {state} | {event} | {then} | {proof} |" for state, event, then, proof in rows]
        return "\n".join(lines) + "\n"
