"""A model's spare memory on loan while its load is steady, and back when its queue or rate rises (AQUA 6).

The rules are those of engines' spaces (shared/lending); here a thread acts on them, because lending and taking back
wait for the mempool, and the model's loop must not.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from shared.lending.load import Load
from shared.lending.producer import MakeOffer, OnOffer, Producer, TakeBack
from shared.lending.rules import LendingRules
from shared.observe.log import get_logger

LOOK_S = 0.02
RETRY_MS = 1_000
CHECK_MS = 1_000

log = get_logger("aqua.lends_when_idle")


class Lends(Protocol):
    """Lender (shared/aqua/lender.py)."""

    def lend(self, num_bytes: int) -> int: ...

    def reclaim(self, deadline_ms: int, keep_bytes: int = 0) -> float: ...

    def budget_bytes_per_s(self) -> int: ...

    def still_offered_bytes(self) -> int | None: ...

    @property
    def offered_bytes(self) -> int: ...


class LendsWhenIdle:
    """From construction to close(), on a thread of its own. `reclaims`: (reason, seconds) of each.

    Args: most_bytes: spare while nothing unusual goes on; clock_ms: of any start.
    """

    def __init__(
        self,
        lender: Lends,
        most_bytes: int,
        rules: LendingRules,
        clock_ms: Callable[[], int] = lambda: int(time.monotonic() * 1_000),
    ) -> None:
        self.lent_bytes = 0
        self.reclaims: list[tuple[str, float]] = []
        self._lender, self._most_bytes, self._clock_ms = lender, most_bytes, clock_ms
        self._rules, self._producer = rules, Producer(rules)
        self._load: Load | None = None
        self._wanted: TakeBack | None = None  # not done yet
        self._retry_at_ms = self._check_at_ms = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lends-when-idle", daemon=True)
        self._thread.start()

    def report(self, num_waiting: int, num_arrived: int, needed_bytes: int = 0) -> None:
        """The model's load now, and what it needs itself of most_bytes. Called between its steps; never waits."""
        self._load = Load(self._most_bytes, needed_bytes, num_waiting=num_waiting, num_arrived=num_arrived)

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            try:
                self._look()
            except Exception as error:  # noqa: BLE001  without this thread, what is lent would stay so
                log.warning("lending_failed", error=repr(error), wanted=self._wanted and self._wanted.reason)
                if self._wanted is not None:
                    self._retry_at_ms = self._clock_ms() + RETRY_MS
                if self._producer.is_asking:  # a later look decides again
                    self._producer.answered(self._clock_ms(), retry_after_ms=RETRY_MS)

    def _look(self) -> None:
        load, self._load = self._load, None
        offers = [OnOffer("mine", self.lent_bytes)] if self.lent_bytes else []
        lends = bool(offers)  # no more is offered then: a Lender has one offer
        for decision in self._producer.decide(load, offers, self._clock_ms(), keeps=lends):
            if isinstance(decision, MakeOffer):
                self._lend(decision.length_bytes)
            elif self._wanted is None or decision.keep_bytes < self._wanted.keep_bytes:
                self._wanted = decision  # what failed before is still to be done
        if self.lent_bytes and self._wanted is None and self._clock_ms() >= self._check_at_ms:
            self._check()
        if self._wanted is not None and self._clock_ms() >= self._retry_at_ms:
            self._take_back(self._wanted)

    def _lend(self, num_bytes: int) -> None:
        self.lent_bytes = self._lender.lend(num_bytes)
        self._producer.answered(self._clock_ms())

    def _check(self) -> None:
        """An offer ends without a decision of this object's where its mempool begins anew, or somebody asks the
        coordinator to take it back. What is left of it comes home then, and can be offered again."""
        self._check_at_ms = self._clock_ms() + CHECK_MS
        left_bytes = self._lender.still_offered_bytes()
        if left_bytes is not None and left_bytes < self.lent_bytes:
            self._wanted = TakeBack("mine", left_bytes, 0, "its mempool has less on offer")

    def _take_back(self, wanted: TakeBack) -> None:
        """Until it is done: a queue that grew and stays long is not decided about again.

        The deadline is of what the mempool has measured by now, and as if all that is offered were lent: who reads it
        in place is killed at it.
        """
        rate = self._lender.budget_bytes_per_s()
        deadline_ms = self._rules.deadline_ms(max(0, self.lent_bytes - wanted.keep_bytes), rate)
        took_s = self._lender.reclaim(deadline_ms, wanted.keep_bytes)
        self.reclaims.append((wanted.reason, took_s))
        self.lent_bytes, self._wanted, self._retry_at_ms = self._lender.offered_bytes, None, 0

    def close(self) -> None:
        """Nothing more is decided; what is lent stays so."""
        self._closing.set()
        self._thread.join()
