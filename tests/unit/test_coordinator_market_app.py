"""The memory market's REST API, without a socket: bodies, keys, statuses, refusals, the page, a standby."""

import httpx
import msgspec
import pytest

from services.coordinator.app import create_app
from services.coordinator.config import CoordinatorSettings, load
from services.coordinator.market_journal import NotLeading
from services.coordinator.routes_market import MARKET_STRUCTS, MAX_PAIRS
from services.coordinator.shell import Coordinator
from shared.errors import PeerTimeout, SettingsError
from shared.ids import Epoch, InstanceId
from shared.transport.clock import ManualClock
from shared.wire import placer
from shared.wire.lending import (
    MAX_ID_CHARS,
    AskLease,
    AskReclaim,
    Grant,
    LeaseCall,
    MempoolReport,
    OfferMemory,
    OfferView,
    Pair,
    Placement,
    ReportReply,
    SpaceRef,
    Token,
)
from tests.support.market_world import GIB, SPACE, ModelMempool

BOOT = Epoch(3)


@pytest.fixture
async def api():
    made = Api()
    await made.coordinator.lending.start(0)
    yield made
    await made.coordinator.lending.stop()
    await made.http.aclose()


class Api:
    """A coordinator that leads alone, and a mempool m0 of the reference kind."""

    def __init__(self, *keys):
        self.clock = ManualClock()
        self.coordinator = Coordinator(CoordinatorSettings(redis_url=""), self.clock)
        transport = httpx.ASGITransport(create_app(self.coordinator, list(keys)))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")
        self.mempool = ModelMempool("m0", iter([BOOT]))

    async def send(self, method, path, body=None, key=""):
        content = msgspec.json.encode(body) if body is not None else None
        return await self.http.request(method, path, content=content, headers={"idempotency-key": key})

    async def report(self, times=1):
        for _ in range(times):
            body = self.mempool.report(self.clock.now_ms())
            reply = await self.send("PUT", "/v1/mempools/m0/report", body)
            assert reply.status_code == 200, reply.text
            self.mempool.hear(msgspec.json.decode(reply.content, type=ReportReply), self.clock.now_ms())

    async def settle(self):
        await self.report(2)
        self.clock.advance(CoordinatorSettings().report_ttl_ms)
        await self.report(2)


OFFER = OfferMemory(
    producer=InstanceId("p0"), mempool=InstanceId("m0"), boot_generation=BOOT, space=SPACE, length_bytes=4 * GIB
)  # fmt: skip
ASK = AskLease(
    consumer=InstanceId("c0"), length_bytes=GIB, purpose="swap",
    spaces=[SpaceRef(mempool=InstanceId("m0"), space=SPACE)],
)  # fmt: skip


def refusal(reply):
    body = reply.json()
    assert body["message"]
    assert ("retry-after" in reply.headers) == bool(body.get("retry_after_ms")) == (reply.status_code == 503)
    return reply.status_code, body["code"]


async def test_offer_lease_renew_reclaim_release_speak_the_wire_structs(api):
    await api.settle()
    reply = await api.send("POST", "/v1/offers", OFFER, key="o")
    made = msgspec.json.decode(reply.content, type=OfferView)
    assert (await api.send("POST", "/v1/offers", OFFER, key="o")).content == reply.content
    await api.report(2)
    reply = await api.send("POST", "/v1/leases", ASK, key="l")
    grant = msgspec.json.decode(reply.content, type=Grant)
    assert (await api.send("POST", "/v1/leases", ASK, key="l")).content == reply.content
    assert api.mempool.present(grant, api.clock.now_ms())
    await api.report()
    call = LeaseCall(consumer=grant.consumer, token=grant.token)
    renewed = await api.send("POST", f"/v1/leases/{grant.lease_id}/renew", call)
    assert renewed.json()["state"] == "held"
    words = {"offer_id": made.offer.offer_id, "producer": "p0", "length_bytes": 0, "deadline_ms": 900}
    order = (await api.send("POST", "/v1/reclaims", words)).json()
    assert (order["keep_bytes"], order["deadline_ms"]) == (0, 900)
    assert (await api.send("GET", f"/v1/reclaims/{order['reclaim_id']}")).json()["over_bytes"] == GIB
    assert (await api.send("POST", f"/v1/leases/{grant.lease_id}/release", call)).status_code == 204
    await api.report(3)
    assert (await api.send("GET", f"/v1/reclaims/{order['reclaim_id']}")).json()["state"] == "done"
    market = (await api.send("GET", "/v1/market")).json()
    assert [x["state"] for x in market["leases"]] == ["ended"]
    assert market["is_granting"]
    assert (await api.send("GET", "/v1/leases")).json()["leases"] == market["leases"]
    assert (await api.send("GET", "/v1/offers")).json()["offers"] == market["offers"]


async def test_nothing_is_granted_before_the_mempools_were_heard(api):
    assert refusal(await api.send("POST", "/v1/leases", ASK)) == (503, "market.rebuilding")


async def test_refusals_have_a_status_that_says_whether_to_ask_again(api):
    await api.settle()
    assert refusal(await api.send("POST", "/v1/leases", ASK)) == (503, "offers.exhausted")
    call = LeaseCall(consumer=InstanceId("c0"), token=Token(1, 1))
    assert refusal(await api.send("POST", "/v1/leases/l-1-1/renew", call)) == (404, "lease.unknown")
    stale = msgspec.structs.replace(OFFER, boot_generation=Epoch(1))
    assert refusal(await api.send("POST", "/v1/offers", stale)) == (409, "offer.stale")
    await api.send("POST", "/v1/offers", OFFER, key="k")
    other = msgspec.structs.replace(OFFER, length_bytes=1)
    assert refusal(await api.send("POST", "/v1/offers", other, key="k")) == (409, "idempotency.mismatch")
    assert refusal(await api.send("GET", "/v1/reclaims/r-9")) == (404, "reclaim.unknown")


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("/v1/offers", {"length_bytes": 0}),
        ("/v1/offers", {"length_bytes": 1 << 60}),
        ("/v1/offers", {"producer": "a/b"}),
        ("/v1/offers", {"producer_epoch": 1 << 63}),
        ("/v1/offers", {"boot_generation": -1}),
        ("/v1/leases", {"consumer_epoch": 1 << 63}),
        ("/v1/leases", {"spaces": []}),
        ("/v1/leases", {"length_bytes": -1}),
        ("/v1/leases", {"min_bytes": 2 * GIB}),
        ("/v1/leases", {"purpose": "fun"}),
        ("/v1/leases", {"ttl_ms": -1}),
        ("/v1/leases", {"consumer": "<script>"}),
    ],
)
async def test_words_out_of_range_are_400(api, path, change):
    good = msgspec.to_builtins(OFFER if path == "/v1/offers" else ASK)
    reply = await api.send("POST", path, {**good, **change})
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid_request")


HUGE = 10**400
OFFERED = {
    "offer_id": "o-1-1", "producer": "p0", "producer_epoch": 0, "mempool": "m0", "boot_generation": 3, "space": 1,
    "length_bytes": GIB, "key": "k",
}  # fmt: skip
LEASED = {
    "lease_id": "l-1-1", "offer_id": "o-1-1", "consumer": "c0", "purpose": "swap", "length_bytes": GIB,
    "token": [1, 1], "remaining_ms": 900,
}  # fmt: skip
ROOM = {"space": 1, "name": "cuda:1", "total_bytes": GIB, "free_bytes": 0}
REPORT = {
    "boot_generation": 3, "seq": 1, "fence": [0, 0], "spaces": [ROOM],
    "offers": [{"offer": OFFERED, "leased_bytes": GIB}], "leases": [LEASED],
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"fence": [HUGE, 0]},
        {"fence": [(1 << 52) + 1, 0]},  # Redis' Lua would count the next leader's term as the same
        {"fence": [1 << 52, 0]},  # the next leader's could not be reported
        {"fence": [0, HUGE]},
        {"fence": [-1, 0]},
        {"boot_generation": 1 << 63},
        {"seq": HUGE},
        {"seq": -1},
        {"spaces": [{**ROOM, "space": HUGE}]},
        {"spaces": [{**ROOM, "total_bytes": HUGE}]},
        {"spaces": [{**ROOM, "free_bytes": -1}]},
        {"spaces": [{**ROOM, "unit_bytes": 0}]},
        {"spaces": [{**ROOM, "unit_bytes": HUGE}]},
        {"spaces": [ROOM] * 8_193},
        *({"offers": [{"offer": {**OFFERED, **wrong}, "leased_bytes": 0}]} for wrong in (
            {"offer_id": "a b"}, {"producer": ""}, {"mempool": "a/b"}, {"key": "a b"}, {"producer_epoch": HUGE},
            {"boot_generation": HUGE}, {"space": HUGE}, {"length_bytes": HUGE},
        )),
        {"offers": [{"offer": OFFERED, "leased_bytes": HUGE}]},
        *({"leases": [{**LEASED, **wrong}]} for wrong in (
            {"lease_id": "<b>"}, {"offer_id": ""}, {"consumer": "a b"}, {"key": "x" * 129}, {"token": [HUGE, 1]},
            {"token": [1, -1]}, {"length_bytes": HUGE}, {"remaining_ms": 3_600_001},
        )),
    ],
    ids=lambda change: "-".join(change),
)  # fmt: skip
async def test_numbers_and_words_out_of_range_in_a_mempools_report_are_400_and_change_nothing(api, change):
    before = (await api.send("GET", "/v1/market")).json()
    reply = await api.send("PUT", "/v1/mempools/m0/report", {**REPORT, **change})
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid_request")
    assert (await api.send("GET", "/v1/market")).json() == before
    assert (await api.send("PUT", "/v1/mempools/m0/report", REPORT)).status_code == 200


async def test_a_key_with_spaces_or_too_long_is_400(api):
    for key in ("a b", "x" * 129):
        reply = await api.send("POST", "/v1/leases", ASK, key=key)
        assert (reply.status_code, reply.json()["code"]) == (400, "invalid_request")


async def test_all_that_the_placer_says_is_a_body_of_as_many_pairs_as_may_be_said(api):
    """It was more than 64 KiB from 150 pairs on; and pairs that no mempool can serve were kept."""

    def named(kind, number):
        return InstanceId(f"{kind}{number}".ljust(MAX_ID_CHARS, "-"))

    numbers = range(MAX_PAIRS + 1)
    pairs = [
        placer.LendingPair(
            server=named("s", n), consumer=named("c", n), consumer_gpu=7, producer=named("p", n), producer_gpu=6,
            needed_bytes=80 << 30, offered_bytes=80 << 30, why_not="" if n else "has 4 ranks, and 2 are needed",
        )
        for n in numbers
    ]  # fmt: skip
    instances = [
        placer.PlacedInstance(
            instance=named(kind, n), model=named("m", n), role=role, server=named("s", n), gpus=[*range(8)],
            bytes_per_gpu=80 << 30, lent_bytes_per_gpu=80 << 30,
        )
        for kind, role in (("c", "consumer"), ("p", "producer")) for n in numbers
    ]  # fmt: skip
    answer = placer.Placement(
        instances=instances, pairs=pairs, servers=[], objective_bytes=0, bound_bytes=0, gap_ratio=0.0,
        needed_bytes=0, lent_bytes=0,
    )  # fmt: skip
    body = msgspec.json.format(msgspec.json.encode(answer), indent=2)  # as `quire place --json` prints it
    reply = await api.http.put("/v1/placement", content=body)
    assert reply.status_code == 204, (len(body), reply.text)
    kept = msgspec.json.decode((await api.send("GET", "/v1/placement")).content, type=Placement).pairs
    assert kept == [Pair(consumer=named("c", n), producer=named("p", n)) for n in numbers[1:]]


async def test_placement_is_kept_and_shown(api):
    placement = Placement(pairs=[Pair(consumer=InstanceId("c0"), producer=InstanceId("p0"))])
    assert (await api.send("PUT", "/v1/placement", placement)).status_code == 204
    assert msgspec.json.decode((await api.send("GET", "/v1/placement")).content, type=Placement) == placement


async def test_the_page_says_who_lends_what_to_whom(api):
    await api.settle()
    await api.send("POST", "/v1/offers", OFFER)
    await api.report(2)
    grant = (await api.send("POST", "/v1/leases", ASK)).json()
    page = (await api.http.get("/")).text
    for words in ("p0 (m0, space 1)", "c0", "1.0 GiB", grant["lease_id"], "granting", "lease granted"):
        assert words in page


async def test_every_route_of_the_market_wants_the_api_key():
    api = Api("secret")
    for method, path in (
        ("POST", "/v1/offers"), ("POST", "/v1/leases"), ("POST", "/v1/leases/l/renew"),
        ("POST", "/v1/leases/l/release"), ("POST", "/v1/reclaims"), ("GET", "/v1/reclaims/r"),
        ("PUT", "/v1/mempools/m0/report"), ("GET", "/v1/market"), ("PUT", "/v1/placement"), ("GET", "/"),
    ):  # fmt: skip
        assert (await api.http.request(method, path)).status_code == 401, path
    report = MempoolReport(boot_generation=BOOT, seq=1, fence=Token(0, 0))
    reply = await api.http.put(
        "/v1/mempools/m0/report", content=msgspec.json.encode(report), headers={"x-api-key": "secret"}
    )
    assert refusal(reply) == (503, "market.standby")


async def test_a_standby_says_where_the_leader_is():
    api = Api()
    api.coordinator = None
    settings = CoordinatorSettings(redis_url="redis://127.0.0.1:9/0")
    coordinator = Coordinator(settings, ManualClock())
    coordinator.lending.leadership.refused("http://127.0.0.1:7")
    transport = httpx.ASGITransport(create_app(coordinator, []))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for path in ("/v1/market", "/v1/instances"):
            reply = await http.get(path)
            assert refusal(reply) == (503, "market.standby")
            assert reply.json()["leader"] == "http://127.0.0.1:7"
        assert (await http.get("/ready")).json()["role"] == "standby"
        assert "http://127.0.0.1:7" in (await http.get("/")).text


async def test_openapi_has_every_body_and_the_idempotency_key(api):
    found = (await api.http.get("/openapi.json")).json()
    assert {kind.__name__ for kind in MARKET_STRUCTS} <= set(found["components"]["schemas"])
    for path in ("/v1/offers", "/v1/leases", "/v1/reclaims"):
        assert [x["name"] for x in found["paths"][path]["post"]["parameters"]] == ["Idempotency-Key"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--lease-ttl-ms", "1500"),
        ("--report-ttl-ms", "1500"),
        ("--journal-fsync", "x"),
        ("--present-ms", "0"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(flags):
    with pytest.raises(SettingsError, match=flags[0].removeprefix("--").replace("-", "_")):
        load(flags)


@pytest.mark.parametrize(
    ("failure", "status"), [(NotLeading("another leads"), 503), (PeerTimeout("Redis"), 200)]
)
async def test_a_reclaim_that_no_leader_has_is_refused_and_one_that_only_the_journal_lacks_is_not(
    api, monkeypatch, failure, status
):
    await api.settle()
    made = await api.send("POST", "/v1/offers", OFFER)
    offer_id = msgspec.json.decode(made.content, type=OfferView).offer.offer_id

    async def store():
        raise failure

    monkeypatch.setattr(api.coordinator.lending, "_store", store)
    body = AskReclaim(offer_id=offer_id, producer=InstanceId("p0"), deadline_ms=100)
    reply = await api.send("POST", "/v1/reclaims", body)
    if status == 200:
        assert reply.status_code == 200, reply.text
    else:
        assert refusal(reply) == (status, "market.standby")
