"""`transfer_mode = by-layer`: prompts leave prefill's space while they are computed; tokens are stock vLLM's.

In both layouts in which a layer's part of a page lies in one piece, or in two: with a block table and without one.
"""

import json
import time
from itertools import product

import httpx
import pytest

from tests.integration.test_exactness import CASES, assert_same, complete, stage
from tests.support.local_cluster import LocalCluster

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

NAMES = ["greedy-5", "greedy-64", "seeded-100", "greedy-777", "greedy-1500", "n3-short"]


@pytest.fixture(scope="module", params=["cross-layer", "layer-major"])
def cluster(request, tmp_path_factory):
    flags = ("--set", "dtype=float32", "--set", "kv_space=own", "--set", "transfer_mode=by-layer")
    env = {"QUIRE_WORKER_KV_LAYOUT": request.param}
    with LocalCluster(tmp_path_factory.mktemp(request.param) / "home", *flags, env=env) as cluster:
        yield cluster


def test_tokens_equal_stock_and_nothing_is_pulled_when_the_prompt_is_done(reference, cluster):
    with httpx.Client(base_url=cluster.url, timeout=180) as client:
        answers = {name: complete(client, CASES[name], reference[name]) for name in NAMES}
    for name, answer in answers.items():
        assert_same(name, answer, reference[name])
        decode = stage(answer, "decode")
        assert decode is not None
        is_moved = decode["tokens_computed"] == 1 or CASES[name]["params"].get("n", 1) > 1
        assert is_moved, f"{name}: {decode}\n{cluster.evidence(answer['id'])}"
    pool = cluster.pool_at_rest()
    counters = pool["counters"]
    assert counters["blocks_by_layer"] > 70
    assert not counters.get("blocks_by_layer_lost")
    assert counters.get("blocks_pulled", 0) < 10, counters
    assert pool["num_leases"] == 0
    assert all(space["pages_by_state"]["quarantined"] == 0 for space in pool["spaces"])


def test_the_trace_shows_layers_arriving_while_later_ones_are_computed(cluster, reference):
    """Of one of some prompts: on a busy machine a short one may be computed before anything is copied."""
    seen = {}
    with httpx.Client(base_url=cluster.url, timeout=180) as client:
        for name, turn in product(("greedy-1280", "greedy-1000", "greedy-640"), range(3)):
            prompt = reference[name]["prompt"]
            turned = {**reference[name], "prompt": [*prompt[turn:], *prompt[:turn]]}  # that no cache knows
            request_id = complete(client, CASES[name], turned)["id"]
            until_s = time.monotonic() + 30
            while time.monotonic() < until_s:
                computing, layers = spans_of(cluster, request_id)
                seen[name, turn] = layers
                is_there = computing is not None and len(layers) > 1
                if is_there and layers[0]["attributes"]["layers.first"] == 0:
                    if any(span["end_ns"] < computing["end_ns"] for span in layers):
                        return
                    break
                time.sleep(0.3)
    raise AssertionError(f"every layer arrived after its prompt was computed, or is in no trace: {seen}")


def spans_of(cluster, request_id):
    """Of a request, as far as they are written yet: its prefill's computing, and layers in their order."""
    spans = []
    for path in cluster.home.rglob("*.jsonl"):
        whole = path.read_text().rpartition("\n")[0]  # the last line may be on its way
        spans += [json.loads(line) for line in whole.splitlines()]
    computing = next(
        (
            span
            for span in spans
            if span["name"] == "prefill.compute" and span["attributes"].get("quire.request_id") == request_id
        ),
        None,
    )
    layers = [
        span
        for span in spans
        if computing and span["name"] == "mempool.layer" and span["trace_id"] == computing["trace_id"]
    ]
    return computing, sorted(layers, key=lambda span: span["start_ns"])
