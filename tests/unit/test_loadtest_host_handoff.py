"""bench_host_handoff.py: its ratio, and that a block's words follow from its place in its prompt alone."""

import pytest

from loadtest.bench_host_handoff import metrics_from_samples
from loadtest.host_handoff_worker import chain, word_of
from loadtest.results import check_metrics


def test_the_handoff_is_compared_with_the_faster_raw_transfer():
    ways = {"handoff": 0.5, "raw spinning": 0.8, "raw napping": 0.4}
    found = metrics_from_samples(
        [{"way": way, "round": 0, "bytes": 10**9, "seconds": seconds} for way, seconds in ways.items()]
    )
    assert found["handoff_share_ratio"] == pytest.approx(0.8)
    assert found["handoff_ms"] == 500
    assert check_metrics(found) == []


def test_blocks_of_other_prompts_and_places_hold_other_words():
    words = [word_of(each) for prompt in ("a", "b") for each in chain(prompt, 50)]
    assert len(set(words)) == 100
    assert chain("a", 3) == chain("a", 50)[:3]
