"""What who carries plans out decides about pages: which requests may begin, who gives way, who leaves. No I/O.

FairSlices says whose turn it is; an engine's scheduler (shared/engine/fair_scheduler.py, swap_scheduler.py) and the
simulator's engine (loadtest/simulator/fair_engine.py) carry that out with these rules, so that both decide alike.
"""

from collections.abc import Iterable
from typing import NamedTuple

from shared.fair.rules import FairRules
from shared.fair.slices import FairSlices

RESERVE_S = 2.0  # a slot is kept so long for who finds no pages to come back into
PARKED_PAGES = 8  # of the engine's for each that is parked, or newcomers wait
FREE_SHARES = 128  # of the engine's pages: one more or one less of them free is worth a plan
# with such a part of the pages waiting for their bytes, no more requests are brought back at once: the way is slow, and
# pages that wait for their bytes are nobody's memory meanwhile
COMING_SHARE = 16


class Begun(NamedTuple):
    """Requests that were begun. longest_pages: what the longest of them may come to need."""

    running: int
    parked: int
    longest_pages: int = 0


class Grower(NamedTuple):
    """One that runs. left_tokens: to compute, 1 for who decodes; end_tokens: that it has, and those mapped ahead.
    stays: it cannot be parked now.
    """

    request_id: str
    left_tokens: int
    end_tokens: int
    pages: int
    stays: bool = False


class Seen(NamedTuple):
    """What a look for vacant slots found. free_mark: free pages, in parts of the engine's."""

    taken: int
    requests: int
    free_mark: int


def free_mark(free_pages: int, most_pages: int) -> int:
    """See Seen."""
    return free_pages // max(1, most_pages // FREE_SHARES)


def may_fill(rules: FairRules, seen: Seen, was: Seen | None, slots: int, *, is_short: bool) -> bool:
    """Whether a slot is vacant. With units of service, where pages are short: and something changed since the last
    look, as a plan costs as much as a step when hundreds wait.
    """
    if is_short and rules.has_units and seen == was:
        return False
    return seen.taken < slots


def may_begin(begun: Begun, most_pages: int, *, limits_parked: bool, can_be_short: bool) -> bool:
    """Whether memory has room for newcomers. Each that is parked keeps its last page here: with too many of them there
    is no memory to run in, and they would have to be computed again, one after the other.

    Args: limits_parked: turns of units, or blocks that lie far, so that many are parked.
        can_be_short: pages were short when the plan before was made, and can leave.
    """
    if limits_parked:
        return begun.parked * PARKED_PAGES <= most_pages
    if not (begun.parked and can_be_short):
        return True
    return begun.running + begun.parked + begun.longest_pages <= most_pages


def pages_for_turns(rules: FairRules, pages: int, begun: Begun, *, has_room_for_all: bool) -> int:
    """What a plan may count on where pages are short and can leave: who comes back leaves a page to each that runs,
    and the last page of who is parked stays where it is.
    """
    if rules.has_units or not has_room_for_all:
        return max(1, pages - begun.running - begun.parked)
    return pages


def grow(
    running: Iterable[Grower],
    free_pages: int,
    step_tokens: int,
    page_tokens: int,
    *,
    most_tokens: int,
    may_park: bool,
) -> tuple[list[str], int]:
    """(who would find no page in this step and gives its slot up, pages that the others need in it). Who cannot be
    parked has its pages before the others.

    Args: most_tokens: of a request.
    """
    park, growth = [], 0
    stay: list[tuple[Grower, int]] = []
    others: list[tuple[Grower, int]] = []
    for one in running:
        new = max(1, min(one.left_tokens, step_tokens))
        step_tokens -= new if one.left_tokens > 1 else 0
        missing = -(-min(one.end_tokens + new, most_tokens) // page_tokens) - one.pages
        (stay if one.stays else others).append((one, missing))
    for one, missing in (*stay, *others):
        if missing > free_pages and may_park and not one.stays:
            park.append(one.request_id)
        elif missing > 0:
            growth += missing
        free_pages -= max(0, min(missing, free_pages))
    return park, growth


def pages_to_begin(lacks: Iterable[int], free_pages: int) -> int:
    """Pages that those who may start in this step find, in their order, so that nobody who comes back takes them: two
    would drive each other out in turn, each gone again before the other had computed anything.

    Args: lacks: what each needs to begin. Who finds less than that does not begin and keeps none.
    """
    left = free_pages
    for lack in lacks:
        left -= lack if lack <= left else 0
    return free_pages - left


def is_slow(coming_pages: int, most_pages: int) -> bool:
    """Whether so many pages wait for their bytes that nobody else is to be brought back now."""
    return coming_pages * COMING_SHARE > most_pages


def short_pages(slotted: Iterable[tuple[int, int]], free_pages: int, on_the_way: int) -> int:
    """Pages that those with a slot lack for a slice, beyond what is free or will be. Args: slotted: (needs, has)."""
    return sum(max(0, needs - has) for needs, has in slotted) - free_pages - on_the_way


def nearest_first(slices: FairSlices, names: Iterable[str]) -> list[str]:
    """Parked requests in the order of their turns; the last ones leave first."""
    accounts = slices.accounts.requests
    return sorted(names, key=lambda name: slices.order_key(accounts[name]))
