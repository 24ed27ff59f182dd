"""bench_fair_shares: shares over windows, metrics from samples, and counting tokens as they come."""

import argparse

import pytest

from loadtest import bench_fair_shares
from loadtest.bench_fair_shares import TENANTS, metrics_from_samples, samples_of, share_errors
from loadtest.fair_tenants import Crowd, Tally, _Counting
from loadtest.results import check_metrics

NAMES = [one.name for one in TENANTS]
WEIGHTS = {one.name: one.weight for one in TENANTS}


def second(at: int, gold: int, silver: int, bronze: int) -> dict:
    return {"kind": "second", "at_s": at, "tokens": {"gold": gold, "silver": silver, "bronze": bronze}}


def test_errors_are_relative_to_what_the_weights_say_in_every_window():
    rows = [second(at, 40, 20, 10) for at in range(4)]
    assert share_errors(rows, WEIGHTS, 4) == [dict.fromkeys(NAMES, pytest.approx(0.0))]
    rows[3] = second(3, 40, 20, 0)
    (first, last) = share_errors(rows, WEIGHTS, 3)
    assert first["bronze"] == pytest.approx(0.0)
    assert last["bronze"] == pytest.approx(abs(20 / 200 * 7 - 1))
    with pytest.raises(ValueError, match="no window"):
        share_errors(rows, WEIGHTS, 5)


def run() -> tuple[argparse.Namespace, Tally]:
    tally = Tally()
    for at in range(50):
        for name in NAMES:
            tally.tokens[at, name] = int(100 * WEIGHTS[name])
    tally.tokens[45, "bronze"] = 160
    tally.ended.update(gold=40, silver=20, bronze=10)
    tally.shed.update(gold=10, silver=30, bronze=40)
    return argparse.Namespace(warm_s=10.0, seconds=40.0), tally


def test_metrics_are_made_of_the_samples_alone():
    args, tally = run()
    samples = samples_of(args, 2.0, tally)
    assert [row["at_s"] for row in samples[2:]] == list(range(10, 50))
    found = metrics_from_samples(samples)
    assert check_metrics(found) == []
    assert found["windows_count"] == 11
    assert found["overload_ratio"] == 3.0
    assert found["shed_ratio"] == pytest.approx(80 / 300)
    assert found["worst_share_error_ratio"] == found["bronze_worst_share_error_ratio"]
    assert found["worst_share_error_ratio"] == pytest.approx(3060 / 21060 * 7 - 1)
    assert found["failed_requests"] == 0
    assert bench_fair_shares.NAME == "fair-shares"


def test_tokens_count_when_they_come_and_a_prompt_with_its_first():
    crowd = Crowd(["http://127.0.0.1:1"], "m", TENANTS, 32, 48)
    reply = _Counting(crowd, "gold", 32)
    event = b'data: {"choices":[{"text":"a","token_ids":[5]}]}\n\n'
    reply.pieces.append((0.5, b'data: {"choices":[{"text":"","token_ids":[]}]}\n\n' + event[:20]))
    assert not crowd.tally.tokens
    reply.pieces.append((1.5, event[20:] + event))
    reply.pieces.append((2.5, event + b"data: [DONE]\n\n"))
    assert dict(crowd.tally.tokens) == {(1, "gold"): 34, (2, "gold"): 1}
    assert reply.body.endswith(b"[DONE]\n\n")
    crowd.close()
