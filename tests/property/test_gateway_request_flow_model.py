"""Whatever happens in whatever order, a request has exactly one outcome and leaves no work behind."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.core.request_flow import (
    MAX_ATTEMPTS,
    Cancel,
    Complete,
    Discard,
    Fail,
    GoOn,
    Limits,
    Phase,
    RequestFlow,
    SendAbort,
    SendEnded,
    SendGenerate,
    SendPlace,
)
from shared.ids import Epoch, HandoffId, InstanceId, RequestId
from shared.kv.layout import EngineDescription
from shared.wire.handoff import HandoffState
from shared.wire.placement import Placed, Rejected, Target
from tests.support.examples import examples

DESCRIPTION = EngineDescription(model="m", fingerprint="f", dtype="float32", layout="l", backend="b")
NAMES = ["a", "b", "c"]
RESUME_MS = 300
EVENTS = [
    "placed", "colocated", "rejected", "scheduler_down", "not_asked", "prefilled", "no_handoff", "tokens", "last_token",
    "finished", "failed", "fatal", "down", "gone", "satisfied", "broken", "tick",
]  # fmt: skip

# what moves a request on, by phase: without it few sequences come as far as the last token
NATURAL = {
    Phase.PLACING: ["placed", "colocated"],
    Phase.BACKOFF: ["tick"],
    Phase.PREFILLING: ["prefilled", "down"],
    Phase.DECODING: ["tokens", "last_token", "down", "failed"],
    Phase.ENDED: ["down", "failed"],
}


def target(name: str) -> Target:
    return Target(instance=InstanceId(name), epoch=Epoch(1), role="decode", endpoint=f"tcp://{name}")


class World:
    """Runs the machine and keeps the books that the claims are about."""

    def __init__(self, continues, beside):
        self.flow = RequestFlow(Limits(1_000, 200, 100, 5_000, RESUME_MS), continues=continues)
        if beside:
            self.flow.siblings.begun()  # another prompt of its request runs, and on and on
        self.now_ms = 0
        self.lost_ms: int | None = None  # since when a client that reads waits for what comes next
        self.outcomes = []
        self.working: set[tuple[int, str]] = set()  # (attempt, instance) told to generate, not told to stop
        self.counted: set[int] = set()  # attempts in the scheduler's load view
        self.dead: set[str] = set()
        self.take(self.flow.start(now_ms=0))

    def take(self, actions):
        for action in actions:
            assert not self.outcomes, "an action after the outcome"
            if isinstance(action, Complete | Cancel | Fail):
                self.outcomes.append(action)
            elif isinstance(action, SendPlace):
                self.counted.add(action.attempt)
            elif isinstance(action, SendGenerate):
                assert action.attempt == self.flow.attempt
                self.working.add((action.attempt, action.target.instance))
            elif isinstance(action, SendAbort):
                self.working.discard((action.attempt, action.target.instance))
            elif isinstance(action, SendEnded):
                self.counted.discard(action.attempt)
            elif isinstance(action, Discard):
                assert not self.flow.bytes_sent, "output was discarded after the client saw some"
            elif isinstance(action, GoOn):
                assert self.flow.bytes_sent, "nothing to go on behind"
                assert self.flow.continues, "output that cannot be gone on behind"
                self.lost_ms = self.now_ms if self.lost_ms is None else self.lost_ms

    def went_on(self):
        self.flow.mark_resumed(now_ms=self.now_ms)
        self.lost_ms = None

    def event(self, name, a, b, stale, elapsed_ms):  # noqa: C901 - one branch for each kind of event
        flow = self.flow
        self.now_ms += elapsed_ms
        now_ms = self.now_ms
        attempt = flow.attempt - 1 if stale else flow.attempt
        was = flow.phase
        if name in ("placed", "colocated"):
            prefill = target(a) if name == "placed" else None
            kind = "disaggregated" if prefill else "colocated"
            if a == b and prefill:
                return
            message = Placed(
                request_id=RequestId("r"), attempt=attempt, kind=kind, decode=target(b), prefill=prefill,
                handoff_id=HandoffId("h"),
            )  # fmt: skip
            self.take(flow.on_placed(message, now_ms=now_ms))
        elif name == "rejected":
            self.counted.discard(attempt)
            message = Rejected(
                request_id=RequestId("r"), attempt=attempt, code="overloaded", reason="", retry_after_ms=50
            )
            self.take(flow.on_rejected(message, now_ms=now_ms))
        elif name == "scheduler_down":
            self.take(flow.on_scheduler_down(now_ms=now_ms))  # it may have stood still, and has counted all
        elif name == "not_asked":
            if was is Phase.PLACING:
                self.counted.discard(flow.attempt)
            self.take(flow.on_not_asked(now_ms=now_ms))
        elif name in ("prefilled", "no_handoff"):
            if was is Phase.PREFILLING and not stale and flow.placed:
                self.working.discard((attempt, flow.placed.prefill.instance))
            if self.flow.continues and not stale:
                flow.mark_sent()  # prefill's token is the client's
                if was is Phase.PREFILLING:
                    self.went_on()
            handoff = HandoffState(handoff_id=HandoffId("h"), source=InstanceId(a), description=DESCRIPTION)
            self.take(flow.on_prefilled(attempt, handoff if name == "prefilled" else None, now_ms=now_ms))
        elif name in ("tokens", "last_token"):
            if flow.accepts(attempt):
                flow.mark_sent()
                self.went_on()
                if name == "last_token":
                    flow.mark_answered()
        elif name == "finished":
            if flow.accepts(attempt):
                self.working.clear()
            self.take(flow.on_finished(attempt))
        elif name in ("failed", "fatal"):
            source = None
            if not stale and flow.placed and was in (Phase.PREFILLING, Phase.DECODING):
                chosen = flow.placed.prefill if was is Phase.PREFILLING else flow.placed.decode
                source = chosen.instance
                self.working.discard((attempt, source))
            retryable = name == "failed"
            self.take(flow.on_failed(attempt, "x", "x", retryable, now_ms=now_ms, source=source))
        elif name == "down":
            self.working = {pair for pair in self.working if pair[1] != a}
            self.take(flow.on_instance_down(InstanceId(a), now_ms=now_ms))
        elif name == "gone":
            self.take(flow.on_client_gone())
        elif name == "satisfied":
            self.take(flow.on_satisfied())
        elif name == "broken":
            self.take(flow.on_broken("x", "x"))
        else:
            self.take(flow.on_tick(now_ms=now_ms))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["natural", "any"]), st.integers(0, 59), st.sampled_from(NAMES), st.sampled_from(NAMES),
        st.sampled_from([False, False, False, True]), st.integers(0, 120),
    ),
    min_size=4,
    max_size=40,
)  # fmt: skip


@settings(max_examples=examples(400), deadline=None)
@given(STEPS, st.booleans(), st.booleans())
def test_exactly_one_outcome_and_nothing_left_running(steps, continues, beside):
    world = World(continues, beside)
    for source, number, a, b, stale, elapsed_ms in steps:
        known = NATURAL[world.flow.phase] if source == "natural" else EVENTS
        name = known[number % len(known)]
        sent_before, answered_before = world.flow.bytes_sent, world.flow.answered
        attempt_before, ended_before = world.flow.attempt, bool(world.outcomes)
        world.event(name, a, b, stale, elapsed_ms)
        assert len(world.outcomes) <= 1
        assert (world.flow.phase is Phase.ENDED) == bool(world.outcomes)
        if name == "tick" and world.lost_ms is not None and not world.outcomes:
            assert world.now_ms < world.lost_ms + RESUME_MS, "a client that reads was left waiting"
        if sent_before and not continues:
            assert world.flow.attempt == attempt_before, "repeated after the client saw output"
        if answered_before:
            assert world.flow.attempt == attempt_before, "repeated after the last token"
            if name in ("failed", "fatal", "down") and world.outcomes:
                assert not isinstance(world.outcomes[0], Fail) or ended_before, "the client has all of it"
        assert world.flow.attempt <= MAX_ATTEMPTS
        runs = world.flow.phase in (Phase.PREFILLING, Phase.DECODING)
        assert world.flow.siblings._num_running == runs + beside
    for _ in range(200):  # nothing but time: the deadlines end it
        world.event("tick", "a", "b", False, 50)
    assert len(world.outcomes) == 1
    assert world.flow.siblings._num_running == beside
    assert not world.working
    assert not world.counted
