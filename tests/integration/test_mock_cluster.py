"""shared/testing/cluster.py starts every service for real, and what comes out of it is the mock's oracle."""

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import pytest
from tokenizers import Tokenizer

from shared.observe.span_record import REQUEST_ID, SpanRecord
from shared.testing.cluster import Cluster
from shared.testing.mock_tokens import MockVocabulary
from tests.support import patience
from tests.support.mock_model import DEMO, without_weights

NUM_TOKENS = 1_500  # three seconds at least: whoever reads the first ones is in time to kill the worker
FLAGS = patience.flags({"worker": ["--mock-step-ms", "2"], "gateway": ["--resume-deadline-ms", "20000"]})
PROMPT = "The list type has these methods. " * 12


@pytest.fixture
def cluster(tmp_path, request):
    """By an indirect parameter: with that policy, and with its Redis given no more time than by default."""
    model = without_weights(tmp_path / "model")
    logs = tmp_path / "logs"
    policy = getattr(request, "param", "")
    more = (
        {"scheduler": ["--policy", policy]} if policy else {"gateway": ["--tree-lookup-deadline-ms", "5000"]}
    )
    flags = FLAGS | {section: [*FLAGS[section], *words] for section, words in more.items()}
    with Cluster(model, log_dir=logs, flags=flags) as running:
        yield running


def oracle(prompt, max_tokens):
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    vocabulary = MockVocabulary.of_model(str(DEMO))
    return ids, tokenizer.decode(vocabulary.tokens(ids, max_tokens))


def complete(cluster, ids, max_tokens=12, more=None):
    body = {
        "model": cluster.model_name,
        "prompt": ids,
        "max_tokens": max_tokens,
        "temperature": 0,
        **(more or {}),
    }
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text + cluster.logs()
    return answer.json()


@pytest.mark.slow
def test_a_whole_cluster_answers_with_the_oracle_and_leaves_nothing_behind(cluster):
    cases = [oracle(f"{i}. {PROMPT}", 12) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda case: complete(cluster, case[0]), cases))
    for (ids, text), answer in zip(cases, answers, strict=True):
        assert answer["choices"][0]["text"] == text
        assert answer["usage"]["prompt_tokens"] == len(ids)
    prefill, decode = cluster["prefill-0"], cluster["decode-0"]
    assert prefill.status()["num_accepted"] == decode.status()["num_accepted"] == 8
    assert decode.metric("quire_worker_kv_blocks_total") > 0
    for worker in (prefill, decode):  # answers are out before leases are released
        worker.wait_until(lambda worker=worker: not worker.status()["num_leases"], "leases end")

    again = complete(cluster, cases[0][0])
    assert again["choices"][0]["text"] == cases[0][1]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    cluster.stop()  # flushes the spans
    lines = [line for path in cluster.trace_dir.glob("*.jsonl") for line in path.read_bytes().splitlines()]
    spans = [msgspec.json.decode(line, type=SpanRecord) for line in lines]
    mine = [span for span in spans if span.attributes.get(REQUEST_ID) == again["id"]]
    assert len({span.trace_id for span in mine}) == 1
    named = {
        "gateway.receive",
        "tokenize",
        "tree.lookup",
        "schedule",
        "prefill",
        "prefill.queue",
        "prefill.compute",
    }
    named |= {"kv.fetch", "decode", "handoff.transfer", "decode.queue"}  # ARCHITECTURE's list but for events
    assert named <= {s.name for s in mine}


@pytest.mark.slow
def test_killed_workers_come_back_and_serve(cluster):
    ids, text = oracle(PROMPT, 12)
    for name in ("decode-0", "prefill-0", "mempool", "coordinator", "scheduler", "redis"):
        cluster[name].kill()
        cluster.restart(name)
        assert complete(cluster, ids)["choices"][0]["text"] == text, name


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["prompt_tree"], indirect=True)
def test_prompts_are_placed_by_their_prefixes_again_when_a_redis_that_stood_still_goes_on(cluster):
    """Found by cluster-locality: three slow look-ups in a row, and the gateway asked no tree any more, for good."""
    ids, text = oracle(PROMPT, 12)

    def has_hits():
        answer = complete(cluster, ids, more={"quire_receipt": True})
        assert answer["choices"][0]["text"] == text
        return "prefill-0 holds" in answer["quire_receipt"]["reason"]

    def until(wanted):
        end_s = time.monotonic() + 60
        while has_hits() != wanted:
            assert time.monotonic() < end_s
            time.sleep(0.05)

    until(True)
    cluster["redis"].signal(signal.SIGSTOP)
    try:
        assert not any(has_hits() for _ in range(4))
    finally:
        cluster["redis"].signal(signal.SIGCONT)
    until(True)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8}])
def test_a_stream_goes_on_with_the_same_tokens_though_its_decode_worker_is_killed(cluster, sampling):
    ids, text = oracle(PROMPT, NUM_TOKENS)
    body = {
        "model": cluster.model_name, "prompt": ids, "max_tokens": NUM_TOKENS, "stream": True, "return_token_ids": True,
        "quire_receipt": True, **sampling,
    }  # fmt: skip
    tokens, events = [], []
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=30) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                tokens += [t for choice in events[-1]["choices"] for t in choice.get("token_ids") or []]
                if len(events) == 2:
                    cluster["decode-0"].kill()
    assert not any("error" in event for event in events), events[-1]
    receipt = events[-1]["quire_receipt"]
    assert receipt["attempts"] >= 2, "the worker was killed in the middle"
    assert len(tokens) == NUM_TOKENS
    if sampling["temperature"] == 0:
        assert Tokenizer.from_file(str(DEMO / "tokenizer.json")).decode(tokens) == text
    first = receipt["stages"][0]
    assert first["tokens_engine"] + first["tokens_pool"] + first["tokens_computed"] == len(ids)
