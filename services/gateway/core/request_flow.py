"""One request from placement to its single outcome. No I/O: events and time come in, actions go out.

    PLACING --placed--> PREFILLING --prefilled--> DECODING --finished--> ENDED (Complete)
       |  \\--placed, colocated----------------------^ |
       |<-- BACKOFF <-- rejected, lost, failed and nothing sent yet, or one that continues
       \\-- deadline, fatal failure, or failure after the first byte --> ENDED (Fail)
    any state -- client gone, or the gateway stopped it --> ENDED (Cancel or Complete)

Every attempt is one placement; replies that name another attempt are stale and change nothing. Once a byte
has left for the client an attempt is never repeated, so no client sees two answers in one stream; but a request that
`continues` (can_continue() of shared/wire/requests.py) goes on in the next attempt behind the tokens that it has. It
has `resume_deadline_ms` for its next token: who reads a stream hears within two seconds how it goes on or ends.
"""

from dataclasses import dataclass, field
from enum import Enum

from services.gateway.core.request_actions import (
    Action,
    Cancel,
    Complete,
    Discard,
    Fail,
    GoOn,
    SendAbort,
    SendEnded,
    SendGenerate,
    SendPlace,
    over_budget,
    sentence,
)
from services.gateway.core.request_limits import (
    BACKOFF_FIRST_MS,
    BACKOFF_MAX_MS,
    MAX_ATTEMPTS,
    MAX_LOSSES,
    MAX_LOSSES_IN_A_ROW,
    Limits,
)
from services.gateway.core.retry_budget import RetryBudget
from services.gateway.core.siblings import SIBLING_WAIT_MS, Siblings
from shared.errors import ClusterError, PeerGone, PeerProtocolError
from shared.ids import InstanceId
from shared.wire.handoff import HandoffState
from shared.wire.placement import Held, Placed, Rejected, SchedulerToGateway
from shared.wire.requests import HandoffTarget


class Phase(Enum):
    """Where the request is."""

    PLACING = "placing"
    BACKOFF = "backoff"
    PREFILLING = "prefilling"
    DECODING = "decoding"  # or colocated
    ENDED = "ended"


@dataclass(slots=True)
class RequestFlow:
    """The state machine. Methods return actions in the order in which they must happen."""

    limits: Limits
    # shared by all requests of the process; None: no bound but the deadlines and MAX_ATTEMPTS
    budget: RetryBudget | None = None
    phase: Phase = Phase.PLACING
    attempt: int = 0
    continues: bool = False  # output of one attempt can be the beginning of another's
    bytes_sent: bool = False  # set by mark_sent(): from then on no attempt is repeated
    answered: bool = False  # set by mark_answered(): only the last stage's receipt is missing
    placed: Placed | None = None
    exclude: list[InstanceId] = field(default_factory=list)
    num_retries: int = 0
    last_failure: str = ""
    _has_output: bool = False  # set by mark_output(): of this attempt
    _num_losses: int = 0
    _num_in_a_row: int = 0
    _deadline_ms: int = 0  # of the whole request
    _place_by_ms: int = 0  # of this placement
    _shed_by_ms: int = 0
    _wake_ms: int = 0  # PLACING: the answer is overdue; BACKOFF: place again
    _backoff_ms: int = BACKOFF_FIRST_MS
    # a begun stream lost its instance: its next token must come by then; 0: nothing is owed
    resume_by_ms: int = 0
    siblings: Siblings = field(default_factory=Siblings)  # one for all prompts of its request
    _num_gave_way: int = 0  # attempts rejected because of them

    def start(self, *, now_ms: int) -> list[Action]:
        """First placement."""
        assert self.attempt == 0
        if self.budget is not None:
            self.budget.on_request(now_ms)
        self._deadline_ms = now_ms + self.limits.request_deadline_ms
        self._place_by_ms = now_ms + self.limits.placement_deadline_ms
        self._shed_by_ms = now_ms + self.limits.shed_wait_ms
        return self._place(now_ms)

    def accepts(self, attempt: int) -> bool:
        """True for output of the stage that runs now."""
        return attempt == self.attempt and self.phase is Phase.DECODING

    def mark_sent(self) -> None:
        """A byte of the answer has left for the client."""
        self.bytes_sent = True

    def mark_output(self) -> None:
        """The attempt has its first token, and no earlier one's was kept."""
        self._has_output = True

    def mark_answered(self) -> None:
        """The last token of every choice has come."""
        self.answered = True

    def mark_resumed(self, *, now_ms: int) -> int:
        """A stream that had lost its instance has its next token. Returns the ms that were left."""
        self._has_output = True
        spare_ms, self.resume_by_ms = self.resume_by_ms - now_ms, 0
        return spare_ms

    # ---- scheduler ----

    def on_scheduler(self, answer: SchedulerToGateway, *, now_ms: int) -> list[Action]:
        """It answered, or says that it will."""
        if isinstance(answer, Placed):
            return self.on_placed(answer, now_ms=now_ms)
        if isinstance(answer, Held):
            return self.on_held(answer, now_ms=now_ms)
        return self.on_rejected(answer, now_ms=now_ms)

    def on_placed(self, placed: Placed, *, now_ms: int) -> list[Action]:
        """The scheduler chose instances for the current attempt."""
        if self.phase is not Phase.PLACING or placed.attempt != self.attempt:
            return []
        self.placed = placed
        self.siblings.begun()
        left_ms = max(1, self._deadline_ms - now_ms)
        if placed.kind == "disaggregated" and placed.prefill is not None:
            self.phase = Phase.PREFILLING
            to = HandoffTarget(handoff_id=placed.handoff_id, target=placed.decode.instance)
            return [
                SendGenerate(self.attempt, placed.prefill, "prefill", left_ms, handoff_to=to, kv=placed.kv)
            ]
        self.phase = Phase.DECODING
        return [SendGenerate(self.attempt, placed.decode, "colocated", left_ms, kv=placed.kv)]

    def on_rejected(self, rejected: Rejected, *, now_ms: int) -> list[Action]:
        """No instance now: wait as long as its siblings run, then as long as the deadlines allow, then fail."""
        if self.phase is not Phase.PLACING or rejected.attempt != self.attempt:
            return []
        self.last_failure = rejected.reason
        self.exclude = []  # better an instance that failed once than none
        wait_ms = max(1, rejected.retry_after_ms)
        full = rejected.code == "overloaded"
        if full and self.siblings.hold(self.wake):
            self._num_gave_way += 1
            self._place_by_ms = now_ms + self.limits.placement_deadline_ms
            return self._back_off(now_ms, max(wait_ms, SIBLING_WAIT_MS))
        sheds = full and self.num_retries == 0 and not self.siblings.have_run
        until_ms = min(self._shed_by_ms, self._place_by_ms) if sheds else self._place_by_ms
        if now_ms + wait_ms > until_ms or not self._may_ask:
            return self._end(Fail("overloaded", rejected.reason, max(1_000, wait_ms)))
        return self._back_off(now_ms, wait_ms)

    def wake(self) -> bool:
        """Place again with the next tick, if it waits: there may be room now. Whether it does."""
        if self.phase is not Phase.BACKOFF:
            return False
        self._wake_ms = 0
        return True

    def on_held(self, held: Held, *, now_ms: int) -> list[Action]:
        """The scheduler answers later: no instance has room in its pages."""
        if self.phase is Phase.PLACING and held.attempt == self.attempt:
            answer_by_ms = now_ms + max(0, held.wait_ms) + self.limits.place_reply_ms
            self._wake_ms = max(self._wake_ms, min(answer_by_ms, self._place_by_ms))
        return []

    def on_scheduler_down(self, *, now_ms: int) -> list[Action]:
        """The link to the scheduler broke: an unanswered placement is lost; running stages are not.

        It ends for the scheduler, too, which may have stood still and places it when it goes on.
        """
        attempt = self.attempt
        return [SendEnded(attempt), *self.on_not_asked(now_ms=now_ms)] if self.phase is Phase.PLACING else []

    def on_not_asked(self, *, now_ms: int) -> list[Action]:
        """The placement could not be sent."""
        if self.phase is not Phase.PLACING:
            return []
        self.last_failure = "the scheduler is not reachable"
        return self._place_later(now_ms)

    # ---- workers ----

    def on_prefilled(self, attempt: int, handoff: HandoffState | None, *, now_ms: int) -> list[Action]:
        """The prefill stage ended; without a handoff its first chunk, delivered already, is the answer."""
        if self.phase is not Phase.PREFILLING or attempt != self.attempt:
            return []
        assert self.placed is not None
        if handoff is None:
            return [SendEnded(attempt), *self._end(Complete())]
        self.phase = Phase.DECODING
        left_ms = max(1, self._deadline_ms - now_ms)
        return [SendGenerate(attempt, self.placed.decode, "decode", left_ms, handoff=handoff)]

    def on_finished(self, attempt: int) -> list[Action]:
        """Every choice has ended at the worker."""
        if not self.accepts(attempt):
            return []
        return [SendEnded(attempt), *self._end(Complete())]

    def on_failed(
        self,
        attempt: int,
        code: str,
        message: str,
        retryable: bool,
        *,
        now_ms: int,
        source: InstanceId | None,
    ) -> list[Action]:
        """A worker gave the attempt up. `source` is left out next time, unless only its epoch was stale."""
        if attempt != self.attempt or self.phase not in (Phase.PREFILLING, Phase.DECODING):
            return []
        died = code == PeerGone.code
        return self._lost(source, code, message, retryable=retryable, now_ms=now_ms, died=died)

    def on_instance_down(
        self, instance: InstanceId, *, now_ms: int, unread: bool = False, reached: bool = True
    ) -> list[Action]:
        """The link to an instance broke. Matters only if this request still needs that instance.

        `unread`: it is there, and said what is no message, an answer to this request perhaps. `reached`: it has it.
        """
        placed = self.placed
        if placed is None or self.phase not in (Phase.PREFILLING, Phase.DECODING):
            return []
        asked = placed.prefill if self.phase is Phase.PREFILLING and placed.prefill else placed.decode
        if unread:
            if instance != asked.instance:  # who was asked nothing yet answers others
                return []
            message, code = f"The instance {instance} said what cannot be read.", PeerProtocolError.code
            return self._lost(instance, code, message, retryable=True, now_ms=now_ms, lives=True)
        if instance not in (asked.instance, placed.decode.instance):
            return []
        message = f"The instance {instance} that served this request is gone."
        died = reached and instance == asked.instance
        return self._lost(instance, PeerGone.code, message, retryable=True, now_ms=now_ms, died=died)

    # ---- client and time ----

    def on_client_gone(self) -> list[Action]:
        """The client closed its connection: stop all work for it."""
        return self._stop(Cancel())

    def on_satisfied(self) -> list[Action]:
        """The gateway needs no more output (stop strings ended every choice): stop the worker."""
        return self._stop(Complete())

    def on_broken(self, code: str, message: str) -> list[Action]:
        """The gateway cannot go on with this request (bad output): stop all work, fail."""
        return self._stop(Fail(code, message))

    def on_late(self, code: str, message: str) -> list[Action]:
        """No time is left: stop all work. Who has the whole answer does not hear of it."""
        return self._stop(Complete() if self.answered else Fail(code, message))

    def on_tick(self, *, now_ms: int) -> list[Action]:
        """Time passes; call at least every 100 ms while placing, every second otherwise."""
        if self.phase is Phase.ENDED:
            return []
        if now_ms >= self._deadline_ms:
            return self.on_late("peer.timeout", "The request's deadline passed.")
        if 0 < self.resume_by_ms <= now_ms:
            return self._stop(
                Fail("peer.gone", "The instance is gone, and no other went on with this in time.")
            )
        if self.phase is Phase.PLACING and now_ms >= self._wake_ms:
            self.last_failure = "the scheduler does not answer"
            return [SendEnded(self.attempt), *self._place_later(now_ms)]
        if self.phase is Phase.BACKOFF and now_ms >= self._wake_ms:
            return self._place(now_ms)
        return []

    @property
    def wants_quick_ticks(self) -> bool:
        """True while some wait shorter than a second is running, or one that must end to the tenth of a second."""
        return self.phase in (Phase.PLACING, Phase.BACKOFF) or (
            self.resume_by_ms > 0 and self.phase is not Phase.ENDED
        )

    # ---- inside ----

    @property
    def _may_ask(self) -> bool:
        return self.attempt - self._num_gave_way < MAX_ATTEMPTS

    def _place(self, now_ms: int) -> list[Action]:
        self.attempt += 1
        self.phase = Phase.PLACING
        self.placed = None
        self._has_output = False
        self._wake_ms = now_ms + self.limits.place_reply_ms
        return [SendPlace(self.attempt, self.exclude)]

    def _place_later(self, now_ms: int) -> list[Action]:
        """Placing failed without a verdict: again after a growing pause, until the placement deadline."""
        wait_ms, self._backoff_ms = self._backoff_ms, min(BACKOFF_MAX_MS, 2 * self._backoff_ms)
        if now_ms + wait_ms > self._place_by_ms or not self._may_ask:
            return self._end(Fail("overloaded", f"No placement: {sentence(self.last_failure)}", 1_000))
        return self._back_off(now_ms, wait_ms)

    def _back_off(self, now_ms: int, wait_ms: int) -> list[Action]:
        self.phase = Phase.BACKOFF
        self._wake_ms = now_ms + wait_ms
        return []

    def _lost(
        self,
        gone: InstanceId | None,
        code: str,
        message: str,
        *,
        retryable: bool,
        now_ms: int,
        lives: bool = False,
        died: bool = False,
    ) -> list[Action]:
        """The running attempt will bring no more: it was enough, another one follows, or the request fails.

        `lives`: `gone` has not ended the attempt, and must be told to. `died`: with it.
        """
        actions = self._drop_attempt(gone=None if lives else gone)
        if self.answered:
            return [*actions, *self._end(Complete())]
        if not retryable or (self.bytes_sent and not self.continues):
            return [*actions, *self._end(Fail(code, message))]
        if died:
            self._num_losses += 1
            self._num_in_a_row = 1 if self._has_output else self._num_in_a_row + 1
            if self._num_in_a_row >= MAX_LOSSES_IN_A_ROW or self._num_losses >= MAX_LOSSES:
                reason = (
                    f"{self._num_losses} instances were lost while they ran this request; it is given up."
                )
                return [*actions, *self._end(Fail(ClusterError.code, reason))]
        # a cluster that loses its workers is not asked for everything again
        if self.budget is not None and not self.budget.take(now_ms):
            return [*actions, *self._end(over_budget(code, message))]
        if self.bytes_sent and not self.resume_by_ms:
            # It has got on since its last loss: this one is as its first. Another before the next token is not.
            self.resume_by_ms = now_ms + self.limits.resume_deadline_ms
            self.num_retries, self._backoff_ms, self.exclude = 0, BACKOFF_FIRST_MS, []
        if gone is not None and code != "epoch.stale":
            self.exclude = [*self.exclude, gone]
        return [*actions, *self._retry(message, now_ms)]

    def _retry(self, message: str, now_ms: int) -> list[Action]:
        """A running attempt was lost, before the client saw a byte of it or with one that can go on."""
        lost = GoOn() if self.bytes_sent else Discard()
        self.last_failure = message
        self.num_retries += 1
        if self.num_retries == 1 or self._has_output:  # the last placement was of use: a fresh one's clock
            self._place_by_ms = now_ms + self.limits.placement_deadline_ms
        self._leave()
        if self.num_retries == 1 and self._may_ask:
            return [lost, *self._place(now_ms)]
        return [lost, *self._place_later(now_ms)]

    def _drop_attempt(self, *, gone: InstanceId | None) -> list[Action]:
        """Abort the attempt on every involved instance but the one that is known to have ended it."""
        placed = self.placed
        if placed is None or self.phase not in (Phase.PREFILLING, Phase.DECODING):
            return []
        aborts: list[Action] = []
        if self.phase is Phase.DECODING and placed.decode.instance != gone:
            aborts.append(SendAbort(self.attempt, placed.decode))
        if placed.prefill is not None and placed.prefill.instance != gone:
            aborts.append(SendAbort(self.attempt, placed.prefill, placed.handoff_id))
        return [*aborts, SendEnded(self.attempt)]

    def _leave(self) -> None:
        """Its place is free for another prompt of the request."""
        if self.phase in (Phase.PREFILLING, Phase.DECODING):
            self.siblings.left()
            self.phase = Phase.BACKOFF

    def _stop(self, outcome: Complete | Cancel | Fail) -> list[Action]:
        if self.phase is Phase.ENDED:
            return []
        actions = self._drop_attempt(gone=None)
        if self.phase is Phase.PLACING:  # the scheduler may have counted it already
            actions = [SendEnded(self.attempt)]
        return [*actions, *self._end(outcome)]

    def _end(self, outcome: Complete | Cancel | Fail) -> list[Action]:
        assert self.phase is not Phase.ENDED, "a request ends once"
        self._leave()
        self.phase = Phase.ENDED
        return [outcome]
