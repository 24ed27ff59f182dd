"""Threads without which their process is of no use: a bug in one ends the process, where it would end the thread alone.

What is left would wait for it for ever, or until somebody's deadline. A process that ends is begun anew, and a mempool
takes back what it had.
"""

import logging
import os
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

EXIT_BUG = 70  # EX_SOFTWARE of sysexits.h


def end_process() -> None:
    """At once: no other thread may act on what the broken one has left half done."""
    os._exit(EXIT_BUG)


def start_vital(
    run: Callable[[], None], *, name: str, loss: str, on_bug: Callable[[], None] = end_process
) -> threading.Thread:
    """A daemon thread that runs `run`.

    Args: loss: what nobody does once the thread is gone; logged with the error. on_bug: what happens then, on the
    thread; in a process that is not ours to end, nothing.
    """

    def guarded() -> None:
        try:
            run()
        except Exception:
            logger.critical("thread %s ended by a bug: %s", name, loss, exc_info=True)
            on_bug()

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread
