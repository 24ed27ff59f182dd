"""What simulated instances say to the scheduler's core: Hello first, then reports at their interval and soon after a
change."""

import math
from collections.abc import Callable, Sequence

from loadtest.simulator.engine import Engine
from loadtest.simulator.events import EventQueue
from loadtest.simulator.links import Links, as_told
from loadtest.simulator.prices import StepPrices
from loadtest.simulator.spec import ClusterSpec
from services.scheduler.core.instances import Instances
from shared.engine.worker_reports import SOON_MS
from shared.ids import Epoch, InstanceId
from shared.kv.layout import EngineDescription
from shared.wire.reports import Hello, PoolPlace, Report

MODEL = "simulated"
REPORT_PHASES = 10  # instances report in turns within an interval
IDLE_MS = 10_000.0  # without a request, and until anything happens: so long a pause is passed over
EPOCH = Epoch(1)


class Reports:
    """Args: heard: called behind every report, and ten times an interval. num_open: requests without an outcome.

    Of a long pause without requests the rounds are passed over but for the last ones: nothing changes in between, and
    whoever hears the last ones knows what they would have known.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        events: EventQueue,
        prices: StepPrices,
        engines: Sequence[Engine],
        instances: Instances,
        links: Links,
        heard: Callable[[], None],
        num_open: Callable[[], int],
    ) -> None:
        self.names = [InstanceId(f"{role}-{n}") for n, role in enumerate(spec.roles)]
        self.description = EngineDescription(
            model=MODEL, fingerprint=MODEL, dtype="bfloat16", layout="layers-blocks", backend="simulated",
            block_tokens=spec.block_tokens, max_model_len=1 << 30,
            block_bytes=spec.block_tokens * prices.kv_bytes_per_token,
        )  # fmt: skip
        self._spec, self._events, self._prices = spec, events, prices
        self._engines, self._instances, self._links = engines, instances, links
        self._heard, self._num_open = heard, num_open
        self._passed_ms = 0.0  # by the rounds from the last one of phase 0 on
        self._rates = {name: as_told(getattr(spec, name)) for name in ("peer", "remote", "dram")}
        self._places = [self._place_of(number) for number in range(len(engines))]
        self._seqs = [0] * len(engines)
        self._due = [False] * len(engines)

    def begin(self) -> None:
        """All instances are there from now on."""
        for engine in self._engines:
            self._instances.hello(self._hello(engine.number), now_ms=self._now())
            self._report(engine.number)
        interval_ms = self._spec.instances.report_interval_ms
        for phase in range(REPORT_PHASES):
            self._events.tick_at(interval_ms * (1 + phase / REPORT_PHASES), self._round, phase)

    def soon(self, number: int) -> None:
        """Something changed there."""
        if not self._due[number]:
            self._due[number] = True
            self._events.after(SOON_MS, self._report, number)

    def _hello(self, number: int) -> Hello:
        limits = self._spec.limits
        return Hello(
            instance=self.names[number],
            epoch=EPOCH,
            role=self._spec.roles[number],
            endpoint=f"simulated:{number}",
            description=self.description,
            max_running=limits.max_running,
            max_batched_tokens=limits.max_batched_tokens,
            num_kv_blocks=self._spec.memory_tokens // self._spec.block_tokens,
            cost=self._prices.coefficients,
            sends_ahead=self._spec.sends_ahead(number),
        )

    def _round(self, phase: int) -> None:
        numbers = range(phase, len(self._engines), REPORT_PHASES)
        if phase == 0:
            if self._passed_ms:
                numbers = range(len(self._engines))  # nobody was silent meanwhile
            self._passed_ms = self._pause_ms()
        for number in numbers:
            self._report(number)
        self._instances.tick(now_ms=self._now())
        self._heard()
        wait_ms = self._spec.instances.report_interval_ms + self._passed_ms
        self._events.tick_at(self._events.now_ms + wait_ms, self._round, phase)

    def _pause_ms(self) -> float:
        """That can be passed over, whole intervals: one is left for the rounds before anything happens."""
        wait_ms, interval_ms = (
            self._events.next_ms - self._events.now_ms,
            self._spec.instances.report_interval_ms,
        )
        if self._num_open() or not IDLE_MS <= wait_ms < math.inf:
            return 0.0
        return (wait_ms // interval_ms - 2) * interval_ms

    def _report(self, number: int) -> None:
        engine = self._engines[number]
        self._due[number] = False
        if engine.dead:
            return
        self._seqs[number] += 1
        report = Report(
            instance=self.names[number],
            epoch=EPOCH,
            seq=self._seqs[number],
            **engine.told(),
            links=self._rates,
            pool=self._places[number],
            prefill_correction=self._prices.prefill_correction,
            decode_correction=self._prices.decode_correction,
            num_prefills_measured=self._seqs[number],  # always new ones: they do not fade
            num_decodes_measured=self._seqs[number],
        )
        self._instances.report(report, now_ms=self._now())
        self._heard()

    def _place_of(self, number: int) -> PoolPlace:
        """Each instance has a space of its own in its host's mempool; one for all where nothing moves on a host."""
        host = self._links.host_of(number)
        space = number if self._spec.peer.bytes_per_ms else host
        return PoolPlace(Epoch(host + 1), Epoch(space + 1), f"host-{host}")

    def _now(self) -> int:
        return int(self._events.now_ms)
