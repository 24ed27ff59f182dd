"""shared/observe/admin.py over a real socket."""

import asyncio
import json

import pytest

from shared.errors import SettingsError
from shared.observe import admin, metrics


async def exchange(address, data, *, close_early=False):
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    reply = b"" if close_early else await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, body = reply.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], body


async def get(address, path):
    return await exchange(address, b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n\r\n")


@pytest.fixture
async def server():
    server = admin.AdminServer(
        "127.0.0.1:0", ready=lambda: (server.is_ready, {"waits_for": "redis"}), status=lambda: {"pages": 3}
    )
    server.is_ready = False
    await server.start()
    yield server
    await server.stop()


async def test_health_ready_metrics_and_status_answer(server):
    metrics.counter("quire_test_admin_total", "calls").inc()
    assert await get(server.address, b"/health") == (b"HTTP/1.1 200 OK", b'{"status":"ok"}')
    line, body = await get(server.address, b"/ready")
    assert (line, json.loads(body)) == (
        b"HTTP/1.1 503 Service Unavailable",
        {"ready": False, "waits_for": "redis"},
    )
    server.is_ready = True
    assert (await get(server.address, b"/ready?x=1"))[0] == b"HTTP/1.1 200 OK"
    assert json.loads((await get(server.address, b"/status"))[1]) == {"pages": 3}
    assert b"quire_test_admin_total 1.0" in (await get(server.address, b"/metrics"))[1]
    assert (await get(server.address, b"/other"))[0] == b"HTTP/1.1 404 Not Found"


async def test_what_is_not_a_get_is_refused_and_nothing_stops_the_server(server, monkeypatch):
    monkeypatch.setattr(admin, "REQUEST_TIMEOUT_S", 0.5)
    assert (await exchange(server.address, b"POST /health HTTP/1.1\r\n\r\n"))[0].startswith(b"HTTP/1.1 405")
    assert (await exchange(server.address, b"nonsense\r\n\r\n"))[0].startswith(b"HTTP/1.1 400")
    assert await exchange(server.address, b"GET /" + b"x" * 20_000) == (b"", b"")
    assert await exchange(server.address, b"GET /health") == (b"", b"")
    await exchange(server.address, b"GET /health", close_early=True)
    assert (await get(server.address, b"/health"))[0] == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize("listen", ["8106", "127.0.0.1", "127.0.0.1:x", ":8106", "127.0.0.1:70000"])
def test_an_address_without_host_or_port_is_refused(listen):
    with pytest.raises(SettingsError, match="want host:port"):
        admin.parse_listen(listen)


async def test_a_taken_port_is_a_settings_error(server):
    second = admin.AdminServer(server.address, ready=lambda: (True, {}))
    with pytest.raises(SettingsError, match="cannot listen"):
        await second.start()
