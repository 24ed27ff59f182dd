"""What `quire chat` says of a receipt."""

from deploy.local.receipt_text import MAX_WAYS, lines


def test_every_part_has_its_line():
    receipt = {
        "placement": "disaggregated", "policy": "cost", "reason": "By cost: p1.", "attempts": 1,
        "tokens": {"engine": 64, "local": 0, "peer": 0, "dram": 0, "remote": 96, "computed": 33},
        "times": {
            "queue": {"predicted_ms": 0.0, "actual_ms": 0.01},
            "fetch": {"predicted_ms": 3.0, "actual_ms": 4.25},
            "transfer": {"predicted_ms": 2.0, "actual_ms": None},
            "ttft": {"predicted_ms": 12.5, "actual_ms": 14.0},
        },
        "kv": {"source": "p0", "tokens": 160, "path": "remote", "recompute": False},
        "alternatives": [{"instance": "p0", "stage": "prefill", "predicted_ms": 99.0, "why_not": "queue 80.0 ms more"}],
    }  # fmt: skip
    assert lines(receipt) == [
        "prompt: 64 cached by the engine, 96 from another host, 33 computed",
        "predicted/actual ms: fetch 3.0/4.2, transfer 2.0/-, first token 12.5/14.0",
        "p0 holds 160 tokens (remote): fetched",
        "placed: disaggregated, cost, By cost: p1; attempts: 1",
        "not p0 for prefill (99.0 ms in all): queue 80.0 ms more",
    ]


def test_a_receipt_of_an_older_gateway_has_its_placement():
    assert lines({"placement": "colocated", "attempts": 2}) == ["placed: colocated; attempts: 2"]


def test_computing_because_it_is_quicker_is_said():
    plan = {"source": "p0", "tokens": 160, "path": "peer", "recompute": True}
    assert "p0 holds 160 tokens (peer): computing was quicker" in lines({"kv": plan})


def test_few_of_many_ways_are_shown():
    way = {"instance": "p", "stage": "prefill", "predicted_ms": None, "why_not": "load 1.00"}
    assert len(lines({"alternatives": [way] * 9})) == 1 + MAX_WAYS
