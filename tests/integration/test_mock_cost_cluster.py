"""Policy cost over real processes with mock engines: predictions reach the receipt, and a busy holder is left."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from shared.testing.cluster import Cluster
from tests.support import patience
from tests.support.mock_model import without_weights

FLAGS = patience.flags(
    {
        "worker": ["--mock-step-ms", "2", "--mock-prefill-tokens-per-s", "5000"],
        "scheduler": ["--disaggregation", "auto"],
    }
)


def ask(cluster, prompt, max_tokens=4, post=httpx.post):
    body = {"model": cluster.model_name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = post(f"{cluster.url}/v1/completions", json={**body, "quire_receipt": True}, timeout=120)
    assert answer.status_code == 200, answer.text + cluster.logs()
    return answer.json()["quire_receipt"]


@pytest.mark.slow
def test_predictions_reach_the_receipt_and_a_burst_on_one_prefix_is_spread(tmp_path):
    model = without_weights(tmp_path / "model")
    rng = random.Random(7)
    shared = [rng.randrange(100, 900) for _ in range(320)]
    with Cluster(model, log_dir=tmp_path / "logs", num_prefill=2, flags=FLAGS) as cluster:
        first = ask(cluster, shared)
        assert first["policy"] == "cost"
        assert first["times"]["ttft"]["predicted_ms"] > 60  # 320 tokens at 5,000 a second
        assert first["times"]["ttft"]["actual_ms"] > 60
        assert first["alternatives"]
        prompts = [[*shared, *(rng.randrange(100, 900) for _ in range(1_000))] for _ in range(6)]
        clients, at_once = [httpx.Client() for _ in prompts], threading.Barrier(len(prompts))

        def ask_at_once(prompt, client):
            at_once.wait(60)
            return ask(cluster, prompt, post=client.post)

        with ThreadPoolExecutor(len(prompts)) as pool:
            receipts = list(pool.map(ask_at_once, prompts, clients))
        for client in clients:
            client.close()
        used = {receipt["stages"][0]["instance"] for receipt in receipts}
        assert len(used) >= 2, [receipt["reason"] for receipt in receipts]
        assert sum(receipt["tokens"]["computed"] for receipt in receipts) < 6 * 1_320
        status = cluster["scheduler"].status()
        assert {one["has_model"] for one in status["instances"]} == {True}


@pytest.mark.slow
def test_prompts_that_come_again_and_are_gone_give_new_pages_a_price(tmp_path):
    model = without_weights(tmp_path / "model")
    rng = random.Random(8)
    prompts = [[rng.randrange(100, 900) for _ in range(512)] for _ in range(6)]
    flags = {**FLAGS, "worker": [*FLAGS["worker"], "--mock-kv-blocks", "40"]}  # each keeps one of them
    with Cluster(model, log_dir=tmp_path / "logs", num_prefill=1, flags=flags) as cluster:
        first_round = [ask(cluster, prompt)["reason"] for prompt in prompts]
        assert not any("pushes out" in reason for reason in first_round), first_round
        second_round = [ask(cluster, prompt)["reason"] for prompt in prompts * 2]
        assert any("what it pushes out costs" in reason for reason in second_round), second_round
