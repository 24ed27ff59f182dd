"""bench_arxiv_long.py: its metrics, and that every engine gets the same requests."""

import argparse
import asyncio

import pytest

from loadtest.arxiv_engine import Load, requests
from loadtest.bench_arxiv_long import metrics_from_samples
from loadtest.results import check_metrics


def request(latency_ms: float) -> dict:
    return {
        "prompt_tokens": 90_000,
        "output_tokens": 200,
        "ttft_ms": latency_ms / 2,
        "latency_ms": latency_ms,
    }


def samples(engine: str, wall_s: float, latency_ms: float, asked: int = 2) -> list[dict]:
    done = [request(latency_ms), request(2 * latency_ms)]
    return [
        {"engine": engine, "kind": "offline", "asked": asked, "wall_s": wall_s, "requests": done},
        {
            "engine": engine,
            "kind": "online",
            "asked": asked,
            "wall_s": 9.0,
            "rate_per_s": 0.6,
            "requests": done,
        },
        {"engine": engine, "kind": "facts", "num_blocks": 1},
    ]


def test_ratios_above_one_are_better_in_both_parts():
    found = metrics_from_samples([*samples("paged16", 20.0, 1_000.0), *samples("token-major", 10.0, 500.0)])
    assert found["offline_token_major_requests_ratio"] == pytest.approx(2.0)
    assert found["online_token_major_latency_p50_ratio"] == pytest.approx(2.0)
    assert found["offline_paged16_requests_per_s"] == pytest.approx(0.1)
    assert check_metrics(found) == []


def test_a_part_that_did_not_finish_has_no_ratio():
    found = metrics_from_samples(
        [*samples("paged16", 20.0, 1_000.0), *samples("token-major", 10.0, 500.0, asked=3)]
    )
    assert found["offline_token_major_unfinished_requests"] == 1
    assert not any(key.endswith("_ratio") for key in found)


def test_every_engine_gets_the_same_requests_and_scale_shortens_them():
    def load(scale: float) -> Load:
        return Load(
            argparse.Namespace(
                seed=1, scale=scale, vocabulary=500, offline=4, online=5, rate=0.5, most_output=512
            )
        )

    assert load(400).long() == load(400).long()
    assert load(400).online() == load(400).online()
    lengths = sorted(len(prompt) for prompt, _ in load(1).long())
    assert 64_000 <= lengths[0] < lengths[-1] <= 128_000
    assert all(6 <= output <= 512 for _, _, output in load(1).online())


def options(**changes: float) -> argparse.Namespace:
    given = {
        "seed": 1, "scale": 4_000, "vocabulary": 500, "offline": 4, "online": 3, "rate": 100.0, "most_output": 64,
        "limit_s": 60.0,
    }  # fmt: skip
    return argparse.Namespace(**given | changes)


async def test_both_parts_come_with_the_times_of_every_request():
    async def stream(_name: str, _prompt: list[int], max_tokens: int):
        await asyncio.sleep(0.002)  # a clock's tick more than 1 ms
        for _ in range(max_tokens):
            yield 1

    offline, online = await requests(stream, options())
    assert (offline["kind"], online["kind"]) == ("offline", "online")
    assert len(offline["requests"]) == offline["asked"] == 4
    assert [each["prompt_tokens"] >= 8 for each in online["requests"]] == [True] * 3
    assert all(each["latency_ms"] >= each["ttft_ms"] >= 1 for each in online["requests"])
    assert len({each["arrival_s"] for each in online["requests"]}) == 3


@pytest.mark.slow
async def test_what_a_part_has_no_time_for_is_given_up_and_missing():
    ended = []

    async def stream(name: str, prompt: list[int], _max_tokens: int):
        try:
            if name != "warm" and len(prompt) > 20:
                await asyncio.sleep(60)
            yield 1
        finally:
            ended.append(name)

    offline, _ = await requests(stream, options(limit_s=1.0))
    late = offline["asked"] - len(offline["requests"])
    assert 0 < late < offline["asked"]
    assert sum(name.startswith("offline") for name in ended) == offline["asked"]
