"""The life of a worker process around its engine: start, membership, serving, drain, end.

    STARTING -(engine ready, ROUTER bound)-> JOINING -(coordinator gave an epoch)-> INTRODUCED
    INTRODUCED -(scheduler said Welcome, or INTRODUCTION_S passed without one)-> SERVING
    SERVING -(SIGTERM)-> DRAINING -(nothing in flight, or the deadline)-> closed, exit 0
    any -(engine died, or hangs)-> in-flight requests fail, exit 1
    any -(our bug: a broken invariant, or a background task that ended)-> in-flight requests fail, exit 70

Whoever fails goes within END_LIMIT_S, and what it held of the mempool's pages is released, or goes with its connection.

Requests are served from INTRODUCED on; whoever waits for /ready may count on being placed here.
Losing the coordinator, the scheduler, Redis or the mempool after SERVING changes nothing for requests.
"""

import asyncio
import dataclasses
import signal
from typing import Any, Protocol

from shared.background_task import begin_task
from shared.engine.calibration import calibrate
from shared.engine.engine_watch import EngineWatch
from shared.engine.interface import CacheEvent, Engine, EngineLoad
from shared.engine.worker_attempt import AttemptContext
from shared.engine.worker_checks import WorkerLimits
from shared.engine.worker_config import WorkerSettings, sends_ahead
from shared.engine.worker_cost import WorkerCost
from shared.engine.worker_front import WorkerFront
from shared.engine.worker_kv import KvMemory
from shared.engine.worker_pages import PageClient, PromptPages
from shared.engine.worker_reports import SchedulerReports
from shared.engine.worker_room import DecodeRoom
from shared.errors import Draining, InvariantBroken
from shared.ids import Epoch, InstanceId
from shared.observe import metrics
from shared.observe.admin import AdminServer
from shared.observe.log import get_logger
from shared.observe.service import end_on_lost_task
from shared.transport.heap import settle_heap
from shared.vital_thread import EXIT_BUG
from shared.wire.reports import Hello, Role

_log = get_logger("worker")
EXIT_OK = 0
EXIT_ENGINE_DIED = 1
WATCH_INTERVAL_S = 0.25
SILENT_MS = (120_000, 600_000)  # engine_silent_ms on a GPU, and on a CPU
INTRODUCTION_S = 3.0  # an absent scheduler keeps no worker from being ready: it learns of it when it is back
END_LIMIT_S = 20.0  # after a failure; who is told to end has drain_deadline_ms, too
LAST_WORDS_S = 0.1  # for replies to leave the socket before it closes
DEREGISTER_TIMEOUT_S = 1.0


class Membership(Protocol):
    """What the shell asks of the membership client, ready made by the wiring."""

    @property
    def registered(self) -> bool: ...

    @property
    def problem(self) -> str: ...

    def start(self, endpoint: str) -> None: ...

    def register_again(self) -> None: ...

    async def leave(self) -> None: ...


class CachePublisher(Protocol):
    """Writes this instance's cache events to the prompt tree."""

    @property
    def in_sync(self) -> bool: ...

    def publish(self, event: CacheEvent) -> None: ...

    def set_epoch(self, epoch: Epoch) -> None: ...

    async def close(self) -> None: ...


class WorkerShell:
    """One per process; run() is its whole life. The wiring sets `membership` and `publisher` before run()."""

    def __init__(
        self, settings: WorkerSettings, engine: Engine, pages: PageClient | None, vocab_size: int
    ) -> None:
        assert settings.role, "for_role() sets it"
        self.settings = settings
        self.role: Role = settings.role
        self.engine = engine
        self.membership: Membership | None = None
        self.publisher: CachePublisher | None = None
        self.epoch = Epoch(0)
        self.endpoint = settings.advertise or settings.listen
        limits = WorkerLimits(vocab_size, engine.description.max_model_len, settings.max_inflight)
        self.cost = WorkerCost()
        self._vocab_size = vocab_size
        self.reports = SchedulerReports(
            settings,
            hello=self._hello,
            load=lambda: self.load(prompts=False),
            cost=self.cost,
            on_stale=self._register_again,
            on_welcome=self._serve,
            pool=lambda: self.pages.place,
            links=lambda: self.pages.links,
            on_served=engine.served_elsewhere,
            room=lambda: self.room.now,
        )
        self.front = WorkerFront(
            settings.listen, limits, self.reports.report_soon, settings.gateway_silent_ms
        )
        pool = pages if engine.uses_pool else None
        self.pages = PromptPages(
            pool, engine.description, settings, kept=engine.keeps_leases, compute_ms=self.cost.compute_ms
        )
        self.room = DecodeRoom(engine, self.pages, settings)
        self.kv = KvMemory(engine, self.pages)
        limit_ms = settings.engine_silent_ms or SILENT_MS[engine.device in ("cpu", "mock")]
        self.watch = EngineWatch(engine.ping, limit_ms / 1000, self._on_engine_died)
        self.admin = AdminServer(settings.admin_listen, ready=self.ready, status=self.status)
        self._phase = "starting"
        self._stopped = asyncio.Event()
        self._exit_code = EXIT_OK
        self._gauges = {
            name: metrics.gauge(f"quire_worker_{name}", text)
            for name, text in (
                ("running_requests", "In the engine's batch."),
                ("waiting_requests", "Accepted and not running."),
                ("kv_used_ratio", "Share of the engine's KV pages that requests use."),
                ("step_ms", "Engine step, smoothed."),
                ("epoch", "Epoch that the coordinator granted."),
                ("preempted", "Times that a running request gave its slot up, since the start."),
                (
                    "kept_tokens",
                    "KV that stayed for requests that gave their slots up, in tokens, each time.",
                ),
                ("recomputed_tokens", "Tokens computed again, where requests take turns."),
                ("swapped_out_bytes", "KV of requests without a slot that left, since the start."),
                ("swapped_in_bytes", "KV that came back to such requests."),
                ("swap_lost_blocks", "Blocks that did not come back: computed again."),
            )
        }

    # -- life ---------------------------------------------------------------------------------------

    async def run(self) -> int:
        """The exit code. Raises: SettingsError when an address is taken or the engine cannot start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        lost: asyncio.Future[int] = loop.create_future()
        lost.add_done_callback(lambda _: self._on_invariant_broken("a background task ended by a bug"))
        end_on_lost_task("worker", lost)
        await self.admin.start()
        await self.engine.start()
        await self._calibrate()
        context = AttemptContext(
            instance=InstanceId(self.settings.instance),
            settings=self.settings,
            engine=self.engine,
            pages=self.pages,
            outbox=self.front.outbox,
            on_engine_died=self._on_engine_died,
            on_invariant_broken=self._on_invariant_broken,
            cost=self.cost,
            room=self.room,
        )
        self.room.open()
        self.kv.open()
        settle_heap()
        address = await self.front.start(context)
        self.endpoint = self.settings.advertise or address
        if self.publisher is not None:
            self.engine.on_cache_event(self.publisher.publish)
        self.reports.start()
        if self._phase == "starting":
            self._phase = "joining"
        _log.info("worker_listens", endpoint=self.endpoint, role=self.role, admin=self.admin.address)
        if self.membership is not None:
            self.membership.start(self.endpoint)
        watches = [
            begin_task(self._watch_engine(), "engine-watch"),
            begin_task(self.watch.run(), "engine-pings"),
        ]
        await self._stopped.wait()
        for watch in watches:
            watch.cancel()
        try:
            async with asyncio.timeout(END_LIMIT_S if self._exit_code != EXIT_OK else None):
                await self._end()
        except Exception as error:
            if self._exit_code == EXIT_OK:
                raise
            _log.error("end_failed", error=repr(error), exc_info=error)
        _log.info("worker_ended", exit_code=self._exit_code)
        return self._exit_code

    def set_epoch(self, epoch: Epoch) -> None:
        """The coordinator granted a (new) epoch: serve under it."""
        self.epoch = self.front.epoch = epoch
        self._gauges["epoch"].set(epoch)
        if self._phase == "joining":
            self._phase = "introduced"
            asyncio.get_running_loop().call_later(INTRODUCTION_S, self._serve)
        self.reports.set_epoch(epoch)
        if self.publisher is not None:
            self.publisher.set_epoch(epoch)
        _log.info("registered", epoch=epoch)

    def _serve(self) -> None:
        if self._phase == "introduced":
            self._phase = "serving"

    async def _calibrate(self) -> None:
        """Learn the engine's speed, unless the process is told to end meanwhile."""
        profile = asyncio.create_task(calibrate(self.engine, self.settings, self._vocab_size))
        stop = asyncio.create_task(self._stopped.wait())
        await asyncio.wait((profile, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        profile.cancel()
        await asyncio.wait((profile, stop))
        if not profile.cancelled():
            self.cost.use(profile.result())
        self.engine.on_step(self.cost.on_step)

    async def _watch_engine(self) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if not self.engine.alive:
                self._on_engine_died("the engine's process ended")
            elif self.engine.keeps_leases and self.pages.memory_replaced:
                self._on_engine_died("the mempool has new memory: the engine's cache is no longer part of it")
            self._update_gauges()

    async def _end(self) -> None:
        """Goodbye, finish or fail what is in flight, leave, close."""
        self.front.draining = True
        self.reports.goodbye()
        if self._exit_code == EXIT_OK and not await self.front.drained(
            self.settings.drain_deadline_ms / 1000
        ):
            _log.warning("drain_deadline_passed", num_inflight=self.front.num_inflight)
        self.front.fail_all("the instance has shut down", Draining)
        await asyncio.sleep(LAST_WORDS_S)
        if self.membership is not None:
            try:
                async with asyncio.timeout(DEREGISTER_TIMEOUT_S):
                    await self.membership.leave()
            except TimeoutError:
                _log.warning("deregister_timed_out")
        self.front.close()
        self.reports.close()
        await self.room.close()
        await self.kv.close()
        if self.publisher is not None:
            await self.publisher.close()
        await self.engine.close()
        await self.admin.stop()

    def _on_signal(self) -> None:
        if self._phase == "draining":  # asked twice: now
            self.front.fail_all("the instance was told twice to shut down", Draining)
            return
        self._phase = "draining"
        _log.info("draining", num_inflight=self.front.num_inflight)
        self._stopped.set()

    def _on_engine_died(self, reason: str) -> None:
        if self._exit_code != EXIT_OK:
            return
        _log.error("engine_died", reason=reason)
        self._exit_code = EXIT_ENGINE_DIED
        self._phase = "failed"
        self.front.fail_all("the engine died")
        self._stopped.set()

    def _on_invariant_broken(self, reason: str) -> None:
        self._exit_code = EXIT_BUG
        self._phase = "failed"
        self._stopped.set()  # first: what follows may meet the same bug
        _log.error("invariant_broken", code=InvariantBroken.code, reason=reason)
        self.front.fail_all("the instance stops after an internal error")
        _log.error("state", **self.status())

    def _register_again(self) -> None:
        if self.membership is not None:
            self.membership.register_again()

    # -- what others ask ------------------------------------------------------------------------------

    def load(self, *, prompts: bool = True) -> EngineLoad:
        """The engine's load, with what waits in front of it and what leases pin for it. Without `prompts`: as the
        scheduler is told, who counts prompts itself until they are said to have come into the engine."""
        seen = self.engine.load()
        waiting = seen.num_waiting + self.front.num_waiting(prompts=prompts)
        return dataclasses.replace(seen, num_waiting=waiting, kv_used_share=self.kv.used_share(seen))

    def _hello(self, epoch: Epoch) -> Hello:
        return Hello(
            instance=InstanceId(self.settings.instance),
            epoch=epoch,
            role=self.role,
            endpoint=self.endpoint,
            description=self.engine.description,
            max_running=self.engine.max_running,
            max_batched_tokens=self.engine.max_batched_tokens,
            num_kv_blocks=self.engine.num_kv_blocks,
            cost=self.cost.coefficients,
            sends_ahead=sends_ahead(self.settings),
        )

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """Ready: the engine runs, the coordinator has given an epoch, the scheduler was told of it."""
        is_ready = self._phase == "serving" and self.engine.alive and not self.watch.is_suspect
        return is_ready, {
            "phase": self._phase,
            "in_flight": self.front.num_inflight,
            "engine_silent_s": round(self.watch.silent_s, 1),
            "instance": self.settings.instance,
            "role": self.role,
            "epoch": self.epoch,
            "registered": self.membership is not None and self.membership.registered,
            "coordinator_problem": self.membership.problem if self.membership is not None else "",
            "scheduler": "welcomed" if self.reports.welcomed else "up" if self.reports.up else "down",
            "scheduler_problem": self.reports.refusal,
            "mempool": "connected" if self.pages.usable else "none",
            "prompt_tree": "none"
            if self.publisher is None
            else "in_sync"
            if self.publisher.in_sync
            else "behind",
        }

    def status(self) -> dict[str, Any]:
        """Everything that a person may ask about this worker."""
        load = self.load()
        _, state = self.ready()
        return {
            **state,
            "endpoint": self.endpoint,
            "model": self.engine.description.model,
            "fingerprint": self.engine.description.fingerprint,
            "content_key": self.engine.description.content_key,
            "num_inflight": self.front.num_inflight,
            "num_accepted": self.front.num_accepted,
            "num_gateways": self.front.num_gateways,
            "num_leases": self.pages.num_leases,
            "num_running": load.num_running,
            "num_waiting": load.num_waiting,
            "unfinished_prefill_tokens": load.unfinished_prefill_tokens,
            "running_context_tokens": load.running_context_tokens,
            "kv_used_share": load.kv_used_share,
            **self.kv.status(load),
            "step_ms": load.step_ms,
            "num_preempted": load.num_preempted,
            "num_kept_tokens": load.num_kept_tokens,
            "num_recomputed_tokens": load.num_recomputed_tokens,
            "swapped_out_bytes": load.swapped_out_bytes,
            "swapped_in_bytes": load.swapped_in_bytes,
            "swap_lost_blocks": load.swap_lost_blocks,
            "fair_counts": dict(load.fair_counts),
            "max_batched_tokens": self.engine.max_batched_tokens,
            "max_num_seqs": self.engine.max_running,
            "pd_caching": self.settings.pd_caching,
            "num_kv_blocks": self.engine.num_kv_blocks,
            "block_tokens": self.engine.description.block_tokens,
            "block_bytes": self.engine.description.block_bytes,
            "tensor_parallel": self.engine.description.tp_size,
            "messages_sent": self.front.outbox.num_messages,
            "chunks_sent": self.front.outbox.num_chunks,
            "cost": self.cost.status(),
            "links": self.pages.links_status(),
        }

    def _update_gauges(self) -> None:
        load = self.load()
        self._gauges["running_requests"].set(load.num_running)
        self._gauges["waiting_requests"].set(load.num_waiting)
        self._gauges["kv_used_ratio"].set(load.kv_used_share)
        self._gauges["preempted"].set(load.num_preempted)
        self._gauges["kept_tokens"].set(load.num_kept_tokens)
        self._gauges["recomputed_tokens"].set(load.num_recomputed_tokens)
        for name in ("swapped_out_bytes", "swapped_in_bytes", "swap_lost_blocks"):
            self._gauges[name].set(getattr(load, name))
        self._gauges["step_ms"].set(load.step_ms)
        self.pages.update_gauges()
