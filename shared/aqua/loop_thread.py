"""An event loop on a thread of its own, for programs that have none: PyTorch processes call, and wait."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from shared.errors import PeerTimeout

JOIN_S = 10.0
T = TypeVar("T")


class LoopThread:
    """Runs from construction to close(). Any thread but its own may call."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """What it returns or raises. Raises: PeerTimeout after timeout_s; it is cancelled then."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            if not future.cancel():  # a timeout of its own, or it has ended just now
                return future.result()
            raise PeerTimeout(f"no answer within {timeout_s:.1f} s") from None

    def close(self) -> None:
        """Cancel what runs, and wait for the thread. Harmless when closed already."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(JOIN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_S)
        self._loop.close()


async def _cancel_all() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
