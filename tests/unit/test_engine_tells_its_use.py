"""What an engine core tells of a request's KV reaches the front with the first output, and stays told."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.outputs import CompletionOutput, RequestOutput

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of what vLLM's runners import
    from shared.engine.kv_told import keep_told, kv_use, tell_first
    from shared.engine.vllm_engine import VllmEngine

from shared.engine import pool
from shared.engine.choice_totals import ChoiceTotals
from shared.engine.connector_scheduler import SchedulerSide
from shared.engine.interface import EngineRequest, KvUse
from shared.ids import BlockHash
from shared.kv.block_hash import hash_blocks, pack_tokens
from shared.kv.words import u32_bytes, u64_bytes
from shared.wire.requests import SamplingSpec

SEED = BlockHash(bytes(32))
LOADED = {"tokens_loaded": 6, "blocks_loaded": 2, "blocks_local": 1, "bytes_loaded": 128}


def output(
    tokens: list[int], told: dict | None = None, *, index: int = 0, ends: bool = False
) -> RequestOutput:
    reason = "length" if ends else None
    choice = CompletionOutput(index, "", tokens, None, None, finish_reason=reason)
    return RequestOutput(
        "r", None, [1] * 10, None, [choice], ends, kv_transfer_params=told, num_cached_tokens=8
    )


async def uses_of(*outputs: RequestOutput, n: int = 1) -> list[KvUse | None]:
    """Of the deltas that vLLM's outputs become."""
    engine = VllmEngine.__new__(VllmEngine)
    engine._reads_cache = engine.keeps_leases = True
    engine.settings = SimpleNamespace(early_from_tokens=0)  # type: ignore[assignment]
    engine._early = SimpleNamespace(take=lambda _: None)  # type: ignore[assignment]
    engine._unfinished_prefill, engine._context_tokens = {}, {}

    async def generate(*_: Any, **__: Any):
        for each in outputs:
            yield each

    engine._llm = SimpleNamespace(generate=generate)
    request = EngineRequest(
        engine_request_id="r", stage="decode", prompt_token_ids=[1] * 10, chain_seed=BlockHash(b""),
        sampling=SamplingSpec(max_tokens=3, temperature=1, n=n),
    )  # fmt: skip
    return [delta.kv_use async for delta in engine.generate(request)]


async def test_the_first_delta_says_what_was_loaded_and_the_last_says_it_too():
    first, second, last = await uses_of(
        output([4], LOADED), output([5]), output([6], {"preempted_ns": [17]}, ends=True)
    )
    assert first is not None
    assert second is None
    assert last is not None
    for use in (first, last):
        assert (use.tokens_engine, use.tokens_pool, use.tokens_computed) == (2, 6, 2)
        assert (use.blocks_moved, use.blocks_reused, use.bytes_moved) == (2, 1, 128)
    assert (list(first.preempted_ns), list(last.preempted_ns)) == ([], [17])


async def test_outputs_that_wait_for_their_reader_keep_what_the_first_one_told():
    keep_told()
    keep_told()  # twice is once
    merged = output([4], LOADED)
    merged.add(output([5]), aggregate=True)
    assert kv_use(merged, merged.kv_transfer_params or {}, 10).bytes_moved == 128
    merged.add(output([6], {"preempted_ns": [17]}, ends=True), aggregate=True)
    assert merged.kv_transfer_params == LOADED | {"preempted_ns": [17]}
    [use] = await uses_of(merged)
    assert use is not None
    assert (use.blocks_moved, list(use.preempted_ns)) == (2, [17])


async def test_of_several_choices_each_adds_what_it_found():
    totals = ChoiceTotals()
    first, second = totals.add("0_r", LOADED), totals.add("1_r", LOADED | {"tokens_loaded": 2})
    uses = await uses_of(output([4], first), output([4], second, index=1), n=2)
    assert [(use.blocks_moved, use.tokens_pool) for use in uses if use] == [(2, 6), (4, 6)]


def core_output(name: str, *, is_first: bool, ends: bool = False) -> SimpleNamespace:
    reason = "length" if ends else None
    told = {"at": "its end"} if ends else None
    return SimpleNamespace(
        request_id=name,
        prefill_stats=object() if is_first else None,
        finish_reason=reason,
        kv_transfer_params=told,
    )


def test_first_outputs_alone_are_told_of_by_the_core():
    outputs = [
        core_output("begins", is_first=True), core_output("goes on", is_first=False),
        core_output("is over", is_first=True, ends=True),
    ]  # fmt: skip
    tell_first({0: SimpleNamespace(outputs=outputs)}, lambda name: {"of": name})
    assert [each.kv_transfer_params for each in outputs] == [{"of": "begins"}, None, {"at": "its end"}]


def loaded_request(side: SchedulerSide) -> SimpleNamespace:
    request = SimpleNamespace(
        request_id="r", kv_transfer_params={}, num_prompt_tokens=8, prompt_token_ids=[1] * 8
    )
    side.on_new_request(request)  # type: ignore[arg-type]
    kv = side.requests["r"]
    kv.tokens_loaded, kv.blocks_loaded, kv.blocks_local = 6, 2, 1
    pool.fetch_ms["r"], pool.failed_blocks["r"] = 1.5, 1
    return request


@pytest.mark.parametrize("had_output", [True, False])
def test_an_engine_that_copies_tells_of_its_loads_once(had_output):
    """Those that never had output tell at their end, as before."""
    side = SchedulerSide(4, 64, None)
    request = loaded_request(side)
    told = side.told_first("r") if had_output else {}
    at_the_end = side.finished(request)  # type: ignore[arg-type]
    wanted = LOADED | {"fetch_ms": 1.5, "failed_blocks": 1}
    assert (told, at_the_end) == ((wanted, {}) if had_output else ({}, wanted))
    assert "r" not in pool.fetch_ms
    assert "r" not in pool.failed_blocks


def test_what_is_loaded_behind_a_preemption_is_told_and_forgotten_too(monkeypatch):
    """Its first step found all of it in vLLM's own cache, and its first output said so."""
    attachment = SimpleNamespace(connected=True, is_sealed=lambda *_: True)
    monkeypatch.setattr(pool, "attachment", lambda: attachment)
    side, tokens = SchedulerSide(4, 64, None), [1] * 9
    params = {
        "seed": SEED, "pages": u32_bytes([0, 1]), "epochs": u64_bytes([1, 1]), "valid_tokens": 8,
        "hashes": b"".join(hash_blocks(SEED, pack_tokens(tokens), 4)),
    }  # fmt: skip
    request: Any = SimpleNamespace(
        request_id="r", num_prompt_tokens=9, num_tokens=9, prompt_token_ids=tokens, kv_transfer_params=params
    )
    side.on_new_request(request)
    assert side.num_new_matched_tokens(request, 8) == (0, False)
    assert side.told_first("r")["tokens_loaded"] == 0
    assert side.num_new_matched_tokens(request, 0) == (8, True)
    side.after_alloc(request, [1, 2], 8)
    pool.fetch_ms["r"], pool.failed_blocks["r"] = 1.5, 1  # the worker side
    side.loads_ended({"r"})
    told = side.finished(request)
    assert (told["tokens_loaded"], told["fetch_ms"], told["failed_blocks"]) == (8, 1.5, 1)
    assert not {"r"} & {*pool.fetch_ms, *pool.failed_blocks}


def test_a_block_of_which_another_stays_is_not_told_to_have_left():
    """vLLM says so of each block; the prompt tree would not send anybody there any more."""
    BlockStored, BlockRemoved = (
        type(name, (SimpleNamespace,), {}) for name in ("BlockStored", "BlockRemoved")
    )
    told: list[tuple[str, list[bytes]]] = []
    side = SchedulerSide(4, 64, SimpleNamespace(send=lambda kind, hashes: told.append((kind, hashes))))  # type: ignore[arg-type]
    side.ours_of.update({b"1": b"one", b"2": b"two"})  # type: ignore[dict-item]
    side.publish_events([BlockRemoved(block_hashes=[b"1", b"2"])], lambda block_hash: block_hash == b"1")
    side.publish_events([BlockStored(block_hashes=[b"1"])], lambda _: True)
    side.publish_events([BlockRemoved(block_hashes=[b"1"])], lambda _: False)
    assert told == [("removed", [b"two"]), ("stored", [b"one"]), ("removed", [b"one"])]
    assert not side.ours_of
