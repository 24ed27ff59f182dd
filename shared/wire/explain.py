"""A placement as attributes of a span: the same at the scheduler and at the gateway."""

import msgspec

from shared.wire.placement import Placed

MAX_TEXT = 2_000


def explain(placed: Placed) -> dict[str, str | int | float]:
    """Why this placement, what it was expected to take, and what else there was."""
    out: dict[str, str | int | float] = {"quire.policy": placed.policy, "quire.reason": placed.reason}
    if placed.predicted is not None:
        for name, value in msgspec.structs.asdict(placed.predicted).items():
            out[f"quire.predicted.{name}"] = value
    if placed.predicted_ttft_ms is not None:
        out["quire.predicted.ttft_ms"] = placed.predicted_ttft_ms
    if placed.held_ms:
        out["quire.held_ms"] = placed.held_ms
    if placed.kv is not None:
        out["quire.kv.reach"] = placed.kv.reach
        if placed.kv.source:
            out["quire.kv.verdict"] = "recompute" if placed.kv.recompute else "fetch"
            out["quire.kv.source"] = placed.kv.source
            out["quire.kv.tokens"] = placed.kv.tokens
            out["quire.kv.path"] = placed.kv.path
    if placed.alternatives:
        lines = [
            f"{a.instance} ({a.stage}): "
            + (f"{a.predicted_ms:.1f} ms, " if a.predicted_ms is not None else "")
            + f"{a.hit_tokens} tokens held, {a.why}"
            for a in placed.alternatives
        ]
        out["quire.alternatives"] = "; ".join(lines)[:MAX_TEXT]
    return out
