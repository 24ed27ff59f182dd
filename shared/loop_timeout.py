"""A time limit for another process' answer, in time in which this loop ran.

Where the loop stood still (a garbage collection, a long callback, a process without a processor), answers that came
meanwhile lie unread in their sockets while every limit is over at once. Nobody was late but this process.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LATE_S = (
    0.02  # a timer that fires so much behind its time was held up by this loop, not by the system's clock
)
MOST_ADDED_RATIO = 1.0  # of the limit: a loop that always stands still does not wait for ever


@asynccontextmanager
async def loop_timeout(limit_s: float) -> AsyncIterator[None]:
    """asyncio.timeout() whose limit grows by what the loop was late, up to twice as long. Cost: a timer.

    Raises: TimeoutError.
    """
    loop = asyncio.get_running_loop()
    end_s, added_s = loop.time() + limit_s, 0.0
    scope = asyncio.timeout(None)

    def over() -> None:
        nonlocal end_s, added_s, timer
        late_s = loop.time() - end_s
        extra_s = min(late_s, MOST_ADDED_RATIO * limit_s - added_s)
        if late_s < LATE_S or extra_s <= 0:
            scope.reschedule(loop.time())
            return
        added_s += extra_s
        end_s = loop.time() + extra_s
        timer = loop.call_at(end_s, over)

    timer = loop.call_at(end_s, over)
    try:
        async with scope:
            yield
    finally:
        timer.cancel()
