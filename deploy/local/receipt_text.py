"""A receipt's lines below its table: sources, predictions, the verdict on fetching, ways not taken."""

from typing import Any

SOURCES = {
    "engine": "cached by the engine",
    "local": "in its pages",
    "peer": "from another space",
    "dram": "from host memory",
    "remote": "from another host",
    "computed": "computed",
}
MAX_WAYS = 3  # that were not taken; the receipt itself has more


def lines(receipt: dict[str, Any]) -> list[str]:
    """Text only; parts that a receipt does not have are left out."""
    found = [_tokens(receipt), _times(receipt), _verdict(receipt), _placed(receipt)]
    ways = receipt.get("alternatives") or []
    found += [_way(way) for way in ways[:MAX_WAYS]]
    return [line for line in found if line]


def _tokens(receipt: dict[str, Any]) -> str:
    tokens = receipt.get("tokens") or {}
    parts = [f"{tokens[key]} {text}" for key, text in SOURCES.items() if tokens.get(key)]
    return f"prompt: {', '.join(parts)}" if parts else ""


def _times(receipt: dict[str, Any]) -> str:
    """Only what was predicted: the table has the rest."""
    parts = []
    for name, both in (receipt.get("times") or {}).items():
        predicted, actual = both.get("predicted_ms"), both.get("actual_ms")
        if predicted is None or (predicted < _SMALL_MS and (actual or 0.0) < _SMALL_MS):
            continue
        label = "first token" if name == "ttft" else name
        parts.append(
            f"{label} {predicted:.1f}/{actual:.1f}" if actual is not None else f"{label} {predicted:.1f}/-"
        )
    return f"predicted/actual ms: {', '.join(parts)}" if parts else ""


_SMALL_MS = 0.05


def _verdict(receipt: dict[str, Any]) -> str:
    plan = receipt.get("kv") or {}
    if not plan.get("source"):
        return ""
    held = f"{plan['source']} holds {plan['tokens']} tokens ({plan['path']})"
    return f"{held}: computing was quicker" if plan.get("recompute") else f"{held}: fetched"


def _placed(receipt: dict[str, Any]) -> str:
    why = ", ".join(str(receipt[key]) for key in ("placement", "policy", "reason") if receipt.get(key))
    return f"placed: {why.removesuffix('.')}; attempts: {receipt.get('attempts', 1)}"


def _way(way: dict[str, Any]) -> str:
    predicted = way.get("predicted_ms")
    expected = f" ({predicted:.1f} ms in all)" if predicted is not None else ""
    return f"not {way.get('instance')} for {way.get('stage')}{expected}: {way.get('why_not')}"
