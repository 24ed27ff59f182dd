"""Which settings go with fair slices."""

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from shared.engine.interface import EngineLoad
from shared.engine.worker_config import WorkerSettings, fair_rules, for_role
from shared.engine.worker_shell import WorkerShell
from shared.errors import SettingsError
from shared.fair.rules import FairRules


def made(tmp_path, **changes) -> WorkerSettings:
    (tmp_path / "config.json").write_text("{}")
    found = WorkerSettings(model_dir=str(tmp_path), mempool_socket="/run/pool", **changes)
    return for_role(found, role="decode", instance="d", port=7000)


def test_the_order_is_that_of_arrival_unless_told_otherwise(tmp_path):
    assert made(tmp_path).local_policy == "fcfs"


def test_rules_of_slices_come_from_the_settings(tmp_path):
    asked = {"fair_slice_steps": 5, "fair_quantum_tokens": 64, "fair_patience_slices": 7}
    settings = made(tmp_path, local_policy="cfs", fair_max_switch_share=0.2, **asked)
    rules = FairRules(**fair_rules(settings))
    assert (rules.slice_steps, rules.max_switch_share) == (5, 0.2)
    assert (rules.quantum_tokens, rules.patience_slices) == (64, 7)


@pytest.mark.parametrize(
    ("purpose", "expected"), [("shares", (1, 32, 0.0)), ("bursts", (1 << 20, 128, 500.0))]
)
def test_what_slices_are_for_says_their_rules_and_what_is_set_beside_it_goes_first(
    tmp_path, purpose, expected
):
    def rules(**more) -> tuple:
        found = FairRules(**fair_rules(made(tmp_path, local_policy="cfs", fair_for=purpose, **more)))
        return found.quantum_tokens, found.patience_slices, found.spread_ms

    assert rules() == expected
    assert rules(fair_spread_ms=0.0) == (*expected[:2], 0.0)
    assert rules(fair_quantum_tokens=64, fair_patience_slices=7) == (64, 7, expected[2])


@pytest.mark.parametrize(
    "changes", [{"kv_cache": "copy"}, {"mempool_socket": ""}, {"transfer_mode": "by-layer"}]
)
def test_slices_need_the_pools_pages_and_whole_prompts(tmp_path, changes):
    settings = made(tmp_path, local_policy="cfs")
    with pytest.raises(SettingsError, match=r"worker\.local_policy"):
        for_role(msgspec.structs.replace(settings, **changes), role="decode", instance="d", port=7000)


@pytest.mark.parametrize(
    "changes",
    [
        {"fair_slice_steps": 0},
        {"fair_quantum_tokens": 0},
        {"fair_patience_slices": 0},
        {"fair_spread_ms": -2.0},
        {"fair_max_switch_share": -0.1},
        {"fair_max_switch_share": 1.1},
    ],
)
def test_slices_have_steps_and_a_share(tmp_path, changes):
    with pytest.raises(SettingsError, match="fair_"):
        made(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "working"),
    [
        ({"kv_cache": "copy"}, "kv_cache = pages"),
        ({"kv_layout": "token-major"}, "kv_layout = cross-layer"),
        ({"transfer_mode": "by-layer"}, "transfer_mode = by-request-agg"),
    ],
)
def test_what_far_blocks_do_not_go_with_is_refused_with_a_setting_that_works(tmp_path, changes, working):
    with pytest.raises(SettingsError, match=rf"worker\.far_bytes.*{working}"):
        made(tmp_path, far_bytes=1 << 30, **changes)


def test_far_blocks_go_with_both_orders(tmp_path):
    for policy in ("fcfs", "cfs"):
        assert made(tmp_path, far_bytes=1 << 30, local_policy=policy).far_bytes == 1 << 30


def test_what_waits_in_front_of_the_engine_changes_no_other_number_of_its_load():
    load = EngineLoad(
        num_running=4, num_waiting=3, num_preempted=9, num_kept_tokens=70, num_recomputed_tokens=1
    )
    front = SimpleNamespace(num_waiting=lambda prompts: 2)
    kv = SimpleNamespace(used_share=lambda load: load.kv_used_share)
    worker = SimpleNamespace(engine=SimpleNamespace(load=lambda: load), front=front, kv=kv)
    assert WorkerShell.load(worker) == replace(load, num_waiting=5)
