"""A mempool of market_world.py that reports to real coordinators, and what tests ask of them."""

import asyncio
from itertools import count

from shared.ids import InstanceId
from shared.transport.lending_client import LendingClient, MempoolReporter
from shared.wire.lending import AskLease, Grant, LendingRefused, MarketView, OfferMemory, OfferView, SpaceRef
from tests.support.control_plane import until_async
from tests.support.market_world import GIB, SPACE, ModelMempool


class LiveMempool:
    """The reference mempool on the running loop's clock. `urls`: of the coordinators, one of which leads."""

    def __init__(self, urls, name="m0", key=""):
        self.model = ModelMempool(name, count(1))
        self.events = []
        self.reporter = MempoolReporter(
            urls,
            self.model.name,
            key=key,
            make_report=self._report,
            on_reply=lambda reply: self.model.hear(reply, self.now_ms),
            on_event=lambda event, ids: self.events.append(event),
        )
        self.reporter.open()

    @property
    def now_ms(self):
        return int(asyncio.get_running_loop().time() * 1000)

    def _report(self, seq):
        self.model.tick(self.now_ms)
        self.model.seq = seq - 1
        return self.model.report(self.now_ms)

    def present(self, grant):
        taken = self.model.present(grant, self.now_ms)
        self.reporter.hurry()
        return taken

    async def close(self):
        await self.reporter.close()


def offer(mempool, gib=4):
    return OfferMemory(
        producer=InstanceId("p0"), mempool=mempool.model.name, boot_generation=mempool.model.boot, space=SPACE,
        length_bytes=gib * GIB,
    )  # fmt: skip


def ask(gib=1, consumer="c0"):
    return AskLease(
        consumer=InstanceId(consumer), length_bytes=gib * GIB, purpose="swap",
        spaces=[SpaceRef(mempool=InstanceId("m0"), space=SPACE)],
    )  # fmt: skip


async def until_market(client: LendingClient, condition, timeout_s=60.0) -> MarketView:
    """Wait for a view of the leader's market that fulfils the condition."""
    seen = []

    async def there():
        view = await client.market()
        if isinstance(view, LendingRefused):
            return False
        seen.append(view)
        return condition(view)

    await until_async(there, timeout_s)
    return seen[-1]


async def until_offered(client: LendingClient, mempool: LiveMempool, gib=4, key="offer"):
    """The market grants, and the mempool lends by an offer of p0."""

    async def there():
        view = await client.offer(offer(mempool, gib), key=key)
        return isinstance(view, OfferView) and view.state == "open"

    await until_async(there, 60.0)


async def granted(client: LendingClient, mempool: LiveMempool, gib=1, key="k", consumer="c0") -> Grant:
    """A lease, asked for until it is granted and its mempool has taken it."""
    found = []

    async def there():
        answer = await client.lease(ask(gib, consumer), key=key)
        if isinstance(answer, Grant) and mempool.present(answer):
            found.append(answer)
        return bool(found)

    await until_async(there, 60.0)
    return found[0]
