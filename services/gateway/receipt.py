"""The receipt of one request: where every token's KV came from, what it was expected to take, and what it took."""

from typing import Any

import msgspec

from services.gateway import metrics
from services.gateway.call import Call
from shared.wire.placement import Alternative, Placed
from shared.wire.requests import StageReceipt


def receipt_of(call: Call) -> dict[str, Any]:
    """One call's receipt, as JSON. Only for whoever asked for it."""
    placed = call.placed
    out: dict[str, Any] = {
        "request_id": call.request_id,
        "attempts": call.flow.attempt,
        "trace_id": call.span.traceparent[3:35],
        "stages": [msgspec.structs.asdict(receipt) for receipt in call.receipts],
    }
    if call.receipts:
        out["tokens"] = tokens_by_source(call.receipts[0])
    if placed is None:
        return out
    out |= {
        "placement": placed.kind,
        "policy": placed.policy,
        "reason": placed.reason,
        "prefill_hit_tokens": placed.prefill_hit_tokens,
        "decode_hit_tokens": placed.decode_hit_tokens,
        "predicted_ttft_ms": placed.predicted_ttft_ms,
        "times": times(call, placed),
        "alternatives": [_alternative(each) for each in placed.alternatives],
    }
    if placed.kv is not None:
        out["kv"] = msgspec.structs.asdict(placed.kv)
    return out


def tokens_by_source(first: StageReceipt) -> dict[str, int]:
    """The prompt's tokens, each counted once, as the first stage found them.

    engine: its own cache; local: pages of its own space; peer: another space of its mempool; dram: host memory behind
    its own; remote: another host's mempool; computed: nowhere.
    """
    brought = first.tokens_peer + first.tokens_dram + first.tokens_remote
    return {
        "engine": first.tokens_engine,
        "local": max(0, first.tokens_pool - brought),
        "peer": first.tokens_peer,
        "dram": first.tokens_dram,
        "remote": first.tokens_remote,
        "computed": first.tokens_computed,
    }


def times(call: Call, placed: Placed) -> dict[str, dict[str, float | None]]:
    """By stage, what the scheduler expected and what the workers and the gateway measured, in ms."""
    first = call.receipts[0] if call.receipts else None
    decode = next((r for r in call.receipts if r.stage == "decode"), None)
    predicted = placed.predicted
    actual: dict[str, float | None] = {
        "queue": first.queue_ms if first is not None else None,
        "fetch": first.fetch_ms if first is not None else None,
        "compute": _compute_ms(first) if first is not None else None,
        "transfer": decode.fetch_ms if decode is not None else None,
        "step": (call.receipts[-1].step_ms or None) if call.receipts else None,
        "ttft": _ttft_ms(call),
    }
    expected: dict[str, float | None] = dict.fromkeys(actual)
    if predicted is not None:
        expected = {
            "queue": predicted.queue_ms,
            "fetch": predicted.fetch_ms,
            "compute": predicted.compute_ms,
            "transfer": predicted.transfer_ms if placed.prefill is not None else None,
            "step": predicted.step_ms or None,
            "ttft": placed.predicted_ttft_ms,
        }
    return {name: {"predicted_ms": expected[name], "actual_ms": actual[name]} for name in actual}


def _compute_ms(first: StageReceipt) -> float | None:
    """Of the prompt: a colocated stage computes its output too."""
    return first.compute_ms if first.stage == "prefill" else first.prefill_ms or None


def note_prediction(call: Call) -> None:
    """First token: how right the scheduler was."""
    placed, actual_ms = call.placed, _ttft_ms(call)
    if placed is not None and placed.predicted_ttft_ms and actual_ms is not None:
        metrics.TTFT_PREDICTION.observe(actual_ms / placed.predicted_ttft_ms)


def _ttft_ms(call: Call) -> float | None:
    if not call.first_ns or not call.placed_ns:
        return None
    return round((call.first_ns - call.placed_ns) / 1e6, 3)


def _alternative(each: Alternative) -> dict[str, Any]:
    return {
        "instance": each.instance,
        "stage": each.stage,
        "hit_tokens": each.hit_tokens,
        "predicted_ms": each.predicted_ms,
        "why_not": each.why,
    }
