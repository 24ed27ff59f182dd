"""An event loop with a clock of its own: it stands still while something runs, and leaps to the next timer otherwise.

What is measured by it depends on no machine. Everything has to happen on the loop: it does not wait for threads.
"""

import asyncio


class VirtualLoop(asyncio.SelectorEventLoop):
    """In place of the module `time`, too, for what asks that: monotonic() and perf_counter() are its clock."""

    def __init__(self):
        super().__init__()
        self._now_s = 0.0
        really = self._selector.select

        def select(timeout=None):
            found = really(None if timeout is None else 0)
            if timeout and not found:
                self._now_s += timeout
            return found

        self._selector.select = select

    def time(self):
        return self._now_s

    monotonic = perf_counter = time
