"""The scheduler as a process: placements over ZeroMQ, death, fencing, kill -9 and re-learning."""

import asyncio
import signal
import time
from contextlib import suppress

import pytest

from shared.errors import PeerGone
from shared.free_ports import free_ports
from shared.transport.zmq_channel import DealerLink
from shared.wire.placement import FROM_SCHEDULER, TO_SCHEDULER, Ended, Placed, Rejected
from shared.wire.reports import REPORT_REPLIES, REPORTS, Goodbye, Refused, Resync, ServedElsewhere, Welcome
from tests.support.control_plane import ServiceProcess, get_json, hello, place, report, until, until_async
from tests.support.quickest import quickest_s

INTERVAL_S = 0.1
PATIENT = ("--dead-after-ms", "30000")  # where the test is not about silence


class Scheduler:
    """A process that can be killed and started again on the same addresses."""

    def __init__(self, *flags):
        self.flags = flags
        self.process = None
        ports = free_ports(3)  # that it has again after its death
        self.place, self.report = (f"tcp://127.0.0.1:{port}" for port in ports[:2])
        self.admin = f"127.0.0.1:{ports[2]}"

    def start(self):
        self.process = ServiceProcess(
            "services.scheduler", "--listen", self.place, "--report-listen", self.report,
            "--admin-listen", self.admin, "--report-interval-ms", "100", *self.flags,
        )  # fmt: skip
        found = self.process.wait_log("listening")
        self.place, self.report, self.admin = found["place"], found["report"], found["admin"]


@pytest.fixture
def scheduler(request):
    started = Scheduler(*getattr(request, "param", PATIENT))
    started.start()
    yield started
    started.process.kill()


class Gateway:
    def __init__(self, address):
        self.answers = {}
        self.num_lost = 0  # connections
        self.link = DealerLink(
            address, out=TO_SCHEDULER, into=FROM_SCHEDULER, on_message=self._on_message, on_down=self._on_down
        )

    def _on_message(self, _seq, message, _raw):
        self.answers[message.request_id, message.attempt] = message

    def _on_down(self):
        self.num_lost += 1

    async def place(self, request, **more):
        """The answer. Asked again where this process stood still for so long that the connection was given up."""
        message = place(request, **more)
        self.answers.pop((request, 1), None)
        while (request, 1) not in self.answers:
            await until(lambda: self.link.up)
            num_lost = self.num_lost
            self.link.send(message)
            await until(lambda: (request, 1) in self.answers or self.num_lost != num_lost)  # noqa: B023
        return self.answers[request, 1]


class Worker:
    """Says Hello when asked, reports on."""

    def __init__(self, address, name, role, epoch=1):
        self.told = hello(name, epoch, role)
        self.replies = []
        self.seq = 0
        self.reported_s = 0.0  # when it last did
        self.reporting = True
        self.served = {}
        self.link = DealerLink(
            address, out=REPORTS, into=REPORT_REPLIES, on_message=self._on_message, on_up=self._say_hello
        )
        self.link.open()
        self.task = asyncio.create_task(self._report())

    def _say_hello(self):
        self.link.send(self.told)

    def _on_message(self, _seq, message, _raw):
        self.replies.append(message)
        if isinstance(message, Resync):
            self._say_hello()

    async def _report(self):
        while True:
            await asyncio.sleep(INTERVAL_S)
            if self.reporting and self.link.up:
                try:
                    self.link.send(report(self.told.instance, self.told.epoch, self.seq, served=self.served))
                except PeerGone:
                    continue
                self.seq += 1
                self.reported_s = time.monotonic()

    def close(self):
        self.task.cancel()
        self.link.close()


@pytest.fixture
async def cluster(scheduler):
    """A gateway, a prefill and a decode worker, connected and welcome."""
    gateway = Gateway(scheduler.place)
    workers = [Worker(scheduler.report, "p0", "prefill"), Worker(scheduler.report, "d0", "decode")]
    await gateway.link.connect(30_000)
    await until(lambda: all(w.replies for w in workers))
    assert all(isinstance(w.replies[0], Welcome) for w in workers)
    yield gateway, workers
    for worker in workers:
        worker.close()
    gateway.link.close()


async def test_a_request_is_placed_on_the_pair_and_its_load_given_back(scheduler, cluster):
    gateway, _ = cluster
    placed = await gateway.place("r1", hits={"p0": 64})
    assert isinstance(placed, Placed)
    assert (placed.kind, placed.prefill.instance, placed.decode.instance) == ("disaggregated", "p0", "d0")
    assert placed.prefill_hit_tokens == 64
    status = await asyncio.to_thread(get_json, f"http://{scheduler.admin}/status")
    assert {i["instance"]: i["live"] for i in status["instances"]} == {"p0": True, "d0": True}
    assert status["num_open"] == 1

    async def is_given_back():
        with suppress(PeerGone):  # or it is lost with the connection, where this process stood still
            gateway.link.send(Ended(request_id="r1", attempt=1))
        await gateway.place("r2")
        status = await asyncio.to_thread(get_json, f"http://{scheduler.admin}/status")
        return status["num_open"] == 1

    await until_async(is_given_back)


@pytest.mark.parametrize("scheduler", [()], indirect=True)
async def test_a_silent_worker_gets_nothing_after_1500_ms(scheduler, cluster):
    gateway, (prefill, _) = cluster

    async def all_live():
        status = await asyncio.to_thread(get_json, f"http://{scheduler.admin}/status")
        return all(instance["live"] for instance in status["instances"])

    await until_async(all_live)  # also where this process has just stood still
    prefill.reporting = False

    async def is_alone():
        answer = await gateway.place("r1")
        is_placed = isinstance(answer, Placed) and answer.kind != "disaggregated"
        return is_placed and answer.decode.instance == "d0"

    await until_async(is_alone)
    assert time.monotonic() - prefill.reported_s > 1.0


@pytest.mark.parametrize("scheduler", [("--dead-after-ms", "400")], indirect=True)
async def test_a_stopped_scheduler_that_goes_on_places_on_all_that_report(scheduler, cluster):
    """What it read first after a pause used to be placed as if nobody had reported meanwhile: every time.

    A busy machine may silence the workers themselves, or the link, in some of the rounds.
    """
    gateway, _ = cluster

    async def stop_and_ask(name):
        scheduler.process.process.send_signal(signal.SIGSTOP)
        asking = asyncio.create_task(gateway.place(name))
        await asyncio.sleep(0.6)
        scheduler.process.process.send_signal(signal.SIGCONT)
        return await asyncio.wait_for(asking, 5)

    kinds = []
    for number in range(5):
        await until(lambda: gateway.link.up)
        try:
            answer = await stop_and_ask(f"r{number}")
        except (TimeoutError, PeerGone) as error:
            answer = error
        kinds.append(answer.kind if isinstance(answer, Placed) else answer)
    assert kinds.count("disaggregated") >= 3, kinds


@pytest.mark.parametrize("scheduler", [("--dead-after-ms", "60000")], indirect=True)
async def test_a_goodbye_works_at_once(scheduler, cluster):
    gateway, (prefill, decode) = cluster
    for worker in (prefill, decode):
        worker.reporting = False
        worker.link.send(Goodbye(instance=worker.told.instance, epoch=1))

    async def is_nobody_left():
        return isinstance(await gateway.place("r2"), Rejected)

    await until_async(is_nobody_left)
    assert gateway.answers["r2", 1].code == "no_instance"


async def test_instances_of_a_role_hear_what_the_others_have_served(scheduler, cluster):
    other = Worker(scheduler.report, "d1", "decode")
    workers = [*cluster[1], other]
    for number, worker in enumerate(workers):
        worker.served = {"tenant": number + 1}
    expected = [ServedElsewhere(served={name: {"tenant": n}}) for name, n in (("d1/1", 3), ("d0/1", 2))]
    for worker, wanted in zip(workers[1:], expected, strict=True):
        await until(lambda worker=worker, wanted=wanted: wanted in worker.replies)
    assert not any(isinstance(reply, ServedElsewhere) for reply in workers[0].replies)
    other.close()


async def test_a_stale_epoch_is_refused_on_the_wire(scheduler, cluster):
    gateway, workers = cluster
    newer = Worker(scheduler.report, "d0", "decode", epoch=7)
    workers.append(newer)
    await until(lambda: any(isinstance(r, Refused) for r in workers[1].replies))
    assert (await gateway.place("r1")).decode.epoch == 7
    refused = next(r for r in workers[1].replies if isinstance(r, Refused))
    assert refused.code == "epoch.stale"


async def test_a_killed_scheduler_relearns_its_instances_within_a_report_interval_of_the_reconnect(
    scheduler, cluster
):
    gateway, workers = cluster
    for worker in workers:
        worker.link._on_up = None  # reconnect silently: only Resync can ask for the Hello

    async def attempt():
        first = await gateway.place("r0")
        scheduler.process.kill()
        await until(lambda: not gateway.link.up and not any(w.link.up for w in workers))
        for worker in workers:
            worker.replies.clear()
        scheduler.start()
        await until(lambda: gateway.link.up and all(w.link.up for w in workers))
        start = time.monotonic()
        while isinstance(answer := await gateway.place("r1"), Rejected) or answer.kind != "disaggregated":
            assert time.monotonic() - start < 30
            await asyncio.sleep(0.01)
        assert answer.handoff_id != first.handoff_id
        assert all(any(isinstance(r, Resync) for r in w.replies) for w in workers)
        return time.monotonic() - start

    bar_s = 4 * INTERVAL_S + 1.0
    assert await quickest_s(attempt, bar_s) < bar_s


async def test_rubbish_on_the_sockets_is_dropped(scheduler, cluster):
    gateway, _ = cluster
    for _ in range(3):
        gateway.link._peer.send([b"quire.place/1", b"\0" * 8, b"\x81\xa1x\x01"])
        gateway.link._peer.send([b"x"])
    assert (await gateway.place("r1")).kind == "disaggregated"


def test_sigterm_ends_it_with_status_0(scheduler):
    assert scheduler.process.stop() == 0


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--polcy", "x"), "did you mean 'policy'"),
        (("--policy", "random"), "scheduler.policy"),
        (("--listen", "tcp://nowhere.invalid:1"), "nowhere.invalid"),
        (("--dead-after-ms", "100"), "dead_after_ms"),
    ],
)
def test_a_wrong_setting_ends_it_with_status_2_and_its_name(flags, word):
    process = ServiceProcess("services.scheduler", "--admin-listen", "127.0.0.1:0", *flags)
    status = process.process.wait(60)
    process.kill()
    assert status == 2
    assert word in "".join(process.lines)
