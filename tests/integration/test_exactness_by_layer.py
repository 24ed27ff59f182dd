"""`transfer_mode = by-layer`: prompts leave prefill's space while they are computed; tokens are stock vLLM's."""

import json
import time

import httpx
import pytest

from tests.integration.test_exactness import CASES, assert_same, complete, stage
from tests.support.local_cluster import LocalCluster

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

NAMES = ["greedy-5", "greedy-64", "seeded-100", "greedy-777", "greedy-1500", "n3-short"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    flags = ("--set", "dtype=float32", "--set", "kv_space=own", "--set", "transfer_mode=by-layer")
    with LocalCluster(tmp_path_factory.mktemp("layers") / "home", *flags) as cluster:
        yield cluster


def test_tokens_equal_stock_and_nothing_is_pulled_when_the_prompt_is_done(reference, cluster):
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        answers = {name: complete(client, CASES[name], reference[name]) for name in NAMES}
    for name, answer in answers.items():
        assert_same(name, answer, reference[name])
        decode = stage(answer, "decode")
        assert decode is not None
        assert decode["tokens_computed"] == 1 or CASES[name]["params"].get("n", 1) > 1, (name, decode)
    pool = cluster.pool()
    counters = pool["counters"]
    assert counters["blocks_by_layer"] > 70
    assert not counters.get("blocks_by_layer_lost")
    assert counters.get("blocks_pulled", 0) < 10, counters
    assert pool["num_leases"] == 0
    assert all(space["pages_by_state"]["quarantined"] == 0 for space in pool["spaces"])


def test_the_trace_shows_layers_arriving_while_later_ones_are_computed(cluster, reference):
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        complete(client, CASES["greedy-1280"], reference["greedy-1280"])
    until_s = time.monotonic() + 10
    layers = []
    while not layers and time.monotonic() < until_s:
        time.sleep(0.3)
        spans = [
            json.loads(line)
            for path in cluster.home.rglob("*.jsonl")
            for line in path.read_text().splitlines()
        ]
        layers = longest_trace(spans)
    assert layers, "no span of a layer"
    computing = next(
        s for s in spans if s["name"] == "prefill.compute" and s["trace_id"] == layers[0]["trace_id"]
    )
    early = [s for s in layers if s["end_ns"] < computing["end_ns"]]
    assert len(layers) > 1
    assert early, "every layer arrived after the prompt was computed"
    assert layers[0]["attributes"]["layers.first"] == 0


def longest_trace(spans):
    """Spans of layers in the trace that has the most of them, in order."""
    found = {}
    for span in spans:
        if span["name"] == "mempool.layer":
            found.setdefault(span["trace_id"], []).append(span)
    return sorted(max(found.values(), key=len, default=[]), key=lambda span: span["start_ns"])
