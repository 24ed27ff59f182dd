"""The worker's ROUTER: gateways' messages in, attempts started and ended, replies out through the outbox."""

import asyncio
from collections.abc import Callable, Iterable

from shared.engine.worker_attempt import Attempt, AttemptContext
from shared.engine.worker_checks import Refusal, WorkerLimits, check_prompt, check_state, refusal
from shared.engine.worker_outbox import Outbox
from shared.errors import PeerGone, PeerProtocolError
from shared.ids import Epoch, RequestId
from shared.kv.packed_ids import PackedIds
from shared.observe import metrics
from shared.observe.log import get_logger
from shared.observe.malformed import MalformedLog
from shared.transport.zmq_channel import RouterServer
from shared.transport.zmtp_peer import HEARTBEAT_TIMEOUT_MS
from shared.wire.requests import (
    ALIVE_TIMEOUT_MS,
    TO_GATEWAY,
    TO_WORKER,
    Abort,
    Alive,
    Failed,
    GatewayToWorker,
    Generate,
    WorkerToGateway,
)

_log = get_logger("worker.front")
SWEEP_INTERVAL_MS = 500
SILENT = "silent"
MAX_GATEWAYS = 4096  # connections whose Alive is remembered; the quietest is forgotten first

Key = tuple[bytes, RequestId, int]  # connection, request, attempt


class WorkerFront:
    """Owns the listening socket and the attempts. Used only from the loop.

    Args:
        on_change: the load changed (an attempt began or ended).
        silent_ms: a gateway that answers no heartbeat for so long is lost.
    """

    def __init__(
        self,
        listen: str,
        limits: WorkerLimits,
        on_change: Callable[[], None],
        silent_ms: int = HEARTBEAT_TIMEOUT_MS,
    ) -> None:
        self.epoch = Epoch(0)
        self.draining = False
        self.num_accepted = 0
        self._limits = limits
        self._on_change = on_change
        self._context: AttemptContext | None = None
        self._attempts: dict[Key, tuple[Attempt, asyncio.Task[None]]] = {}
        self._last_alive: dict[bytes, float] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._swept_s = 0.0
        self._router: RouterServer[GatewayToWorker, WorkerToGateway] = RouterServer(
            listen,
            into=TO_WORKER,
            out=TO_GATEWAY,
            on_message=self._on_message,
            on_malformed=self._on_malformed,
            silent_ms=silent_ms,
        )
        self.outbox = Outbox(self._router.send, self._on_lost)
        self._refused = metrics.counter("quire_worker_refused_total", "Generate messages refused.", ("code",))
        self._lost = metrics.counter("quire_worker_gateways_lost_total", "Gateways given up.", ("reason",))
        self._malformed = MalformedLog(
            _log, metrics.counter("quire_worker_malformed_total", "Messages that were no messages.")
        )

    async def start(self, context: AttemptContext) -> str:
        """Listen; the real address. Raises: SettingsError when it is taken."""
        self._context = context
        await self._router.start()
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_INTERVAL_MS / 1000, self._sweep)
        return self._router.address

    @property
    def num_inflight(self) -> int:
        """Attempts that have not ended."""
        return len(self._attempts)

    def num_waiting(self, *, prompts: bool = True) -> int:
        """Attempts that are not in the engine yet. Without `prompts`: of hand-offs alone."""
        return sum(
            attempt.is_waiting and (prompts or attempt.message.stage == "decode")
            for attempt, _ in self._attempts.values()
        )

    @property
    def num_gateways(self) -> int:
        """Connections that said Alive and are not silent."""
        return len(self._last_alive)

    def fail_all(self, reason: str, why: type[PeerGone] = PeerGone) -> None:
        """Every attempt ends now with a retryable failure."""
        self._fail(list(self._attempts), reason, why)
        self.outbox.flush()

    def _fail(self, keys: Iterable[Key], reason: str, why: type[PeerGone] = PeerGone) -> None:
        teller = asyncio.current_task()  # an attempt that tells of what ends all has said its own end
        for key in keys:
            _, task = self._attempts[key]
            if task is not teller and not task.done() and not task.cancelling():
                task.cancel()
                self._say_failed(*key, refusal(why, reason))

    async def drained(self, timeout_s: float) -> bool:
        """Wait until no attempt is left; False when time ran out."""
        tasks = [task for _, task in self._attempts.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        self.outbox.flush()
        return not self._attempts

    def close(self) -> None:
        """Cancel what is left and stop listening."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for _, task in self._attempts.values():
            task.cancel()
        self._router.close()

    # -- messages ---------------------------------------------------------------------------------

    def _on_message(self, identity: bytes, _seq: int, message: GatewayToWorker, raw: list[bytes]) -> None:
        self._router.accept(identity)
        match message:
            case Alive():
                self._on_alive(identity)
            case Abort():
                found = self._attempts.get((identity, message.request_id, message.attempt))
                if found is not None:
                    found[1].cancel()
                if message.handoff_id is not None and self._context is not None:
                    self._context.pages.drop_handoff(message.handoff_id)
            case Generate():
                self._on_generate(identity, message, raw)

    def _on_generate(self, identity: bytes, message: Generate, raw: list[bytes]) -> None:
        key = (identity, message.request_id, message.attempt)
        if key in self._attempts:  # an answer to the repetition would be a second outcome of the first
            _log.warning("attempt_repeated", request_id=message.request_id, attempt=message.attempt)
            return
        answer: Refusal | PackedIds | None = check_state(
            message,
            epoch=self.epoch,
            draining=self.draining,
            num_inflight=len(self._attempts),
            limits=self._limits,
        )
        if answer is None:
            answer = check_prompt(message, raw, limits=self._limits)
        if isinstance(answer, Refusal):
            self._refused.labels(answer.code).inc()
            self._say_failed(identity, message.request_id, message.attempt, answer)
            return
        assert self._context is not None
        self.num_accepted += 1
        attempt = Attempt(self._context, identity, message, raw[0], answer, self.num_accepted)
        task = asyncio.get_running_loop().create_task(attempt.run())
        self._attempts[key] = (attempt, task)
        task.add_done_callback(lambda _: self._ended(key))
        self._on_change()

    def _ended(self, key: Key) -> None:
        self._attempts.pop(key, None)
        self._on_change()

    def _say_failed(self, identity: bytes, request_id: RequestId, attempt: int, why: Refusal) -> None:
        failed = Failed(
            request_id=request_id,
            attempt=attempt,
            code=why.code,
            message=why.message,
            retryable=why.retryable,
        )
        self.outbox.terminal(identity, failed)

    def _on_malformed(self, identity: bytes, error: PeerProtocolError) -> None:
        self._malformed.note(f"a gateway at {self._router.remote(identity) or 'a unix socket'}", error)

    # -- gateways that go -------------------------------------------------------------------------

    def _on_alive(self, identity: bytes) -> None:
        self._last_alive.pop(identity, None)
        self._last_alive[identity] = asyncio.get_running_loop().time()  # the newest is always last
        if len(self._last_alive) > MAX_GATEWAYS:
            del self._last_alive[next(iter(self._last_alive))]

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(SWEEP_INTERVAL_MS / 1000, self._sweep)
        before_s, self._swept_s = self._swept_s, loop.time()
        if self._swept_s - before_s > 2 * SWEEP_INTERVAL_MS / 1000:
            return  # this process stood still: what gateways said meanwhile is still to be read
        oldest_s = self._swept_s - ALIVE_TIMEOUT_MS / 1000
        for identity in [i for i, at in self._last_alive.items() if at < oldest_s]:
            del self._last_alive[identity]
            self._abort_gateway(identity, SILENT)

    def _on_lost(self, identity: bytes, error: str) -> None:
        """Messages were dropped: a gateway that still has the connection would wait for them, so it ends."""
        _log.warning("gateway_unreachable", error=error)
        self._router.disconnect(identity)
        self._last_alive.pop(identity, None)
        self._abort_gateway(identity, "unreachable")

    def _abort_gateway(self, identity: bytes, reason: str) -> None:
        """Nobody will read the answers, or a gateway that only stood still: it is told, or its streams would hang."""
        keys = [
            key for key, (_, task) in self._attempts.items() if key[0] == identity and not task.cancelling()
        ]
        if not keys:
            return
        self._lost.labels(reason).inc()
        _log.warning("gateway_given_up", reason=reason, attempts=len(keys))
        if reason == SILENT:
            self._fail(keys, "The gateway was not heard for too long.")
            return
        for key in keys:
            self._attempts[key][1].cancel()
