"""The receipt of one request: where every token's KV came from, what it was expected to take, and what it took."""

from typing import Any

import msgspec

from services.gateway import metrics
from services.gateway.call import Call
from shared.wire.placement import Alternative, Placed
from shared.wire.requests import StageReceipt

STAGES = ("queue", "fetch", "compute", "transfer", "step")
SMALL_MS = 1.0  # ratios to less say nothing: noise is as large


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
    """By stage, what the scheduler expected and what the workers and the gateway measured, in ms.

    hold: how long the scheduler kept the request until decode had room in its pages, before it was placed; expected by
    nobody, and not in ttft, which begins with the placement. Of a request that went on at another instance: of its last
    placement alone, and no ttft. An engine computes prompts that wait together, so what was expected as queue comes, as
    a rule, as compute.
    """
    expected, took = _expected_ms(placed), _took_ms(call)
    out: dict[str, dict[str, float | None]] = {"hold": {"predicted_ms": None, "actual_ms": placed.held_ms}}
    for name, predicted_ms, actual_ms in zip(STAGES, expected, took, strict=True):
        out[name] = {"predicted_ms": predicted_ms, "actual_ms": actual_ms}
    ttft_ms = placed.predicted_ttft_ms if placed.predicted is not None else None
    out["ttft"] = {"predicted_ms": ttft_ms, "actual_ms": _ttft_ms(call)}
    return out


def _expected_ms(placed: Placed) -> tuple[float | None, ...]:
    """Of STAGES, by the scheduler."""
    expected = placed.predicted
    if expected is None:
        return (None,) * len(STAGES)
    transfer_ms = expected.transfer_ms if placed.prefill is not None else None
    return expected.queue_ms, expected.fetch_ms, expected.compute_ms, transfer_ms, expected.step_ms or None


def _took_ms(call: Call) -> tuple[float | None, ...]:
    """Of STAGES, by the receipts that there are of its placement."""
    receipts = call.receipts[call.num_earlier_receipts :]
    if not receipts:
        return (None,) * len(STAGES)
    first, last = receipts[0], receipts[-1]
    transfer_ms = next((r.fetch_ms for r in receipts if r.stage == "decode"), None)
    return first.queue_ms, first.fetch_ms, _compute_ms(first), transfer_ms, last.step_ms or None


def _compute_ms(first: StageReceipt) -> float | None:
    """Of the prompt: a colocated stage computes its output too."""
    return first.compute_ms if first.stage == "prefill" else first.prefill_ms or None


def note_prediction(call: Call) -> None:
    """At a call's end, whoever asked for its receipt: how right the scheduler was of its first token and its stages.

    A call that went on behind tokens of an earlier attempt says nothing: its receipts are of several placements.
    Where both times are below SMALL_MS there was no such stage. Cost: 10 us, once.
    """
    placed, ttft_ms = call.placed, _ttft_ms(call)
    if placed is None or ttft_ms is None:
        return
    if placed.predicted_ttft_ms:
        metrics.TTFT_PREDICTION.observe(ttft_ms / placed.predicted_ttft_ms)
    if placed.predicted is None:
        return
    expected, took = _with_one_prompt(_expected_ms(placed)), _with_one_prompt(_took_ms(call))
    pairs = zip(metrics.STAGE_PREDICTION, expected, took, strict=True)
    for tally, predicted_ms, actual_ms in pairs:
        if predicted_ms is None or actual_ms is None:
            continue
        if predicted_ms >= SMALL_MS or actual_ms >= SMALL_MS:
            tally.observe(actual_ms / (predicted_ms if predicted_ms > SMALL_MS else SMALL_MS))


def _with_one_prompt(of_stages: tuple[float | None, ...]) -> tuple[float | None, ...]:
    """Of metrics.PREDICTED_STAGES: queue and compute in one.

    The scheduler expects a prompt to wait while those before it are computed. An engine takes them all into its steps
    at once: none waits in its queue, and each computes for as long as all do.
    """
    queue_ms, fetch_ms, compute_ms, *rest = of_stages
    prompt_ms = None if queue_ms is None or compute_ms is None else queue_ms + compute_ms
    return (prompt_ms, fetch_ms, *rest)


def _ttft_ms(call: Call) -> float | None:
    """From its last placement. None: no token yet, or the first came by an earlier one."""
    if not call.first_ns or not call.placed_ns or call.first_ns < call.placed_ns:
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
