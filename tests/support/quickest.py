"""How long something takes, and whether it goes well, on a machine that may stop any process at any point."""

import inspect
from collections.abc import Awaitable, Callable

ATTEMPTS = 5


async def quickest_s(attempt: Callable[[], float | Awaitable[float]], bar_s: float) -> float:
    """The shortest of up to five attempts, each of which says how many seconds it took; ends with one below the bar.

    What is slow by itself is slow each time; what the machine did in between is not.
    """
    best_s = float("inf")
    for _ in range(ATTEMPTS):
        took = attempt()
        best_s = min(best_s, await took if inspect.isawaitable(took) else took)
        if best_s < bar_s:
            break
    return best_s


async def ever(attempt: Callable[[], Awaitable[bool]]) -> bool:
    """Whether one of up to five attempts went well: for claims on what is kept in time, which a starved process breaks.

    What is not kept by itself is not kept in any of them.
    """
    for _ in range(ATTEMPTS):
        if await attempt():
            return True
    return False
