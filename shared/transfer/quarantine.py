"""Which target pages belong to a transfer. No I/O.

    free -(claim)-> claimed -(release)-> free
                    claimed -(quarantine)-> quarantined -(settle)-> free

A page that is claimed or quarantined is refused to every other transfer: two transfers into one page would mix, and
a page that an unfinished write may still reach is not reusable (ARCHITECTURE.md, rules 5 and 6).
"""

import threading
from collections.abc import Iterable, Mapping

from shared.transfer.errors import TransferRefused


class Quarantine:
    """The target pages of one transport, by region. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claimed: dict[str, set[int]] = {}
        self._held: dict[str, set[int]] = {}

    def claim(self, region: str, pages: frozenset[int]) -> None:
        """Raises: TransferRefused when any of them belongs to another transfer; then nothing has changed."""
        with self._lock:
            claimed = self._claimed.setdefault(region, set())
            held = self._held.setdefault(region, set())
            if not held.isdisjoint(pages):
                raise TransferRefused(
                    f"target pages {sorted(held & pages)[:4]} of {region} are quarantined: a failed transfer may "
                    "still write them"
                )
            if not claimed.isdisjoint(pages):
                raise TransferRefused(
                    f"target pages {sorted(claimed & pages)[:4]} of {region} are in a transfer"
                )
            claimed |= pages

    def release(self, region: str, pages: frozenset[int]) -> None:
        """The transfer is over and nothing of it can write any more."""
        with self._lock:
            assert pages <= self._claimed.get(region, set()), "a page was released that nobody claimed"
            self._claimed[region] -= pages

    def quarantine(self, region: str, pages: frozenset[int]) -> None:
        """The transfer failed and something may still write."""
        with self._lock:
            assert pages <= self._claimed.get(region, set()), "a page was quarantined that nobody claimed"
            self._claimed[region] -= pages
            self._held.setdefault(region, set()).update(pages)

    def settle(self, region: str, pages: Iterable[int]) -> tuple[int, ...]:
        """What may have written these is over; the pages that were quarantined, in order."""
        with self._lock:
            held = self._held.get(region, set())
            settled = tuple(sorted(held.intersection(pages)))
            held.difference_update(settled)
            return settled

    def held(self) -> Mapping[str, frozenset[int]]:
        """Quarantined pages by region; regions without any are left out."""
        with self._lock:
            return {region: frozenset(pages) for region, pages in self._held.items() if pages}
