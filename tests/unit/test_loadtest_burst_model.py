"""The model of a burst: nothing is lost in it, and it shows what its policies are for."""

import pytest

from loadtest.burst_expected import main, said
from loadtest.burst_fair import FairEngine
from loadtest.burst_model import ArrivalEngine, Job, Link, Machine
from loadtest.simulator.prices import LinearPrices
from shared.fair.rules import FairRules
from shared.fair.slices import FairSlices

PRICES = LinearPrices(step_base_ms=8.0, token_ms=0.02, context_ms=1e-4, kv_bytes_per_token=1 << 17)
MACHINE = Machine(PRICES, pages=600, block_tokens=16, slots=64, step_tokens=4_096, link=Link(100e9))
BURST = FairRules(
    slice_steps=8, quantum_tokens=1 << 20, patience_slices=64, spread_ms=100.0, chunk_tokens=128
)


def burst() -> list[Job]:
    """Forty requests in a second, in memory for about ten."""
    return [Job(f"r{n}", 25.0 * n, 400 + 37 * n % 300, 40 + 53 * n % 120) for n in range(40)]


@pytest.fixture(scope="module")
def runs():
    out = {}
    for name, rules in (("arrival", None), ("burst", BURST), ("tokens", FairRules(patience_slices=64))):
        jobs = burst()
        engine = ArrivalEngine(MACHINE) if rules is None else FairEngine(MACHINE, FairSlices(rules))
        out[name] = (jobs, engine, said(jobs, engine.run(jobs)))
    return out


@pytest.mark.parametrize("name", ["arrival", "burst", "tokens"])
def test_every_request_ends_with_its_tokens_and_every_page_comes_back(runs, name):
    jobs, engine, _ = runs[name]
    assert all(job.made == job.output_tokens and job.end_ms >= job.first_ms >= job.arrival_ms for job in jobs)
    assert engine.free == MACHINE.pages
    assert not engine.running
    assert not engine.waiting


def test_fair_slices_compute_nothing_twice_and_the_order_of_arrival_does(runs):
    assert runs["burst"][2]["again"] == runs["tokens"][2]["again"] == 0
    assert runs["arrival"][2]["preempted"] > 0
    assert runs["burst"][2]["out_gb"] > 0


def test_the_rules_of_a_burst_answer_soon_and_end_hardly_later(runs):
    arrival, fair, tokens = (runs[name][2] for name in ("arrival", "burst", "tokens"))
    assert arrival["ttft_p90_ms"] > 4 * fair["ttft_p90_ms"]
    assert fair["rct_ms"] < 1.15 * arrival["rct_ms"]
    assert fair["rct_ms"] < tokens["rct_ms"]


def test_without_contention_the_order_is_that_of_arrival():
    jobs, others = ([Job(f"r{n}", 900.0 * n, 400, 40) for n in range(6)] for _ in range(2))
    ArrivalEngine(MACHINE).run(jobs)
    FairEngine(MACHINE, FairSlices(BURST)).run(others)
    assert [job.end_ms for job in jobs] == [job.end_ms for job in others]


@pytest.mark.slow
def test_the_command_prints_a_line_a_run(capsys):
    assert main(["--burst-s", "0.5", "--seeds", "1", "--steps", "eager"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[4] for line in lines] == ["fcfs", "cfs_dram", "cfs_peer"]
    assert all("rct 1.0" in line for line in lines)
