"""A GPU's idle memory for another one's engine, on and off: what benches that compare a peer with host memory use.

This process lends (shared/aqua/lender.py) and asks for the loan in the engine's name: offer, grant and their presenting
are those of any lender and consumer, only that nobody waits for an engine to find out that it lacks memory.
"""

import asyncio
import os
import subprocess
import time
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from shared.aqua.borrower import Borrower
from shared.aqua.lender import Lender, LenderSettings
from shared.aqua.loop_thread import LoopThread
from shared.ids import InstanceId
from shared.mempool.client import MempoolClient
from shared.transport.lending_client import LendingClient
from shared.wire.mempool import PoolStatus

CALL_S = 60.0
EVERY_MS = 500
TTL_MS = 120_000
SMI_S = 30.0
NAME = InstanceId("bench-lender")
T = TypeVar("T")


class NoLoan(RuntimeError):
    """The memory was not lent; the message says what there was instead."""


class PeerMemory:
    """Of one mempool with a coordinator. `with PeerMemory(...) as peer: peer.lend(); ...; peer.take_back()`.

    Args: consumer: the engine's instance. content_key: of its blocks, as its worker says. device: of the lender, as in
    wire.Attach. num_bytes: to be lent. Raises: NoLoan.
    """

    def __init__(
        self,
        socket: str,
        coordinator_url: str,
        *,
        consumer: str,
        device: str,
        num_bytes: int,
        content_key: str,
    ) -> None:
        self._consumer, self._num_bytes = InstanceId(consumer), num_bytes
        self._loop = LoopThread("peer-memory")
        self._borrower: Borrower | None = None
        self._task: asyncio.Task[None] | None = None
        try:
            self._client, self._market = self._call(self._connect(socket, coordinator_url))
            page = self._page_bytes(content_key)
            self._num_bytes -= num_bytes % page
            self._lender = Lender(
                LenderSettings(
                    socket=socket, instance=NAME, device=device, most_bytes=self._num_bytes,
                    coordinator_url=coordinator_url, page_bytes=page,
                )
            )  # fmt: skip
        except BaseException:
            self._loop.close()
            raise

    async def _connect(self, socket: str, url: str) -> tuple[MempoolClient, LendingClient]:
        client = MempoolClient(socket, InstanceId("bench-borrower"))
        client.start()
        if not await client.wait_connected(int(CALL_S * 1000)):
            await client.close()
            raise NoLoan(f"the mempool at {socket} does not answer")
        return client, LendingClient(url, patience_ms=int(CALL_S * 1000))

    def status(self) -> PoolStatus:
        """Of the mempool. Raises: NoLoan when it does not answer."""
        status = self._call(self._client.status())
        if status is None:
            raise NoLoan("the mempool does not say its status")
        return status

    def _page_bytes(self, content_key: str) -> int:
        for space in self.status().spaces:
            if space.engines and space.content_key == content_key:
                return space.page_bytes
        raise NoLoan(f"{self._consumer} has no pages of its own in this mempool")

    def lend(self, limit_s: float = CALL_S) -> int:
        """From now on the engine's blocks may leave for the peer. Returns: bytes on loan. Raises: NoLoan."""
        if self._borrower is not None:
            return self._borrower.held_bytes
        lent_bytes = self._lender.lend(self._num_bytes)  # host memory has its mempool's size
        self._borrower = Borrower(
            self._consumer, self._client, self._market, lambda _: None, wanted_bytes=lent_bytes,
            min_bytes=lent_bytes, ttl_ms=TTL_MS, every_ms=EVERY_MS,
        )  # fmt: skip
        self._task = self._call(self._begin(self._borrower))
        end_s = time.monotonic() + limit_s
        while not self._borrower.held_bytes:
            if time.monotonic() > end_s:
                raise NoLoan(f"no loan within {limit_s:.0f} s: {self._lender.market()!r}"[:600])
            time.sleep(0.02)
        return self._borrower.held_bytes

    async def _begin(self, borrower: Borrower) -> asyncio.Task[None]:
        return asyncio.ensure_future(borrower.run())

    def take_back(self) -> float:
        """The loan ends, and the lender has its memory again: seconds that took. Harmless when nothing is lent."""
        begin_s = time.monotonic()
        if self._borrower is not None and self._task is not None:
            self._call(self._end(self._borrower, self._task))
            self._borrower = self._task = None
            self._lender.reclaim(int(CALL_S * 500))
        return time.monotonic() - begin_s

    async def _end(self, borrower: Borrower, task: "asyncio.Task[None]") -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await borrower.give_back()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.call(coroutine, 2 * CALL_S)

    def close(self) -> None:
        """Everything is taken back."""
        try:
            self.take_back()
            self._lender.close()
            self._call(self._client.close())
            self._call(self._market.close())
        finally:
            self._loop.close()

    def __enter__(self) -> "PeerMemory":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def gpu_device(index: int) -> str:
    """A GPU as in wire.Attach, counted as CUDA counts them here. Raises: NoLoan where there is none."""
    words = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=SMI_S, check=False).stdout.split()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # noqa: TID251  nvidia-smi does not heed it
    if visible:
        found = [found[int(v)] if v.isdecimal() and int(v) < len(found) else v for v in visible.split(",")]
    if len(found) <= index:
        raise NoLoan(f"there is no GPU {index}: {found}")
    return "cuda:" + found[index].removeprefix("GPU-").replace("-", "")
