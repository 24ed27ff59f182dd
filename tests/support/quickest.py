"""How long something takes, and whether it goes well, on a machine that may stop any process at any point."""

import inspect
import timeit
from collections.abc import Awaitable, Callable

ATTEMPTS = 5
LOOP, LOOP_S = 1_000, 75e-6  # a sum of so many squares, and what it takes on the machine of the bars


def slowness() -> float:
    """How many times as long as the machine of the bars this one takes for plain Python just now; 1 if less.

    For bars on microseconds of Python, which a slower machine cannot keep by itself. The shortest of many short
    loops, so that stops of the machine do not count. Costs 20 ms.
    """
    loop_s = min(timeit.repeat(lambda: sum(n * n for n in range(LOOP)), number=1, repeat=200))
    return max(1.0, loop_s / LOOP_S)


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
