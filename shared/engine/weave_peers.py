"""What a rank does when it has waited for another one in vain: its process ends, and by that the whole engine.

A step is given to a GPU long before it is computed, so that its sum is known to be wrong only behind its output:
that is looked at before it is handed on. And only the first rank hands one on: another one that has waited in vain
would say nothing before the next step, which may never come. So a thread of each rank looks, too. vLLM's executor sees
the process end and ends the others (rank_processes.py), and the worker's front its engine.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput

from shared.errors import PeerTimeout

EXIT_PEER_LOST = 4  # of a rank's process
WATCH_S = 0.25

logger = logging.getLogger(__name__)


def end_process(error: PeerTimeout) -> None:
    """Nothing that this process computed since is true, and its peers wait for it in vain."""
    logger.critical("this engine's ranks are apart, and it ends: %s", error.message)
    os._exit(EXIT_PEER_LOST)


class Peers:
    """Of one rank, from the first step to close().

    Args: check: raises PeerTimeout once a wait of this rank has run out; any thread, at any time. end: does not return,
    but in tests.
    """

    def __init__(self, check: Callable[[], None], end: Callable[[PeerTimeout], None] = end_process) -> None:
        self._check, self._end = check, end
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="quire-weave-peers", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Around what may wait for other ranks: a wait that ran out in it ends the process."""
        try:
            yield
            self._check()
        except PeerTimeout as error:
            self._end(error)
            raise

    def checked(self, output: Any) -> Any:
        """The same output, handed on only if no wait had run out when it was there."""
        return _Checked(output, self) if isinstance(output, AsyncModelRunnerOutput) else output

    def close(self) -> None:
        """Before what check() reads goes. Waits for the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_S):
            try:
                self._check()
            except PeerTimeout as error:
                self._end(error)
                return


class _Checked(AsyncModelRunnerOutput):
    """An output that is still computed."""

    def __init__(self, output: AsyncModelRunnerOutput, peers: Peers) -> None:
        self._output, self._peers = output, peers

    def get_output(self) -> Any:
        """vLLM's."""
        with self._peers.awaited():
            return self._output.get_output()
