"""What one attempt's spans and receipt say, beside what end-to-end traces show."""

from typing import Any

import pytest

from shared.engine import worker_trace
from shared.engine.choice_totals import ChoiceTotals
from shared.engine.interface import KvUse
from shared.engine.preempt_times import MAX_TIMES, note_preempted, preempted_ns
from shared.engine.worker_trace import AttemptClock
from shared.ids import Epoch, InstanceId, RequestId
from shared.observe.span import Span
from shared.wire.requests import Generate, SamplingSpec


class Seen(Span):
    """Keeps its events."""

    def __init__(self) -> None:
        super().__init__("")
        self.events: list[tuple[str, int | None]] = []

    @property
    def recording(self) -> bool:
        return True

    def event(self, name: str, attributes: Any = None, at_ns: int | None = None) -> None:
        self.events.append((name, at_ns))


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> dict[str, Seen]:
    made: dict[str, Seen] = {}
    monkeypatch.setattr(worker_trace, "start_span", lambda name, **_: made.setdefault(name, Seen()))
    return made


def clock(**more: Any) -> AttemptClock:
    sampling = SamplingSpec(max_tokens=4, temperature=0)
    message = Generate(
        request_id=RequestId("r"), attempt=1, stage="decode", instance_epoch=Epoch(1), sampling=sampling
    )
    return AttemptClock(message, InstanceId("decode-0"), 8, **more)


def test_each_preemption_is_an_event_of_the_stage_at_its_own_time(spans):
    clock().end(KvUse(preempted_ns=[17, 23]))
    assert spans["decode"].events == [("preempt", 17), ("preempt", 23)]


@pytest.mark.parametrize("path", ["memfd", "cuda"])
def test_a_receipt_names_where_the_pages_are_that_blocks_came_from(spans, path):
    assert clock(page_path=path).receipt(KvUse(blocks_moved=2)).path == path
    assert clock(page_path=path).receipt(KvUse()).path == ""


@pytest.mark.parametrize(
    ("stage", "n", "tokens", "prefill_ms", "step_ms"),
    [("colocated", 1, 5, 30.0, 10.0), ("decode", 1, 5, 0.0, 10.0), ("colocated", 2, 5, 30.0, 0.0),
     ("decode", 1, 1, 0.0, 0.0)],
)  # fmt: skip
def test_a_receipt_parts_a_colocated_stage_and_says_what_a_token_took(
    spans, monkeypatch, stage, n, tokens, prefill_ms, step_ms
):
    sampling = SamplingSpec(max_tokens=9, temperature=0, n=n)
    message = Generate(
        request_id=RequestId("r"), attempt=1, stage=stage, instance_epoch=Epoch(1), sampling=sampling
    )
    made = AttemptClock(message, InstanceId("w"), 8)
    times = iter([0, 30_000_000, 70_000_000])
    monkeypatch.setattr(made, "_now", lambda: next(times))
    made.mark_submitted(asked_pool=False)
    made.mark_first()
    made.num_output_tokens = tokens
    receipt = made.receipt(KvUse())
    assert (receipt.prefill_ms, receipt.step_ms) == (prefill_ms, step_ms)


def test_times_are_kept_up_to_a_bound_and_a_requests_choices_tell_all_of_theirs():
    class Request:
        pass

    request = Request()
    assert preempted_ns(request) == []
    for _ in range(MAX_TIMES + 3):
        note_preempted(request)
    times = preempted_ns(request)
    assert len(times) == MAX_TIMES
    assert times == sorted(times)
    totals = ChoiceTotals()
    totals.add("0_r", {"preempted_ns": times[:1]})
    assert totals.add("1_r", {"preempted_ns": times[1:3]}) == {"preempted_ns": times[:3]}
