"""One request's spans on a worker: names, parents, order and what they say about the KV."""

import json

import msgspec
import pytest

from shared.observe import trace
from shared.observe.span_record import SpanRecord
from shared.wire.requests import Failed, Finished, Prefilled
from tests.integration.test_worker_front import FakePages, running, until

PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.fixture
def model_dir(tmp_path):
    config = {"vocab_size": 1000, "eos_token_id": 2, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.fixture
def spans(tmp_path):
    """spans(): by name, what reached the store; nothing is recorded after it."""
    trace.setup("decode", "decode-0", endpoint="", directory=str(tmp_path / "spans"), sample_ratio=1.0)

    def read():
        trace.shutdown()
        lines = b"".join(path.read_bytes() for path in (tmp_path / "spans").glob("*.jsonl")).splitlines()
        return {span.name: span for span in (msgspec.json.decode(line, type=SpanRecord) for line in lines)}

    yield read
    trace.shutdown()


async def test_a_prefill_has_queue_fetch_and_compute_one_after_the_other(model_dir, spans):
    async with running(model_dir, FakePages(num_blocks=0), mock_prefill_tokens_per_s=2000) as (_, gateway):
        gateway.generate("r", list(range(3, 103)), stage="prefill", traceparent=PARENT)
        end = await gateway.end_of("r")
        assert isinstance(end, Prefilled)
        found = spans()
        assert set(found) == {"prefill", "kv.fetch", "prefill.queue", "prefill.compute"}
        stage = found["prefill"]
        assert stage.parent_id == "cd" * 8
        for name in ("kv.fetch", "prefill.queue", "prefill.compute"):
            span = found[name]
            assert span.parent_id == stage.span_id
            assert span.attributes["quire.request_id"] == "r"
            assert stage.start_ns <= span.start_ns <= span.end_ns <= stage.end_ns
        assert found["kv.fetch"].end_ns == found["prefill.queue"].start_ns
        assert found["prefill.queue"].end_ns == found["prefill.compute"].start_ns
        compute_ms = (found["prefill.compute"].end_ns - found["prefill.compute"].start_ns) / 1e6
        assert compute_ms >= 45, "100 tokens at 2,000 per second"
        assert end.receipt.compute_ms == pytest.approx(compute_ms, abs=1.0)
        assert found["prefill.compute"].attributes["tokens_computed"] == 100


async def test_a_decode_shows_its_transfer_queue_and_first_token(model_dir, spans):
    async with running(model_dir) as (_, gateway):
        gateway.generate("r", [5, 6, 7], stage="prefill")
        prefilled = await gateway.end_of("r")
        assert isinstance(prefilled, Prefilled)
        gateway.generate("d", [5, 6, 7], stage="decode", handoff=prefilled.handoff, traceparent=PARENT)
        assert isinstance(await gateway.end_of("d"), Finished)
        found = spans()
        assert {"decode", "handoff.transfer", "decode.queue"} <= set(found)
        transfer = found["handoff.transfer"].attributes
        assert {"bytes", "path", "blocks_moved", "blocks_reused"} <= set(transfer)
        assert [event.name for event in found["decode"].events] == ["decode.first_token"]
        assert found["decode"].attributes["quire.output_tokens"] == 8


async def test_a_request_that_waits_for_a_place_in_the_batch_shows_it_as_queue(model_dir, spans):
    async with running(model_dir, mock_step_ms=10, max_num_seqs=1) as (_, gateway):
        for number in range(5):  # the machine may stand still while it is computed, but not each time
            gateway.generate(f"first-{number}", [5], max_tokens=60)
            await gateway.has_tokens(f"first-{number}")
            gateway.generate(f"second-{number}", [6], stage="prefill", traceparent=PARENT)
            end = await gateway.end_of(f"second-{number}")
            assert isinstance(end, Prefilled)
            assert end.receipt.queue_ms >= 60
            if end.receipt.compute_ms < end.receipt.queue_ms / 2:
                break
        assert end.receipt.compute_ms < end.receipt.queue_ms / 2
        queue = spans()["prefill.queue"]
        assert end.receipt.queue_ms == pytest.approx((queue.end_ns - queue.start_ns) / 1e6, abs=1.0)


async def test_a_failed_attempt_is_an_error(model_dir, spans):
    async with running(model_dir, mock_step_ms=5) as (_, gateway):
        gateway.generate("late", [5], max_tokens=4000, deadline_ms=30, traceparent=PARENT)
        assert isinstance(await gateway.end_of("late"), Failed)
        assert "deadline" in spans()["colocated"].error


async def test_an_aborted_attempt_ends_its_span_without_an_error(model_dir, spans):
    async with running(model_dir, mock_step_ms=5) as (rig, gateway):
        gateway.generate("gone", [5], max_tokens=4000, traceparent=PARENT)
        await gateway.has_tokens("gone")
        gateway.abort("gone")
        await until(lambda: not rig.front.num_inflight)
        assert spans()["colocated"].error == ""


async def test_an_unsampled_request_records_nothing(model_dir, spans):
    async with running(model_dir) as (_, gateway):
        gateway.generate("r", [5], traceparent=PARENT[:-2] + "00")
        end = await gateway.end_of("r")
        assert isinstance(end, Finished)
        assert spans() == {}
        assert msgspec.structs.asdict(end.receipt)["prompt_tokens"] == 1
