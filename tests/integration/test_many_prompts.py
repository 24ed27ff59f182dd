"""More prompts in one request than its cluster has places: they take turns."""

import json

import httpx
import pytest

from shared.testing.cluster import Cluster
from tests.integration.test_mock_cluster import FLAGS, oracle
from tests.support.mock_model import without_weights

NUM_PROMPTS, MAX_TOKENS = 14, 120
# eight places in all, and answers that take as long as a request may wait for one
FEW = FLAGS | {"worker": ["--mock-step-ms", "10", "--max-num-seqs", "2"]}


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True])
def test_a_request_with_more_prompts_than_places_is_answered_whole(tmp_path, streams):
    cases = [
        oracle(f"{number}. The list type has these methods.", MAX_TOKENS) for number in range(NUM_PROMPTS)
    ]
    with Cluster(without_weights(tmp_path / "model"), log_dir=tmp_path / "logs", flags=FEW) as cluster:
        body = {
            "model": cluster.model_name, "prompt": [ids for ids, _ in cases], "max_tokens": MAX_TOKENS,
            "temperature": 0, "stream": streams,
        }  # fmt: skip
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text + cluster.logs()
        if streams:
            events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            assert events.pop() == "[DONE]", answer.text[-500:]
            texts = [""] * NUM_PROMPTS
            for event in map(json.loads, events):
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
        else:
            texts = [choice["text"] for choice in answer.json()["choices"]]
    assert texts == [text for _, text in cases]
