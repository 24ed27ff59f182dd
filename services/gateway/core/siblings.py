"""The prompts of one request, which take places from each other. No I/O.

A request may have more prompts than its cluster has places: those beyond are rejected though nobody else is there, and
would fail the whole request, now and at every further try. They wait until one of the others has ended instead.
"""

from collections.abc import Callable

SIBLING_WAIT_MS = 1_000  # for the end of one of them, at most: what other requests take may be free before


class Siblings:
    """What RequestFlow tells and asks of the other prompts of its request."""

    def __init__(self) -> None:
        self.have_run = False  # one of them at least
        self._num_running = 0
        self._waiting: dict[Callable[[], bool], None] = {}  # in order, each once

    def begun(self) -> None:
        """One was placed."""
        self.have_run = True
        self._num_running += 1

    def left(self) -> None:
        """One that was placed runs no more. Wakes the next that waits."""
        self._num_running -= 1
        assert self._num_running >= 0, "a prompt leaves once"
        while self._waiting:
            wake = next(iter(self._waiting))
            del self._waiting[wake]
            if wake():
                return

    def hold(self, wake: Callable[[], bool]) -> bool:
        """Whether one runs, whose end one that was rejected now may wait for.

        Args: wake: called then, once, however often it was given; returns False if it does not wait any more.
        """
        if self._num_running:
            self._waiting[wake] = None
        return self._num_running > 0
