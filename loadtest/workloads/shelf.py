"""Sessions of a workload one by one, for users that take the next when they are free (Locust's)."""

from loadtest.workloads.catalogue import WORKLOADS, Options, build
from loadtest.workloads.request import Request

BATCH_REQUESTS = 500


class Shelf:
    """Whole sessions in the order in which they begin, without end: a batch used up is followed by the next seed's."""

    def __init__(self, name: str, seed: int) -> None:
        self._name = name
        self._seed = seed
        self._left: list[list[Request]] = []

    def take(self) -> list[Request]:
        """The next session's requests, in order of their turns."""
        while not self._left:
            self._left = self._batch()
            self._seed += 1
        return self._left.pop(0)

    def _batch(self) -> list[list[Request]]:
        """Sessions that the end of the batch cut off are left out, where sessions have several turns."""
        options = Options(num_requests=BATCH_REQUESTS, seed=self._seed)
        found: dict[str, list[Request]] = {}
        for request in build(self._name, options):
            found.setdefault(request.session, []).append(request)
        sessions = list(found.values())
        return sessions[: max(1, len(sessions) // 2)] if WORKLOADS[self._name].real_history else sessions
