"""Which settings go with woven steps."""

import pytest

from shared.engine.worker_config import WorkerSettings, for_role
from shared.errors import SettingsError


def made(tmp_path, **changes) -> WorkerSettings:
    (tmp_path / "config.json").write_text("{}")
    found = WorkerSettings(model_dir=str(tmp_path), mempool_socket="/run/pool", **changes)
    return for_role(found, role="prefill", instance="p", port=7000)


def test_unless_told_otherwise_ranks_add_up_in_vllms_way(tmp_path):
    assert made(tmp_path).weave == "off"
    assert made(tmp_path).weave_sms == 0


@pytest.mark.parametrize(
    "changes", [{"kv_layout": "token-major"}, {"kv_layout": "layer-major"}, {"transfer_mode": "by-layer"}]
)
def test_a_layer_that_is_computed_twice_a_step_is_refused_where_each_counts_once(tmp_path, changes):
    assert made(tmp_path, weave="fuse", **changes).weave == "fuse"
    with pytest.raises(SettingsError, match=r"worker\.weave: 'full'.*try fuse"):
        made(tmp_path, weave="full", **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"weave_sms": -1},
        {"weave_sms": 33},
        {"weave_min_tokens": -1},
        {"weave_multicast": True},
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_name(tmp_path, changes):
    with pytest.raises(SettingsError, match=f"worker.{next(iter(changes))}"):
        made(tmp_path, **changes)
