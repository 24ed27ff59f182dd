"""Redis killed or wiped, the coordinator with it or not, while leases of real mempools are out: nothing is lent twice.

Two mempools, each with an engine that lends and one that borrows. Consumers ask without a pause all the time, before,
while and after something is lost; what a mempool has accepted is asked of itself (renewals), whatever others believe.
"""

import asyncio
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from shared.ids import Epoch, InstanceId, LeaseId, SpaceId
from shared.prompttree.embedded import EmbeddedRedis
from shared.transport.lending_client import LendingClient
from shared.transport.redis_link import RedisLink
from shared.wire.lending import AskLease, Grant, LendingRefused, MarketView, OfferMemory, OfferView, SpaceRef
from shared.wire.mempool import CallFailed
from shared.wire.mempool_lending import LendingDone
from tests.integration.lending_rig import pool_flags
from tests.integration.mempool_rig import MempoolProcess
from tests.integration.test_coordinator_market import Coordinator
from tests.integration.test_mempool_lending import PAGE_BYTES, Engine
from tests.integration.test_mempool_market import asked
from tests.support.market_rig import until_market

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_OFFERED, NUM_HELD, NUM_ASKED = 12, 8, 2  # pages: of each mempool, lent before the loss, in each ask since
TTL_MS = 600_000
NUM_REFUSED = 20  # asks in a row that find nothing, until it is believed that nothing is left
LIMIT_S = 60.0


@dataclass
class Host:
    """A mempool, who lends there and who borrows. `accepted`: grants that the mempool has taken, none released."""

    name: InstanceId
    lender: Engine
    consumer: Engine
    space: SpaceId
    accepted: list[Grant] = field(default_factory=list)

    @classmethod
    async def begin(cls, pool: MempoolProcess, name: str) -> "Host":
        engines = Engine(pool, f"{name}-lender"), Engine(pool, f"{name}-consumer")
        for engine in engines:
            engine.client.start()
            assert await engine.client.wait_connected(30_000)
        device = f"cpu:{engines[0].name}"
        (space,) = [s["number"] for s in pool.status()["spaces"] if s["devices"] == [device]]
        return cls(InstanceId(name), *engines, SpaceId(space))

    async def offer(self, client: LendingClient) -> str:
        words = OfferMemory(
            producer=self.lender.name, mempool=self.name, space=self.space, length_bytes=NUM_OFFERED * PAGE_BYTES,
            boot_generation=Epoch(self.lender.client.boot_generation),
        )  # fmt: skip
        view = await asked(
            lambda: client.offer(words, key=self.name),
            lambda answer: isinstance(answer, OfferView) and answer.state == "open",
            self.lender, self.consumer,
        )  # fmt: skip
        assert view.limit_bytes == NUM_OFFERED * PAGE_BYTES
        return view.offer.offer_id

    def words(self, num_pages: int) -> AskLease:
        return AskLease(
            consumer=self.consumer.name, length_bytes=num_pages * PAGE_BYTES, purpose="overflow", ttl_ms=TTL_MS,
            spaces=[SpaceRef(mempool=self.name, space=self.space)],
        )  # fmt: skip

    async def present(self, grant: Grant) -> str:
        """ "" when the mempool has taken it, else why not. One that was refused for lack of room was granted twice."""
        answer = await self.consumer.client.present(grant)
        if isinstance(answer, LendingDone):
            self.accepted += [] if grant in self.accepted else [grant]
            return ""
        assert isinstance(answer, CallFailed)
        assert answer.code != "offer.exceeded", "the coordinator has granted what it had granted before"
        return answer.code

    def num_accepted(self) -> int:
        """Pages."""
        return sum(grant.length_bytes for grant in self.accepted) // PAGE_BYTES

    async def num_lent(self) -> int:
        """Pages, as the mempool says."""
        total = 0
        for lease_id in {grant.lease_id for grant in self.accepted}:
            answer = await self.consumer.client.renew_loan(LeaseId(lease_id), TTL_MS)
            assert isinstance(answer, LendingDone), answer
            total += answer.num_bytes
        return total // PAGE_BYTES

    async def close(self) -> None:
        await self.lender.close()
        await self.consumer.close()


class Consumers:
    """Ask all the time, for all hosts, with a new key each time."""

    def __init__(self, client: LendingClient, hosts: list[Host], before: set[LeaseId]) -> None:
        """Args: before: leases that were out when something was lost."""
        self.client, self.hosts, self.before = client, hosts, before
        self.keys = count()
        self.refused: Counter[str] = Counter()  # since the last grant
        self.terms: list[int] = []  # of grants, in order
        self.task = asyncio.ensure_future(self.run())

    async def run(self) -> None:
        while True:
            for host in self.hosts:
                host.lender.answer()
                host.consumer.answer()
                await self.ask(host)
            await asyncio.sleep(0.005)

    async def ask(self, host: Host) -> None:
        answer = await self.client.lease(host.words(NUM_ASKED), key=f"ask-{next(self.keys)}")
        if isinstance(answer, LendingRefused):
            self.refused[answer.code] += 1
            return
        self.refused.clear()
        self.terms.append(answer.token.term)
        view = await self.client.market()
        if isinstance(view, MarketView):
            missing = self.before - held(view)
            assert not missing, "it grants, and has not heard what its mempools lend"
        await host.present(answer)
        assert await host.num_lent() <= NUM_OFFERED

    async def until(self, condition, what: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                assert not self.task.done(), self.task.result()
                await asyncio.sleep(0.01)
        assert condition(), what

    async def close(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


def held(view: MarketView) -> set[LeaseId]:
    return {lease.lease_id for lease in view.leases if lease.state == "held"}


class Loss:
    """What is lost, and how it comes back. `what`: words of these."""

    def __init__(self, redis: EmbeddedRedis, folder: Path, coordinator: Coordinator) -> None:
        self.redis, self.folder, self.coordinator = redis, folder, coordinator

    async def begin(self, what: str) -> None:
        if "coordinator" in what:
            self.coordinator.process.kill()
        if "killed" in what:
            self.redis.kill()
        else:
            await self.flush()

    async def flush(self) -> None:
        """FLUSHALL, perhaps under a coordinator that leads."""
        up = asyncio.Event()
        link = RedisLink(self.redis.url, on_up=up.set)
        link.open()
        await asyncio.wait_for(up.wait(), LIMIT_S)
        assert await link.call("FLUSHALL", timeout_ms=30_000) == b"OK"
        await link.close()

    async def end(self, what: str, consumers: Consumers) -> None:
        """Without Redis nobody is granted anything, meanwhile."""
        if "coordinator" in what:
            self.coordinator.start()
        if "killed" not in what:
            return
        if "coordinator" not in what:
            await consumers.until(
                lambda: consumers.refused["journal.down"] and consumers.refused.total() > NUM_REFUSED,
                "it says what is missing, while it has its lease",
            )
            assert not consumers.terms, "it has granted without its journal"
        if "wiped" in what:
            shutil.rmtree(self.folder)
        self.redis.start()


@pytest.fixture
def loss(tmp_path):
    folder = tmp_path / "redis"
    redis = EmbeddedRedis(0, folder, appendonly=True)
    redis.start()
    # a mempool that the machine stops for less than that may not be counted out when the term is rebuilt
    coordinator = Coordinator(redis, "c0", 3_000, "--report-ttl-ms", "4000").start().wait()
    yield Loss(redis, folder, coordinator)
    coordinator.process.kill()
    redis.kill()


@pytest.fixture
def pools(tmp_path, loss):
    made = []
    for name in ("mempool-0", "mempool-1"):
        (tmp_path / name).mkdir()
        made.append(MempoolProcess(tmp_path / name, **pool_flags(loss.coordinator) | {"instance": name}))
    yield made
    for one in made:
        one.stop()


@pytest.mark.parametrize(
    "what",
    [
        "killed",
        "wiped",
        "killed and wiped",
        "wiped with the coordinator",
        "killed and wiped with the coordinator",
    ],
)
def test_leases_that_are_out_when_redis_is_lost_are_known_again_before_anything_is_granted(loss, pools, what):
    async def run() -> None:
        client = LendingClient(loss.coordinator.url, patience_ms=60_000)
        hosts = [await Host.begin(pool, f"mempool-{number}") for number, pool in enumerate(pools)]
        offers = [await host.offer(client) for host in hosts]
        for host in hosts:

            async def borrow(host: Host = host) -> str:
                answer = await client.lease(host.words(NUM_HELD))
                return await host.present(answer) if isinstance(answer, Grant) else answer.code

            await asked(borrow, lambda code: not code, host.lender, host.consumer)
        out = {grant.lease_id for host in hosts for grant in host.accepted}
        term = (await until_market(client, lambda view: held(view) >= out)).term
        on_its_way = await asked(
            lambda: client.lease(hosts[0].words(NUM_ASKED)), lambda answer: isinstance(answer, Grant)
        )

        await loss.begin(what)
        consumers = Consumers(client, hosts, out)
        await loss.end(what, consumers)
        is_known = what == "killed"
        await until_market(client, lambda view: view.is_granting and (is_known or view.term > term))
        consumers.refused.clear()
        await consumers.until(lambda: consumers.refused["offers.exhausted"] > NUM_REFUSED, "all is lent")
        await hosts[0].present(on_its_way)  # taken if it counted, refused else, and never one too many
        await consumers.until(
            lambda: sum(map(Host.num_accepted, hosts)) == 2 * NUM_OFFERED, "the rest is lent"
        )
        await consumers.close()

        await until_market(
            client,
            lambda view: view.is_granting and held(view) == {g.lease_id for h in hosts for g in h.accepted},
        )
        if not is_known:
            assert min(consumers.terms) > term, "it has granted as if nothing had been lost"
            assert on_its_way not in hosts[0].accepted, "what was granted before is dead"
        for host, offer_id in zip(hosts, offers, strict=True):
            assert len({grant.token for grant in host.accepted}) == len(host.accepted)
            assert {grant.offer_id for grant in host.accepted} == {offer_id}, "the offer outlives the loss"
            assert await host.num_lent() == NUM_OFFERED
        await client.close()
        for host in hosts:
            await host.close()

    asyncio.run(run())
