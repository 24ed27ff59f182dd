"""What the supervisor knows of each service, and what follows: who starts and who stops behind whom. No I/O."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spec:
    """One service as the rules see it. `depends_on` gates its first start, `needs_live` every start: those must answer
    at that moment, and their end is its end. Neither they nor `served_by`, which gates nothing, are stopped before it.
    """

    name: str
    depends_on: tuple[str, ...] = ()
    needs_live: tuple[str, ...] = ()
    served_by: tuple[str, ...] = ()
    start_timeout_ms: int = 60_000
    stop_grace_ms: int = 2_000
    drain_ms: int = 0  # before that grace, for what it says is under way
    # ready and without an answer for this long it is killed; None: as the rules say
    silent_ms: int | None = None

    @property
    def holds(self) -> tuple[str, ...]:
        """Who is stopped only behind it."""
        return (*self.depends_on, *self.needs_live, *self.served_by)


def start_order(specs: Sequence[Spec]) -> list[str]:
    """Names, each after what it depends on; ties keep the table's order.

    Raises: ValueError on an unknown dependency, a name given twice or a cycle.
    """
    by_name = {spec.name: spec for spec in specs}
    if len(by_name) != len(specs):
        raise ValueError("a service is named twice")
    out: list[str] = []
    left = list(specs)
    while left:
        free = [s for s in left if all(d in out for d in (*s.depends_on, *s.needs_live))]
        if not free:
            names = ", ".join(s.name for s in left)
            raise ValueError(f"unknown dependency or cycle among: {names}")
        out.append(free[0].name)
        left.remove(free[0])
    return out


def held_by(specs: Iterable[Spec]) -> set[str]:
    """Names of those that are stopped only behind one of these."""
    return {name for spec in specs for name in spec.holds}


def longest_stop_ms(specs: Sequence[Spec]) -> int:
    """From a stop to the last end, where each takes all of its time. Raises: ValueError on a cycle."""
    ends_ms: dict[str, int] = {}
    left = list(specs)
    while left:
        held = held_by(left)
        free = [spec for spec in left if spec.name not in held]
        if not free:
            raise ValueError(f"stops wait for each other: {', '.join(spec.name for spec in left)}")
        for spec in free:
            begin_ms = max((ends_ms[other.name] for other in specs if spec.name in other.holds), default=0)
            ends_ms[spec.name] = begin_ms + spec.drain_ms + spec.stop_grace_ms
        left = [spec for spec in left if spec.name not in ends_ms]
    return max(ends_ms.values(), default=0)
