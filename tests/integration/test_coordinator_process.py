"""The coordinator as a process with a real journal: kill -9, restart, growing epochs, clients that come back."""

import asyncio
import resource
import socket
import subprocess
import sys

import httpx
import msgspec
import pytest

import services.coordinator.__main__ as main
from services.coordinator.__main__ import bind, server_of
from services.coordinator.app import create_app
from services.coordinator.config import CoordinatorSettings
from services.coordinator.http_protocol import TimedProtocol
from services.coordinator.shell import Coordinator as Shell
from shared.free_ports import free_port
from shared.observe.service import EXIT_BUG
from shared.prompttree.embedded import EmbeddedRedis
from shared.transport.clock import MonotonicClock
from shared.transport.membership_client import MembershipClient, MembershipPoller
from shared.wire.membership import Heartbeat
from tests.support.control_plane import ServiceProcess, get_json, register, until, until_async
from tests.support.quickest import ATTEMPTS, ever

TIMES = ("--heartbeat-interval-ms", "50", "--forget-after-ms", "2000")
TTL = ("--ttl-ms", "30000")  # longer than any pause of a busy machine: nobody dies of one
PATIENT = ("--journal-wait-ms", "30000")  # for Redis, at its start
SHORT_TTL = ("--ttl-ms", "300")


class Coordinator:
    """A process that can be killed and started again on the same address."""

    def __init__(self, *flags, ttl=TTL):
        self.flags = (*ttl, *flags)
        self.listen = f"127.0.0.1:{free_port()}"  # which nobody gets between a kill and a start
        self.process = None

    def start(self):
        self.process = ServiceProcess("services.coordinator", "--listen", self.listen, *TIMES, *self.flags)
        self.listen = self.process.wait_log("listening")["address"]
        return self

    @property
    def url(self):
        return f"http://{self.listen}"


@pytest.fixture
def redis(tmp_path):
    server = EmbeddedRedis(0, tmp_path, appendonly=True)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def coordinator(redis):
    started = Coordinator("--redis-url", redis.url).start()
    yield started
    started.process.kill()


@pytest.fixture
def impatient(redis):
    """Members that are silent die soon."""
    started = Coordinator("--redis-url", redis.url, ttl=SHORT_TTL).start()
    yield started
    started.process.kill()


@pytest.fixture
async def opened():
    things = []
    yield things
    for thing in reversed(things):
        await thing.close()


def member(coordinator, opened, name="prefill-0", **more):
    """A client with its epochs and events recorded."""
    client = MembershipClient(
        coordinator.url,
        register(name),
        heartbeat=lambda epoch: Heartbeat(epoch=epoch, num_running=3),
        on_epoch=lambda epoch: epochs.append(epoch),
        on_event=lambda event, ids: events.append(event),
        **more,
    )
    client.epochs = epochs = []
    client.events = events = []
    opened.append(client)
    client.open()
    return client


async def listing(coordinator):
    found = await asyncio.to_thread(get_json, f"{coordinator.url}/v1/instances")
    return {view["instance"]: view for view in found["instances"]}


async def until_journalled(coordinator):
    """Redis has everything: it is written behind the replies."""

    async def is_up():
        return (await asyncio.to_thread(get_json, f"{coordinator.url}/ready"))["journal"] is True

    await until_async(is_up)


async def until_state(coordinator, name, state, timeout_s=30.0):
    async def there():
        return (await listing(coordinator)).get(name, {}).get("state", "gone") == state

    await until_async(there, timeout_s)


async def test_a_member_joins_beats_and_leaves(coordinator, opened):
    async def has_beaten():
        return (await listing(coordinator))["decode-0"]["num_running"] == 3

    async def leaves():
        """It says so once, and waits a second for the answer."""
        one = member(coordinator, opened, "decode-0")
        await until_state(coordinator, "decode-0", "live")
        await until_async(has_beaten)
        await one.close()
        return "leave_failed" not in one.events

    assert await ever(leaves)
    await until_state(coordinator, "decode-0", "gone")


async def test_a_silent_member_dies(impatient, opened):
    async def is_seen_dead():
        """For two seconds, in which who looks may stand still."""
        two = member(impatient, opened, "decode-1")
        await until_state(impatient, "decode-1", "live")
        await two.close(leave=False)
        states = []

        async def is_gone():
            states.append((await listing(impatient)).get("decode-1", {}).get("state", "gone"))
            return states[-1] == "gone"

        await until_async(is_gone)
        if "dead" not in states:
            return False
        last = len(states) - 1 - states[::-1].index("dead")
        assert set(states[:last]) <= {"live", "suspect", "dead"}
        assert set(states[last + 1 :]) == {"gone"}
        return True

    assert await ever(is_seen_dead)


async def test_after_kill_and_restart_with_the_journal_members_keep_their_epochs(coordinator, opened):
    client = member(coordinator, opened)
    await until_state(coordinator, "prefill-0", "live")
    await until_journalled(coordinator)
    coordinator.flags += PATIENT
    coordinator.process.kill()
    await until(lambda: "coordinator_lost" in client.events)
    coordinator.start()
    await until_state(coordinator, "prefill-0", "live")
    assert client.epochs == [client.epoch]
    assert (await listing(coordinator))["prefill-0"]["epoch"] == client.epoch


async def test_epochs_grow_across_kill_and_restart(coordinator, opened):
    epochs = []
    for _ in range(2):
        client = member(coordinator, opened)
        await until(lambda c=client: c.epoch is not None)
        epochs.append(client.epoch)
        await client.close(leave=False)
        coordinator.process.kill()
        coordinator.start()
    assert epochs == sorted(set(epochs))


async def test_after_a_restart_without_redis_members_register_again_with_larger_epochs(
    coordinator, opened, redis
):
    client = member(coordinator, opened)
    await until_state(coordinator, "prefill-0", "live")
    redis.kill()
    await asyncio.sleep(0.1)
    assert (await listing(coordinator))["prefill-0"]["state"] == "live"  # losing Redis is harmless
    coordinator.process.kill()
    coordinator.start()
    await until_state(coordinator, "prefill-0", "live")
    await until(lambda: len(client.epochs) == 2)
    assert client.epochs == sorted(set(client.epochs))


async def test_a_redis_that_comes_late_is_filled(coordinator, opened, redis):
    redis.kill()
    client = member(coordinator, opened)
    await until_state(coordinator, "prefill-0", "live")
    redis.start()
    await until_journalled(coordinator)
    coordinator.flags += PATIENT
    coordinator.process.kill()
    coordinator.start()
    await until_state(coordinator, "prefill-0", "live")
    assert client.epochs == [client.epoch]


async def test_a_client_waits_for_a_coordinator_that_is_not_there_yet(opened, redis):
    reserved = Coordinator("--redis-url", "").start()
    reserved.process.kill()
    client = member(reserved, opened)
    await until(lambda: "register_failed" in client.events)
    assert client.epoch is None
    reserved.start()
    try:
        await until(lambda: client.epoch is not None)
    finally:
        reserved.process.kill()


async def test_a_second_process_under_one_id_makes_the_first_register_again(coordinator, opened):
    first = member(coordinator, opened)
    await until(lambda: first.epoch is not None)
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        reply = await http.post(f"{coordinator.url}/v1/instances", content=msgspec.json.encode(register()))
    assert reply.json()["epoch"] > first.epochs[0]
    await until(lambda: len(first.epochs) == 2)
    assert first.epochs[1] > reply.json()["epoch"]


async def test_a_poller_hears_each_new_version_and_keeps_the_last_list(coordinator, opened):
    for _ in range(ATTEMPTS):  # a coordinator that stands still does not answer the first time
        lists = []
        poller = MembershipPoller(coordinator.url, interval_ms=20, on_list=lists.append)
        opened.append(poller)
        poller.open()
        await asyncio.wait_for(poller.asked.wait(), 30)
        if poller.reachable:
            break
    assert len(lists) == 1, "who waits for the first answer has its list"
    member(coordinator, opened)
    await until(lambda: len(lists) > 1 and lists[-1].instances)
    versions = [one.version for one in lists]
    assert versions == sorted(set(versions))
    coordinator.process.kill()
    await until(lambda: not poller.reachable)
    assert poller.last.instances[0].instance == "prefill-0"


async def test_who_waits_for_a_pollers_first_answer_is_not_held_up_by_an_absent_coordinator(opened):
    poller = MembershipPoller("http://127.0.0.1:9", on_list=lambda found: None)
    opened.append(poller)
    poller.open()
    await asyncio.wait_for(poller.asked.wait(), 30)
    assert not poller.reachable
    assert poller.last is None


async def test_keys_are_asked_of_members(opened, redis):
    guarded = Coordinator("--redis-url", "", "--api-keys", "secret").start()
    try:
        outsider = member(guarded, opened)
        await until(lambda: "register_failed" in outsider.events)
        insider = member(guarded, opened, "decode-0", key="secret")
        await until(lambda: insider.epoch is not None)
        assert outsider.epoch is None
    finally:
        guarded.process.kill()


def test_sigterm_ends_it_with_status_0(coordinator):
    assert coordinator.process.stop() == 0


def test_a_wrong_setting_ends_it_with_status_2_and_the_nearest_right_one():
    process = ServiceProcess("services.coordinator", "--ttl", "3")
    status = process.process.wait(60)
    process.kill()
    assert status == 2
    assert "did you mean 'ttl-ms'" in "".join(process.lines)


@pytest.mark.parametrize(
    "broken",
    ["core.market.Market.tick", "market_shell.MarketShell._claim", "core.membership.Membership.tick"],
)
def test_a_bug_in_the_background_ends_the_process_that_would_say_it_is_well(redis, broken):
    module, kind, name = broken.rsplit(".", 2)
    words = f"""
import importlib, sys
from services.coordinator import __main__ as main
from shared.observe import service
kind = importlib.import_module("services.coordinator.{module}").{kind}
def bug(*_, **__):
    raise KeyError("our bug")
kind.{name} = bug
sys.exit(service.main("coordinator", main.config.load, main.run))
"""
    flags = ("--listen", "127.0.0.1:0", "--redis-url", redis.url)
    ended = subprocess.run(
        [sys.executable, "-c", words, *flags], capture_output=True, timeout=60, check=False
    )
    assert ended.returncode == EXIT_BUG
    assert b"our bug" in ended.stderr


async def test_who_never_sends_a_whole_request_is_cut_off_and_who_is_idle_between_two_is_not(monkeypatch):
    monkeypatch.setattr(TimedProtocol, "REQUEST_S", 1.0)
    core = Shell(CoordinatorSettings(redis_url=""), MonotonicClock(), url="http://c")
    listener = bind("127.0.0.1:0")
    server = server_of(create_app(core, []))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    get, post = b"GET /health HTTP/1.1\r\nhost: c\r\n\r\n", b"POST /v1/instances HTTP/1.1\r\nhost: c\r\n"

    async def answers(*pieces, ends=True):
        """Of one connection: how many came before it was closed."""
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        count = 0
        for piece in pieces:
            writer.write(piece)
            if piece == get:
                count += b"200 OK" in await reader.readuntil(b"}")
                await asyncio.sleep(0 if ends else 1.5 * TimedProtocol.REQUEST_S)
        assert not ends or not await reader.read()
        writer.close()
        await writer.wait_closed()
        return count

    begun = [(), (get[:9],), (post + b"content-length: 9\r\n\r\n{",), (get, get[:9]), (get, b"\r\n")]
    try:
        async with asyncio.timeout(25):  # before uvicorn ends who is idle
            counts = await asyncio.gather(
                *(answers(*pieces) for pieces in begun), answers(get, get, ends=False)
            )
    finally:
        server.should_exit = True
        await task
    assert counts == [0, 0, 0, 1, 1, 2]


async def test_who_reads_no_answers_is_cut_off_and_who_reads_slowly_is_not(monkeypatch):
    monkeypatch.setattr(main, "UNREAD_S", 1.5)
    listener = bind("127.0.0.1:0")
    core = Shell(CoordinatorSettings(redis_url=""), MonotonicClock(), url="http://c")
    server = server_of(create_app(core, ["a key"]))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    loop, open_now = asyncio.get_running_loop(), server.server_state.connections
    clients = [socket.socket() for _ in range(2)]
    try:
        for each in clients:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            each.setblocking(False)
            await loop.sock_connect(each, listener.getsockname())
            await loop.sock_sendall(each, b"GET /openapi.json HTTP/1.1\r\nhost: c\r\n\r\n" * 400)
        await until(lambda: sum(each.transport.get_write_buffer_size() > 1 << 16 for each in open_now) == 2)
        async with asyncio.timeout(30):
            while len(open_now) > 1:
                assert await loop.sock_recv(clients[0], 1 << 16)
                await asyncio.sleep(0.05)
        for _ in range(10):
            assert await loop.sock_recv(clients[0], 1 << 16)
            await asyncio.sleep(0.2)
        assert len(open_now) == 1
    finally:
        for each in clients:
            each.close()
        server.should_exit = True
        await task


def test_it_may_have_as_many_connections_as_the_system_lets_it():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] // 2, before[1]))  # what it is started with
    try:
        started = Coordinator("--redis-url", "").start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    try:
        soft, hard = resource.prlimit(started.process.process.pid, resource.RLIMIT_NOFILE)
        assert soft == hard
    finally:
        started.process.kill()
