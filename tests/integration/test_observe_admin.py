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
    assert (await exchange(server.address, b"POST /health HTTP/1.1\r\n\r\n"))[0].startswith(b"HTTP/1.1 405")
    assert (await exchange(server.address, b"nonsense\r\n\r\n"))[0].startswith(b"HTTP/1.1 400")
    assert await exchange(server.address, b"GET /" + b"x" * 20_000) == (b"", b"")
    with monkeypatch.context() as patch:
        patch.setattr(admin, "REQUEST_TIMEOUT_S", 0.5)
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


REQUESTS = {
    "says nothing": b"",
    "says half of a request": b"GET /health HTTP/1.1\r\n",
    "does not read": b"GET /status HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("what", REQUESTS)
async def test_a_probe_is_answered_however_many_connections_somebody_holds(what):
    server = admin.AdminServer(
        "127.0.0.1:0", ready=lambda: (True, {}), status=lambda: {"long": "x" * (8 << 20)}
    )
    await server.start()
    host, _, port = server.address.rpartition(":")
    held = []
    for _ in range(70):
        held.append(await asyncio.open_connection(host, int(port), limit=1_024))
        held[-1][1].write(REQUESTS[what])
    while len(server._open) < admin.MAX_CONNECTIONS:  # noqa: ASYNC110 - of the server in this loop
        await asyncio.sleep(0.001)
    for _ in range(3):
        assert await get(server.address, b"/health") == (b"HTTP/1.1 200 OK", b'{"status":"ok"}')
    assert len(server._open) <= admin.MAX_CONNECTIONS
    for _, writer in held:
        writer.transport.abort()
    await server.stop()
    while server._open:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.001)


async def test_of_too_many_connections_the_one_that_has_been_silent_longest_is_closed(server, monkeypatch):
    monkeypatch.setattr(admin, "MAX_CONNECTIONS", 2)
    host, _, port = server.address.rpartition(":")
    first, second = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
    assert (await get(server.address, b"/health"))[0] == b"HTTP/1.1 200 OK"
    assert await first[0].read() == b"", "closed, and long before its time was over"
    second[1].write(b"GET /health HTTP/1.1\r\n\r\n")
    assert (await second[0].read()).startswith(b"HTTP/1.1 200 OK")
    for _, writer in (first, second):
        writer.close()


async def test_an_answer_that_nobody_reads_is_dropped_with_its_connection(monkeypatch):
    monkeypatch.setattr(admin, "REQUEST_TIMEOUT_S", 0.1)
    server = admin.AdminServer(
        "127.0.0.1:0", ready=lambda: (True, {}), status=lambda: {"long": "x" * (8 << 20)}
    )
    await server.start()
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1_024)
    writer.write(b"GET /status HTTP/1.1\r\n\r\n")
    while not server._open:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.001)
    (ours,) = server._open
    while server._open:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.01)
    assert ours.transport.is_closing()
    assert ours.transport.get_write_buffer_size() == 0, "its bytes are not kept for somebody who never reads"
    del reader
    writer.transport.abort()
    await server.stop()
