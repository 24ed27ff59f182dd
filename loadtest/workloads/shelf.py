"""Sessions of a workload or a trace one by one, for users that take the next when they are free (Locust's)."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from loadtest.workloads import trace_files
from loadtest.workloads.catalogue import WORKLOADS, Options, build
from loadtest.workloads.request import Request, clipped, scaled

BATCH_REQUESTS = 500


class NothingLeft(Exception):
    """The last session of a trace was taken."""


class Shelf:
    """Whole sessions in the order in which they begin.

    Args: batches: requests, sessions of one batch by name. factor, context_tokens: see scaled() and clipped(); 0: as
    they are.
    """

    def __init__(
        self,
        batches: Iterator[list[Request]],
        *,
        factor: float = 1.0,
        context_tokens: int = 0,
        is_cut: bool = False,
    ) -> None:
        self._batches = batches
        self._factor, self._context_tokens = factor, context_tokens
        self._is_cut = is_cut
        self._left: list[list[Request]] = []

    @classmethod
    def of_workload(cls, name: str, seed: int, more: Mapping[str, Any] | None = None, **how: Any) -> "Shelf":
        """Without end: a batch used up is followed by the next seed's.

        Args: more: options of the workload; how: see the class. Raises: ValueError on options it has no use for, or
        with which it has no request.
        """
        options = dict(more or {})
        first = build(
            name, Options(num_requests=BATCH_REQUESTS, seed=seed, **options)
        )  # what is wrong is said now
        if not first:
            raise ValueError(f"the workload {name} has no request with these options")

        def batches() -> Iterator[list[Request]]:
            number, batch = seed, first
            while True:
                yield batch
                number += 1
                batch = build(name, Options(num_requests=BATCH_REQUESTS, seed=number, **options))

        return cls(batches(), is_cut=WORKLOADS[name].real_history, **how)

    @classmethod
    def of_trace(cls, path: Path, **how: Any) -> "Shelf":
        """Each session of the file once. Raises: TraceError, OSError; ValueError on how they are to be changed."""
        try:
            requests = trace_files.read(path)
        except trace_files.NoTimes:  # arrivals do not matter here
            requests = trace_files.read(path, rate_per_s=1.0)
        return cls(iter([requests]), **how)

    def take(self) -> list[Request]:
        """The next session's requests, in order of their turns. Raises: NothingLeft, at the end of a trace."""
        while not self._left:
            batch = next(self._batches, None)
            if batch is None:
                raise NothingLeft
            self._left = self._sessions(batch)
        return self._left.pop(0)

    def _sessions(self, batch: Iterable[Request]) -> list[list[Request]]:
        """Sessions that the end of the batch cut off are left out, where sessions have several turns."""
        if self._factor != 1.0:
            batch = scaled(batch, self._factor)
        if self._context_tokens:
            batch = clipped(batch, self._context_tokens)
        found: dict[str, list[Request]] = {}
        for request in batch:
            found.setdefault(request.session, []).append(request)
        sessions = list(found.values())
        return sessions[: max(1, len(sessions) // 2)] if self._is_cut else sessions
