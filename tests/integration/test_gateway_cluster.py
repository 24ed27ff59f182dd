"""The cluster client against scripted neighbours on real sockets: what its sink hears, what they hear."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from msgspec import structs

from services.gateway.call import NOTHING_FOUND, Call
from services.gateway.cluster import Cluster
from services.gateway.core.request_flow import Limits
from shared.ids import Epoch, RequestId
from shared.kv.block_hash import pack_tokens
from shared.observe.trace import start_span
from shared.wire.placement import Rejected
from shared.wire.requests import SamplingSpec
from tests.integration.gateway_rig import (
    FakeScheduler,
    FakeWorker,
    answer_tokens,
    colocate,
    disaggregate,
    until,
)
from tests.support.quickest import ever, quickest_s

LIMITS = Limits(
    placement_deadline_ms=30_000, shed_wait_ms=200, place_reply_ms=5_000, request_deadline_ms=30_000
)


class ListSink:
    def __init__(self, enough_after: int = 10**9, mark: bool = True):
        self.tokens, self.outcomes, self.discards = [], [], 0
        self.enough_after, self.mark = enough_after, mark
        self.call: Call | None = None
        self.ended = asyncio.Event()
        self.first = asyncio.Event()

    def chunk(self, chunk):
        self.tokens += chunk.token_ids
        self.first.set()
        if self.mark:
            self.call.flow.mark_sent()
        return len(self.tokens) >= self.enough_after

    def scored(self, call, rows):
        raise AssertionError("nobody asked for the prompt's log probabilities")

    def discard(self):
        self.tokens.clear()
        self.discards += 1

    def complete(self, call):
        self.outcomes.append("complete")
        self.ended.set()

    def fail(self, call, code, message, retry_after_ms):
        self.outcomes.append(code)
        self.ended.set()


@pytest.fixture
async def world():
    scheduler, a, b = FakeScheduler(), FakeWorker("a"), FakeWorker("b")
    await scheduler.start()
    await a.start()
    await b.start()
    cluster = Cluster(scheduler.server.address, model="m", limits=LIMITS)
    cluster.start()
    cluster.on_members([a.view, b.view])
    await until(lambda: cluster.scheduler_up and len(cluster.workers_up) == 2)
    yield cluster, scheduler, a, b
    await cluster.stop()
    for each in (scheduler, a, b):
        await each.stop()


def submit(cluster, sink, n=1, limits=LIMITS, temperature=1.0) -> Call:
    call = Call(
        RequestId("r1"), sink, prompt=pack_tokens(list(range(20))),
        sampling=SamplingSpec(max_tokens=100, n=n, temperature=temperature),
        found=NOTHING_FOUND, session="", tenant="", span=start_span("t"), limits=limits,
    )  # fmt: skip
    sink.call = call
    cluster.submit(call)
    return call


async def ended(sink, seconds=30.0):
    async with asyncio.timeout(seconds):
        await sink.ended.wait()
    return sink.outcomes


async def test_both_stages_run_and_the_scheduler_hears_the_end(world):
    cluster, scheduler, a, b = world
    scheduler.decide = disaggregate(a, b)
    a.script = b.script = answer_tokens([5, 6, 7])
    sink = ListSink()
    call = submit(cluster, sink)
    assert await ended(sink) == ["complete"]
    assert sink.tokens == [5, 6, 7]
    assert b.generated[0].handoff.source == "a"
    assert b.prompts == [list(range(20))]
    assert [r.stage for r in call.receipts] == ["prefill", "decode"]
    assert call.cached_tokens == 16
    await until(lambda: [e.attempt for e in scheduler.ended] == [1])
    assert cluster.num_calls == 0


async def test_a_worker_whose_endpoint_cannot_be_is_one_that_cannot_be_reached(world):
    """Whoever asks for the members would end with it, and the gateway with that, again and again."""
    cluster, scheduler, a, b = world
    names = {"instance": "c", "endpoint": "nowhere"}
    cluster.on_members([a.view, b.view, structs.replace(a.view, **names)])
    scheduler.decide = colocate(SimpleNamespace(target=structs.replace(a.target, **names), instance="c"), b)
    b.script = answer_tokens([1, 2])
    sink = ListSink()
    submit(cluster, sink)
    assert await ended(sink) == ["complete"]
    assert scheduler.places[1].exclude == ["c"]


async def test_a_worker_that_dies_before_output_is_replaced(world):
    cluster, scheduler, a, b = world
    scheduler.decide = colocate(a, b)

    async def die(worker, identity, gen, prompt):
        worker.die()

    a.script, b.script = die, answer_tokens([1, 2])
    sink = ListSink()
    submit(cluster, sink)
    assert await ended(sink) == ["complete"]
    assert sink.tokens == [1, 2]
    assert scheduler.places[1].exclude == ["a"]
    assert b.generated[0].attempt == 2


async def test_a_worker_that_dies_after_output_fails_the_call_within_two_seconds(world):
    cluster, scheduler, a, _b = world
    scheduler.decide = colocate(a)

    async def die(worker, identity, gen, prompt):
        worker.tokens(identity, gen, [1])
        await asyncio.sleep(0.05)
        worker.die()

    address = a.server.address
    a.script = die

    async def attempt():
        await until(lambda: len(cluster.workers_up) == 2)
        sink = ListSink()
        submit(cluster, sink)
        await sink.first.wait()
        begun_s = time.monotonic()
        assert await ended(sink) == ["peer.gone"]
        took_s = time.monotonic() - begun_s
        await a.start(address)
        return took_s

    assert await quickest_s(attempt, 2.0) < 2.0


async def test_a_begun_stream_whose_next_instance_is_silent_ends_and_stops_its_work(world):
    cluster, scheduler, a, b = world
    scheduler.decide = colocate(a, b)

    async def die(worker, identity, gen, prompt):
        worker.tokens(identity, gen, [1])
        await asyncio.sleep(0.05)
        worker.die()

    async def say_nothing(worker, identity, gen, prompt):
        await asyncio.Event().wait()

    a.script, b.script = die, say_nothing
    sink = ListSink()
    submit(cluster, sink, temperature=0.0)
    assert await ended(sink) == ["peer.gone"], "not the request's own deadline, which is much later"
    assert b.prompts == [[*range(20), 1]], "it was asked to go on behind what the client has"
    await until(lambda: [abort.attempt for abort in b.aborted] == [2])
    await until(lambda: [e.attempt for e in scheduler.ended] == [1, 2])


async def test_a_worker_that_cannot_be_reached_is_replaced(world):
    cluster, scheduler, _a, b = world
    gone = FakeWorker("gone")
    await gone.start()
    gone.server.close()
    scheduler.decide = colocate(gone, b)
    b.script = answer_tokens([3])
    sink = ListSink()
    submit(cluster, sink)
    assert await ended(sink) == ["complete"]
    assert sink.tokens == [3]


async def test_a_worker_that_is_back_under_a_new_epoch_is_reached_at_once(world):
    cluster, scheduler, a, b = world
    scheduler.decide = colocate(a)
    a.script = answer_tokens([4])
    before = a.server.address
    a.die()
    await until(lambda: len(cluster.workers_up) == 1)
    await asyncio.sleep(0.8)  # by now the link dials every half a second
    a.epoch = Epoch(2)
    await a.start(before)
    sink = ListSink()
    submit(cluster, sink)
    assert await ended(sink) == ["complete"]
    assert [place.exclude for place in scheduler.places] == [[]], "no placement was lost"
    assert not b.generated


async def test_cancel_aborts_every_involved_worker_at_once(world):
    cluster, scheduler, a, b = world
    scheduler.decide = disaggregate(a, b)
    a.script = b.script = answer_tokens(list(range(50)), gap_s=0.02)
    sink = ListSink()
    call = submit(cluster, sink)
    await sink.first.wait()
    cluster.cancel(call)
    async with asyncio.timeout(30):
        await a.abort_seen.wait()
        await b.abort_seen.wait()
    assert sink.outcomes == []
    assert cluster.num_calls == 0


async def test_enough_output_stops_the_worker_and_completes(world):
    cluster, scheduler, a, _b = world
    scheduler.decide = colocate(a)
    a.script = answer_tokens(list(range(50)), gap_s=0.01)
    sink = ListSink(enough_after=3)
    submit(cluster, sink)
    assert await ended(sink) == ["complete"]
    await until(lambda: len(a.aborted) == 1)


async def test_retryable_failure_is_retried_and_fatal_failure_is_not(world):
    cluster, scheduler, a, b = world
    scheduler.decide = colocate(a, b)

    async def refuse(worker, identity, gen, prompt):
        worker.failed(identity, gen, "pages.exhausted", True)

    a.script, b.script = refuse, answer_tokens([9])
    sink = ListSink()
    submit(cluster, sink)
    assert await ended(sink) == ["complete"]

    async def fatal(worker, identity, gen, prompt):
        worker.failed(identity, gen, "invalid_request", False)

    a.script = fatal
    sink = ListSink()
    submit(cluster, sink)
    assert await ended(sink) == ["invalid_request"]


async def test_rejections_end_as_overloaded(world):
    cluster, scheduler, _a, _b = world
    scheduler.decide = lambda place: Rejected(
        request_id=place.request_id, attempt=place.attempt, code="overloaded", reason="full",
        retry_after_ms=50,
    )  # fmt: skip

    async def is_asked_again():
        scheduler.places.clear()
        sink = ListSink()
        submit(cluster, sink)
        assert await ended(sink) == ["overloaded"]
        return len(scheduler.places) >= 3

    assert await ever(is_asked_again)


async def test_a_scheduler_that_comes_back_serves_the_waiting_request(world):
    cluster, scheduler, a, _b = world
    address = scheduler.server.address
    await until(lambda: cluster.scheduler_up)
    await scheduler.stop()
    await until(lambda: not cluster.scheduler_up)
    a.script = answer_tokens([4])
    sink = ListSink()
    submit(cluster, sink)
    await asyncio.sleep(0.1)
    scheduler.decide = colocate(a)
    await scheduler.start(address)
    assert await ended(sink) == ["complete"]


async def test_the_deadline_ends_a_request_that_nobody_answers(world):
    cluster, scheduler, a, _b = world
    scheduler.decide = colocate(a)

    async def silent(worker, identity, gen, prompt):
        await asyncio.sleep(60)

    a.script = silent
    sink = ListSink()
    submit(cluster, sink, limits=replace(LIMITS, request_deadline_ms=3_000))
    assert await ended(sink) == ["peer.timeout"]
    await until(lambda: len(a.aborted) == 1)


async def test_a_handoff_that_continues_delivers_the_first_token_of_the_prefill(world):
    cluster, scheduler, a, b = world
    scheduler.decide = disaggregate(a, b)

    async def first(worker, identity, gen, prompt):
        worker.prefilled(identity, gen, 11, prompt_tokens=len(prompt), mode="continue")

    a.script, b.script = first, answer_tokens([12, 13])
    sink = ListSink()
    submit(cluster, sink)
    assert await ended(sink) == ["complete"]
    assert sink.tokens == [11, 12, 13]
