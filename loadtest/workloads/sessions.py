"""Sessions into one row of requests: every request takes the next arrival time, and no turn comes before its turn.

As MemServe 8.2 has it: arrival times are drawn for requests, not for sessions, and causal order is kept. A time goes to
the session that has waited longest for its next turn, else to a new session.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from loadtest.workloads.request import Answer, Part, Request


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that has no time yet. Answer.of in its prompt counts the turns of its session from 0."""

    prompt: tuple[Part, ...]
    output_tokens: int
    think_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """Turns, of which each waits for the answer to the one before. shared: see Request."""

    name: str
    turns: Sequence[Turn]
    shared: tuple[str, ...] = ()


@dataclass(slots=True)
class _Open:
    session: Session
    request_ids: list[int]


def interleave(sessions: Iterable[Session], times_ms: Iterable[float]) -> list[Request]:
    """Requests in order of arrival; ends with the times or with the sessions.

    A next turn is ready when its think time has passed since the arrival of the turn before, as far as a plan can
    know. When no session is ready and no new one is left, the first to be ready is taken: its sender will wait.
    """
    fresh = iter(sessions)
    ready: list[tuple[float, int, _Open]] = []  # (ready at, tie, session)
    ties = count()
    out: list[Request] = []
    for at_ms in times_ms:
        opened = heapq.heappop(ready)[2] if ready and ready[0][0] <= at_ms else _open(fresh)
        if opened is None:
            if not ready:
                break
            opened = heapq.heappop(ready)[2]
        request = _request(opened, len(out), at_ms)
        out.append(request)
        opened.request_ids.append(request.request_id)
        if len(opened.request_ids) < len(opened.session.turns):
            think_ms = opened.session.turns[len(opened.request_ids)].think_ms
            heapq.heappush(ready, (at_ms + think_ms, next(ties), opened))
    return out


def _open(fresh: Iterator[Session]) -> _Open | None:
    session = next(fresh, None)
    return None if session is None else _Open(session, [])


def _request(opened: _Open, request_id: int, at_ms: float) -> Request:
    ids = opened.request_ids
    turn = opened.session.turns[len(ids)]
    prompt = tuple(replace(one, of=ids[one.of]) if isinstance(one, Answer) else one for one in turn.prompt)
    return Request(
        request_id=request_id,
        arrival_ms=round(at_ms, 3),
        session=opened.session.name,
        turn=len(ids),
        prompt=prompt,
        output_tokens=turn.output_tokens,
        depends_on=ids[-1] if ids else None,
        think_ms=round(turn.think_ms, 3) if ids else 0.0,
        shared=opened.session.shared,
    )


def copies(sessions: Sequence[Session], ratio: int) -> list[Session]:
    """MemServe 8.4's share ratio: the same sessions `ratio` times, with the same prompts, under other names."""
    if ratio < 1:
        raise ValueError(f"a share ratio of {ratio} is below 1")
    again = [replace(one, name=f"{one.name}-copy{n}") for n in range(1, ratio) for one in sessions]
    return [*sessions, *again]
