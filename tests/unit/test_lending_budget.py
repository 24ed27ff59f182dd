"""Which budget a producer has by itself: a share of what was measured of its GPUs, none where nothing was."""

import json
from pathlib import Path

import pytest

from services.mempool import config
from services.mempool.core.lending_budgets import LendingBudgets
from services.mempool.core.lending_copies import LendingCopies
from services.mempool.core.wishes import Word
from shared.errors import SettingsError
from shared.lending.budget import AUTO_SHARE, Budget, auto_budget_bytes_per_s
from shared.lending.rules import AUTO_BUDGET, GB, LendingRules

A, B, C, D = "cuda:a", "cuda:b", "cuda:c", "cuda:d"
RESULT = Path(__file__).parents[2] / "loadtest/results/h200x2-producer-cost.json"
MOST_MEASURED_GB_PER_S = 321.0  # 64 MiB between two H200s by copy engines alone: decision 0032


def test_the_share_of_what_the_mover_could_measure_is_within_the_budget_that_was_measured_to_be_cheap():
    found = json.loads(RESULT.read_text())
    safe = found["settings"]["budget_gb_per_s"]
    assert found["metrics"]["engine_moved_gb_per_s"] <= safe
    assert found["metrics"]["engine_throughput_ratio"] >= 0.95
    assert found["metrics"]["engine_full_throughput_ratio"] < 0.95, (
        "without a budget it costs more than the bar"
    )
    assert auto_budget_bytes_per_s([A], {(A, B): MOST_MEASURED_GB_PER_S}) <= safe * GB
    assert auto_budget_bytes_per_s([A], {(A, B): found["metrics"]["copy_alone_gb_per_s"]}) < safe * GB
    assert AUTO_SHARE < 0.5


def test_a_gpus_rate_is_that_of_its_fastest_pair_and_several_gpus_have_as_many_times_the_slowest_of_them():
    rates = {(A, B): 20.0, (B, A): 200.0, (A, C): 1.0, (C, D): 900.0, (B, C): 40.0}
    assert auto_budget_bytes_per_s([A], rates) == int(AUTO_SHARE * 200 * GB)
    assert auto_budget_bytes_per_s([C], rates) == int(AUTO_SHARE * 900 * GB)
    assert auto_budget_bytes_per_s([A, B], rates) == int(AUTO_SHARE * 1 * GB * 2), (
        "its own link lends nothing"
    )


def test_host_memory_and_gpus_of_which_nothing_was_measured_have_no_budget():
    assert auto_budget_bytes_per_s([], {(A, B): 200.0}) == 0
    assert auto_budget_bytes_per_s([C], {(A, B): 200.0}) == 0
    assert auto_budget_bytes_per_s([A, B], {(A, B): 200.0}) == 0
    assert auto_budget_bytes_per_s([A], {(A, B): 0.0}) == 0


def made(bytes_per_s: int) -> tuple[LendingBudgets, LendingCopies]:
    copies = LendingCopies({}, lambda _: 1, lambda _: False, 50)
    return LendingBudgets(LendingRules(budget_bytes_per_s=bytes_per_s), copies), copies


def test_by_default_a_producers_budget_follows_what_was_measured_and_stays_when_that_is_gone():
    budgets, copies = made(LendingRules().budget_bytes_per_s)
    assert budgets.look(3, {A}, is_lending=False) is None
    assert copies.limit_of(3) == 0
    budgets.gb_per_s = {(A, B): 100.0}
    expected = int(AUTO_SHARE * 100 * GB)
    assert budgets.look(3, {A}, is_lending=False) == Word(
        "lending_budget", {"space": 3, "bytes_per_s": expected}
    )
    assert budgets.look(3, {A}, is_lending=True) is None, "said once"
    budgets.gb_per_s = {}
    assert budgets.look(3, {A}, is_lending=True) is None
    assert copies.limit_of(3) == expected
    assert copies.limit_of(4) == 0, "another producer's"


def test_who_lends_without_a_budget_is_named_in_the_log_once():
    budgets, copies = made(AUTO_BUDGET)
    for number, devices in ((1, {A}), (2, set[str]())):
        assert budgets.look(number, devices, is_lending=False) is None
        word = budgets.look(number, devices, is_lending=True)
        assert word is not None
        assert word.event == "lending_without_budget"
        assert budgets.look(number, devices, is_lending=True) is None
        assert copies.limit_of(number) == 0


@pytest.mark.parametrize("chosen", [0, 5 * GB])
def test_an_explicit_budget_stays_whatever_was_measured(chosen):
    budgets, copies = made(chosen)
    budgets.gb_per_s = {(A, B): 100.0}
    assert budgets.look(3, {A}, is_lending=True) is None
    assert copies.limit_of(3) == chosen


def test_a_budget_that_changes_keeps_what_is_owed():
    budget = Budget(0, 0)
    budget.spend(5_000, 0)
    budget.change(1_000, 100)
    assert budget.is_open(0), "nothing is owed of the time without a limit"
    budget.spend(2_000, 0)
    budget.change(500, 50)
    assert budget.opens_at_ms(0) == 4_000
    assert budget.spent_bytes == 7_000


def test_the_setting_is_automatic_by_default_and_takes_none_and_numbers():
    word = "--lending-budget-bytes-per-s"
    assert config.load([]).lending_budget_bytes_per_s == AUTO_BUDGET
    assert config.load([word, "-1"]).lending_budget_bytes_per_s == AUTO_BUDGET
    assert config.load([word, "0"]).lending_budget_bytes_per_s == 0
    with pytest.raises(SettingsError, match="budget_bytes_per_s"):
        config.load([word, "-2"])
