"""A lender in a process of its own that gets SIGKILL, and the market beside it: `with killed_lender(...) as lender`.

The process attaches, answers the mempool and decides nothing (lending_engine.py); offer, grant and, once its death is
known, the order that brings its pages home are presented from here, as a coordinator's would be. The consumer may be
stopped from before the death until the pages are home: then what is lost is what was there.
"""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shared.ids import Epoch, InstanceId, LeaseId, SpaceId
from shared.wire.lending import Grant, Offer, ReclaimOrder, Token
from shared.wire.mempool_lending import LendingDone
from tests.integration.mempool_rig import MempoolProcess, PatientClient, until
from tests.integration.test_exactness import ROOT
from tests.integration.test_pages_under_pressure import PAGE_BYTES
from tests.support.processes import stopped

POLL_S = 0.002
SETTLED_POLLS = 50  # in a row with the same counts: no copy is under way
TTL_MS = 600_000


@contextmanager
def lending_process(socket: object) -> Iterator[subprocess.Popen]:
    """An idle engine of another model, whose pages are as large as the tests' consumers'."""
    words = [sys.executable, "-m", "tests.integration.lending_engine", str(socket), "lend", str(PAGE_BYTES)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class KilledLender:
    """Lends to `consumer` once it is there, dies when `is_used(status)`, and is asked for its pages afterwards.

    Processes that run the module `at_rest` are stopped from before the death until they are home.
    `used_pages`: on loan when it was killed; 0: it was not, yet.
    """

    def __init__(
        self,
        pool: MempoolProcess,
        process: subprocess.Popen,
        consumer: str,
        num_pages: int,
        is_used: Callable[[Any], bool],
        deadline_ms: int,
        at_rest: str,
    ) -> None:
        self._pool, self._process, self._consumer = pool, process, InstanceId(consumer)
        self._length_bytes, self._is_used, self._deadline_ms = num_pages * PAGE_BYTES, is_used, deadline_ms
        self._at_rest = at_rest
        self.lends, self.stopping = threading.Event(), threading.Event()
        self.used_pages, self.is_home, self.exit_status = 0, False, 0

    async def run(self) -> None:
        client = PatientClient(self._pool.socket, InstanceId("market"))
        client.start()
        try:
            assert await client.wait_connected(30_000)
            await self._lend(client)
            self.lends.set()
            while not self.is_home:
                while not self._is_used(status := await client.status()):
                    await self._rest()
                if not self._at_rest:
                    await self._die(client, status)
                    return
                with stopped(self._at_rest):
                    if self._is_used(status := await self._settled(client)):
                        await self._die(client, status)
        except _Stopped:
            return
        finally:
            await client.close()

    async def _die(self, client: PatientClient, status: Any) -> None:
        self._process.kill()
        self.exit_status = self._process.wait()
        self.used_pages = leased(status)
        while any("producer" in name for name in self._pool.status()["attachments"]):
            await self._rest()
        order = ReclaimOrder(reclaim_id="r", offer_id="o", keep_bytes=0, deadline_ms=self._deadline_ms)
        assert isinstance(await client.present(order), LendingDone)
        while leased(await client.status()):
            await self._rest()
        self.is_home = True

    async def _settled(self, client: PatientClient) -> Any:
        """The status once nothing changes any more."""
        before, num_same = None, 0
        while num_same < SETTLED_POLLS:
            status = await client.status()
            num_same = num_same + 1 if status.spaces == before else 0
            before = status.spaces
            await self._rest()
        return status

    async def _lend(self, client: PatientClient) -> None:
        boot, space, mempool = Epoch(client.boot_generation), SpaceId(0), InstanceId("m")
        offer = Offer(
            offer_id="o", producer=InstanceId("producer"), producer_epoch=Epoch(1), mempool=mempool,
            boot_generation=boot, space=space, length_bytes=self._length_bytes,
        )  # fmt: skip
        assert isinstance(await client.present(offer), LendingDone)
        grant = Grant(
            lease_id=LeaseId("l"), offer_id="o", consumer=self._consumer, purpose="overflow", mempool=mempool,
            address="", boot_generation=boot, space=space, length_bytes=self._length_bytes, token=Token(1, 1),
            present_ms=TTL_MS, ttl_ms=TTL_MS, consumer_ttl_ms=TTL_MS,
        )  # fmt: skip
        while not isinstance(await client.present(grant), LendingDone):
            await self._rest()  # its engine is not there, or pages are not

    async def _rest(self) -> None:
        if self.stopping.is_set():
            raise _Stopped
        await asyncio.sleep(POLL_S)

    def assert_it_was_killed_and_its_pages_came_home(self) -> None:
        assert self.exit_status == -signal.SIGKILL
        assert self.used_pages > 0
        assert self.is_home


class _Stopped(Exception):
    """The test is over."""


def leased(status: Any) -> int:
    """Pages of the lender's that are on loan or on offer."""
    return status.spaces[0].pages_by_state.get("leased", 0)


@contextmanager
def killed_lender(
    pool: MempoolProcess,
    consumer: str,
    num_pages: int,
    is_used: Callable[[Any], bool],
    deadline_ms: int,
    at_rest: str = "",
) -> Iterator[KilledLender]:
    """On a thread of its own, from when the lender is attached. What goes wrong there is raised at the end."""
    failed: list[BaseException] = []
    with lending_process(pool.socket) as process:
        until(lambda: any("producer" in name for name in pool.status()["attachments"]), "the lender is there")
        lender = KilledLender(pool, process, consumer, num_pages, is_used, deadline_ms, at_rest)

        def in_thread() -> None:
            try:
                asyncio.run(lender.run())
            except BaseException as error:  # noqa: BLE001  raised again below
                failed.append(error)

        thread = threading.Thread(target=in_thread)
        thread.start()
        try:
            yield lender
        finally:
            lender.stopping.set()
            thread.join()
    assert not failed, failed
