"""The worker's line to the scheduler: Hello, then a Report every interval and soon after every large change.

The scheduler may come, go and forget: the link reconnects by itself and Resync brings a new Hello. Nothing
here waits, and no failure here touches a request.
"""

import asyncio
from collections.abc import Callable

from shared.engine.interface import EngineLoad
from shared.engine.worker_config import WorkerSettings
from shared.engine.worker_cost import WorkerCost
from shared.errors import Overloaded, PeerGone, PeerProtocolError, StaleEpoch
from shared.ids import Epoch, InstanceId
from shared.observe import metrics
from shared.observe.log import get_logger
from shared.observe.malformed import MalformedLog
from shared.transport.zmq_channel import DealerLink
from shared.wire.cost import LinkRate
from shared.wire.reports import (
    REPORT_REPLIES,
    REPORTS,
    Goodbye,
    Hello,
    PoolPlace,
    Refused,
    Report,
    Resync,
    Room,
    SchedulerToWorker,
    ServedElsewhere,
    Welcome,
    WorkerToScheduler,
)

_log = get_logger("worker.reports")
SOON_MS = 20  # changes within this long share one report


class SchedulerReports:
    """Args:
    hello: the introduction under an epoch.
    load: cheap; called for every report.
    cost: what the worker knows of its speed.
    on_stale: the scheduler knows a larger epoch of this instance: register again.
    pool: where the instance's pages lie; links: how fast they came from elsewhere.
    on_welcome: the scheduler knows this instance and has its first report.
    on_served: tokens by tenant of other instances, by instance.
    room: in the engine's pages.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        hello: Callable[[Epoch], Hello],
        load: Callable[[], EngineLoad],
        cost: WorkerCost,
        on_stale: Callable[[], None],
        on_welcome: Callable[[], None] = lambda: None,
        pool: Callable[[], PoolPlace | None] = lambda: None,
        links: Callable[[], dict[str, LinkRate]] = dict,
        on_served: Callable[[dict[str, dict[str, int]]], None] = lambda _: None,
        room: Callable[[], Room | None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._hello = hello
        self._load = load
        self._cost = cost
        self._on_stale = on_stale
        self._on_welcome = on_welcome
        self._pool = pool
        self._links = links
        self._on_served = on_served
        self._room = room
        self._epoch = Epoch(0)
        self._seq = 0
        self._interval_s = settings.report_interval_ms / 1000
        self._link: DealerLink[WorkerToScheduler, SchedulerToWorker] = DealerLink(
            settings.scheduler_reports,
            out=REPORTS,
            into=REPORT_REPLIES,
            on_message=self._on_message,
            on_malformed=self._on_malformed,
            on_up=self._say_hello,
            on_down=self._on_down,
        )
        self._malformed = MalformedLog(
            _log, metrics.counter("quire_worker_malformed_total", "Messages that were no messages.")
        )
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.TimerHandle | None = None
        self._hello_at = 0.0
        self._is_asked = False  # for a Hello, by a Resync that came too soon behind the last one
        self.welcomed = False
        self.refusal = ""  # why the scheduler places nothing here, as it said last
        self.draining = False

    def start(self) -> None:
        """Begin to connect. Raises: SettingsError on a wrong address."""
        self._link.open()
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._tick)

    @property
    def up(self) -> bool:
        """The scheduler's socket answers; it may not have said Welcome yet."""
        return self._link.up

    def set_epoch(self, epoch: Epoch) -> None:
        """Introduce this instance under a new epoch."""
        self._epoch = epoch
        self._say_hello()

    def report_soon(self) -> None:
        """The load changed: do not wait for the next interval."""
        if self._soon is None and self.welcomed:
            self._soon = asyncio.get_running_loop().call_later(SOON_MS / 1000, self._report)

    def goodbye(self) -> None:
        """Place nothing more here."""
        self.draining = True
        if self._epoch:
            self._send(Goodbye(instance=InstanceId(self._settings.instance), epoch=self._epoch))

    def close(self) -> None:
        """Harmless when closed already."""
        for timer in (self._timer, self._soon):
            if timer is not None:
                timer.cancel()
        self._timer = self._soon = None
        self._link.close()

    def _send(self, message: WorkerToScheduler) -> bool:
        try:
            self._link.send(message)
        except (PeerGone, Overloaded):  # the link's state is in /ready, and a later report says it all again
            return False
        return True

    def _say_hello(self) -> None:
        self.welcomed = self._is_asked = False
        self._hello_at = asyncio.get_running_loop().time()
        if self._epoch and not self.draining:
            self._send(self._hello(self._epoch))

    def _on_down(self) -> None:
        self.welcomed = False
        self.refusal = ""
        _log.warning("scheduler_down", endpoint=self._link.endpoint)

    def _on_malformed(self, error: PeerProtocolError) -> None:
        self._malformed.note(f"the scheduler at {self._link.endpoint}", error)

    def _on_message(self, _seq: int, message: SchedulerToWorker, _raw: list[bytes]) -> None:
        match message:
            case Welcome():
                self.welcomed = True
                self.refusal = ""
                asked_s = message.report_interval_ms / 1000
                self._interval_s = min(self._settings.report_interval_ms / 1000, max(0.01, asked_s))
                _log.info("scheduler_welcomed", epoch=self._epoch)
                self._report()
                self._on_welcome()
            case ServedElsewhere():
                self._on_served(message.served)
            case Resync():
                self.welcomed, self._is_asked = False, True
                self._say_hello_if_due()
            case Refused():
                self.welcomed = False
                self.refusal = message.reason
                _log.warning("scheduler_refused", code=message.code, reason=message.reason)
                if message.code == StaleEpoch.code:
                    self._on_stale()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._interval_s, self._tick)
        if self.welcomed:
            self._report()
        elif self.up:
            self._say_hello_if_due()

    def _say_hello_if_due(self) -> None:
        """A scheduler that welcomes each Hello and wants another behind each report gets one an interval."""
        since_s = asyncio.get_running_loop().time() - self._hello_at
        if since_s > (self._interval_s if self._is_asked else self._settings.hello_timeout_ms / 1000):
            self._say_hello()

    def _report(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        load = self._load()
        self._cost.age()
        prefill, decode = (self._cost.corrections[kind] for kind in ("prefill", "decode"))
        report = Report(
            instance=InstanceId(self._settings.instance),
            epoch=self._epoch,
            seq=self._seq + 1,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            unfinished_prefill_tokens=load.unfinished_prefill_tokens,
            running_context_tokens=load.running_context_tokens,
            kv_used_share=load.kv_used_share,
            step_ms=load.step_ms,
            draining=self.draining,
            pool=self._pool(),
            links=self._links(),
            served=dict(load.served_tokens),
            room=self._room(),
            prefill_correction=round(prefill.factor, 4),
            decode_correction=round(decode.factor, 4),
            num_prefills_measured=prefill.num_observed,
            num_decodes_measured=decode.num_observed,
            queued_prefill_ms=round(self._cost.queued_prefill_ms, 3),
            arrived=list(self._cost.arrived),
        )
        if self._send(report):
            self._seq += 1
            self._cost.arrived.clear()
