"""The coordinator's REST API, without a socket: bodies, refusals, keys, pages."""

import asyncio

import httpx
import msgspec
import pytest
from starlette.datastructures import URL
from starlette.requests import Request

from services.coordinator.app import create_app
from services.coordinator.config import CoordinatorSettings, load
from services.coordinator.replies import MAX_BODY_BYTES
from services.coordinator.shell import Coordinator
from shared.errors import SettingsError
from shared.transport.clock import ManualClock
from shared.wire.membership import Heartbeat, HeartbeatReply, InstanceList, InstanceView, Registered
from tests.support.control_plane import register


@pytest.fixture
def api():
    return client()


def client(*keys, **settings):
    coordinator = Coordinator(CoordinatorSettings(redis_url="", **settings), ManualClock())
    transport = httpx.ASGITransport(create_app(coordinator, list(keys), ["http://test"]))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def joined(api, name="prefill-0"):
    reply = await api.post("/v1/instances", content=msgspec.json.encode(register(name)))
    assert reply.status_code == 200
    return msgspec.json.decode(reply.content, type=Registered)


def refusal(reply):
    body = reply.json()
    assert set(body) == {"code", "message"}
    assert body["message"]
    return reply.status_code, body["code"]


async def test_register_heartbeat_list_and_leave_speak_the_wire_structs(api):
    granted = await joined(api)
    beat = msgspec.json.encode(Heartbeat(epoch=granted.epoch, num_running=2))
    reply = await api.post("/v1/instances/prefill-0/heartbeat", content=beat)
    assert msgspec.json.decode(reply.content, type=HeartbeatReply).ttl_ms == granted.ttl_ms
    listing = msgspec.json.decode((await api.get("/v1/instances")).content, type=InstanceList)
    assert [type(v) for v in listing.instances] == [InstanceView]
    view = listing.instances[0]
    assert (view.epoch, view.state, view.num_running, view.description) == (
        granted.epoch, "live", 2, register().description,
    )  # fmt: skip
    assert (await api.delete(f"/v1/instances/prefill-0?epoch={granted.epoch}")).status_code == 204
    assert (await api.get("/v1/instances")).json()["instances"] == []


async def test_unknown_is_404_and_stale_is_409_with_code_and_message(api):
    granted = await joined(api)
    await joined(api)
    old = msgspec.json.encode(Heartbeat(epoch=granted.epoch))
    stale = await api.post("/v1/instances/prefill-0/heartbeat", content=old)
    assert refusal(stale) == (409, "epoch.stale")
    unknown = await api.post("/v1/instances/nobody/heartbeat", content=old)
    assert refusal(unknown) == (404, "instance.unknown")
    assert refusal(await api.delete(f"/v1/instances/prefill-0?epoch={granted.epoch}")) == (409, "epoch.stale")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"epoch": "x"}',
        b'{"instance": 1}',
        b"\xff\xfe",
        b"null",
        b'{"instance": "\xff"}',
        b'{"nobody knows": ' + b"[" * 2_000 + b"]" * 2_000 + b"}",
    ],
)
async def test_nonsense_is_400(api, body):
    assert refusal(await api.post("/v1/instances", content=body)) == (400, "invalid_request")
    for path in ("instances/x/heartbeat", "leases", "offers", "reclaims"):
        assert refusal(await api.post(f"/v1/{path}", content=body)) == (400, "invalid_request"), path


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 129, "<script>", "ä"])
async def test_an_id_that_is_no_path_segment_is_refused(api, name):
    body = msgspec.json.encode(register(name))
    assert refusal(await api.post("/v1/instances", content=body)) == (400, "invalid_request")


async def test_other_refusals_have_the_same_body(api):
    assert refusal(await api.get("/nope")) == (404, "http.404")
    assert refusal(await api.put("/v1/instances")) == (405, "http.405")
    assert refusal(await api.delete("/v1/instances/x?epoch=y")) == (400, "invalid_request")
    big = await api.post("/v1/instances", content=b" " * (MAX_BODY_BYTES + 1))
    assert refusal(big) == (413, "body_too_large")


async def test_a_full_coordinator_says_so():
    api = client(max_members=1)
    await joined(api)
    body = msgspec.json.encode(register("another"))
    assert refusal(await api.post("/v1/instances", content=body)) == (503, "overloaded")


async def test_keys_guard_the_api_and_the_page_but_not_the_probes():
    api = client("secret", "other")
    for path in ("/v1/instances", "/"):
        assert refusal(await api.get(path)) == (401, "invalid_api_key")
        assert refusal(await api.get(path, headers={"x-api-key": "wrong"})) == (401, "invalid_api_key")
        assert (await api.get(path, headers={"x-api-key": "other"})).status_code == 200
        assert (await api.get(path, headers={"authorization": "Bearer secret"})).status_code == 200
    for path in ("/health", "/ready", "/metrics", "/docs", "/openapi.json"):
        assert (await api.get(path)).status_code == 200


async def test_a_browser_asks_a_person_for_the_pages_key_and_no_other_site_can_use_it():
    api = client("secret", "other")
    assert (await api.get("/")).headers["www-authenticate"].startswith("Basic ")
    assert (await api.get("/", auth=("anybody", "other"))).status_code == 200
    for words in (
        "Basic !",
        "Basic c2VjcmV0",
        "Basic ",
        "Basic /w==",
    ):  # no base64, no colon, nothing, no text
        assert refusal(await api.get("/", headers={"authorization": words})) == (401, "invalid_api_key")
    assert refusal(await api.get("/", auth=("secret", "wrong"))) == (401, "invalid_api_key")
    refused = await api.get("/v1/instances", auth=("anybody", "secret"))
    assert refusal(refused) == (401, "invalid_api_key"), "browsers would send it unasked"
    assert "www-authenticate" not in refused.headers


async def test_the_openapi_page_describes_the_wire_structs(api):
    schema = (await api.get("/openapi.json")).json()
    body = schema["paths"]["/v1/instances"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/Register"}
    schemas = schema["components"]["schemas"]
    assert set(schemas["Register"]["properties"]) == set(register().__struct_fields__)
    assert {"Registered", "Heartbeat", "HeartbeatReply", "InstanceList", "InstanceView"} <= set(schemas)


async def test_the_page_lists_instances_and_escapes_what_they_say(api):
    nasty = register("prefill-0", endpoint="<script>alert(1)</script>")
    await api.post("/v1/instances", content=msgspec.json.encode(nasty))
    page = (await api.get("/")).text
    assert "prefill-0" in page
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_settings_that_cannot_work_are_refused_by_name():
    with pytest.raises(SettingsError, match=r"coordinator\.ttl_ms"):
        load(["--ttl-ms", "600"])
    with pytest.raises(SettingsError, match="admin_listen"):
        load(["--admin-listen", "127.0.0.1:1"])


async def test_a_coordinator_that_stood_still_takes_no_member_for_dead(monkeypatch):
    """It finds their heartbeats behind its own clock's tick: what they offer was taken back meanwhile."""
    clock = ManualClock()
    coordinator = Coordinator(CoordinatorSettings(redis_url="", heartbeat_interval_ms=20, ttl_ms=100), clock)
    turns = asyncio.Event()
    watch = coordinator._watch_members

    def seen(late_ms):
        watch(late_ms)
        turns.set()

    monkeypatch.setattr(coordinator, "_watch_members", seen)
    await coordinator.start()
    try:
        coordinator.register(register())
        for _ in range(3):
            clock.advance(10_000)
            turns.clear()
            await turns.wait()
            assert [view.state for view in coordinator.listing().instances] == ["live"]
    finally:
        await coordinator.stop()


@pytest.mark.parametrize("path", ["/v1/instances", "/v1/instances/prefill-0/heartbeat", "/v1/offers"])
async def test_a_client_that_leaves_inside_its_body_is_no_error_of_the_application(path):
    messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def receive():
        return messages.pop(0) if len(messages) > 1 else messages[0]

    sent = []

    async def send(message):
        sent.append(message)

    app = create_app(Coordinator(CoordinatorSettings(redis_url=""), ManualClock()), [])
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": [],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "state": {},
    }  # fmt: skip
    await app(scope, receive, send)  # what it raises, uvicorn logs with a traceback
    assert not any(message.get("status") == 500 for message in sent)


async def test_which_path_wants_a_key_is_not_read_from_the_host_header(monkeypatch):
    """Older Starlettes make their URL of it."""
    monkeypatch.setattr(Request, "url", URL("http://x/health?/v1/instances"))
    api = client("key")
    assert (await api.get("/v1/instances")).status_code == 401
    assert (await api.get("/", headers={"authorization": "Basic eDprZXk="})).status_code == 200


@pytest.mark.parametrize(
    ("host", "said", "status"),
    [
        ("any.lan", {}, 200),  # no browser: members know it by any name
        ("test", {"origin": "http://test"}, 200), ("[::1]:81", {"origin": "http://[::1]:81"}, 200),
        ("any.lan", {"origin": "http://any.lan"}, 403),  # it may be anybody's
        ("localhost", {"origin": "http://localhost:3000"}, 403), ("[::1]", {"sec-fetch-site": "cross-site"}, 403),
        ("localhost", {"content-type": "text/plain"}, 415),
    ],
)  # fmt: skip
async def test_without_keys_a_page_of_another_site_changes_nothing(host, said, status):
    api, body = client(), msgspec.json.encode(register())
    assert (await api.post(f"http://{host}/v1/instances", content=body, headers=said)).status_code == status
    assert len((await api.get("/v1/instances", headers=said)).json()["instances"]) == (status == 200)
