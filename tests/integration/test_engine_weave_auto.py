"""worker.weave = auto: measured once beside stock vLLM, and by role; else vLLM's own way, in one line of the log.

In process: it imports vLLM.
"""

import json
import logging
from types import SimpleNamespace

import msgspec
import pytest

from shared.engine import weave_auto, weave_settings
from shared.engine.weave_settings import weave_arguments
from shared.engine.worker_config import WorkerSettings, for_role
from shared.weave.threshold import Timing

LLAMA = {"architectures": ["LlamaForCausalLM"]}


def made(tmp_path, model=LLAMA, **changes) -> WorkerSettings:
    (tmp_path / "config.json").write_text(json.dumps(model))
    found = WorkerSettings(
        model_dir=str(tmp_path),
        mempool_socket="/run/pool",
        **{"tensor_parallel_size": 2, "weave": "auto"} | changes,
    )
    return for_role(found, role="prefill", instance="p", port=7000)


def said(caplog) -> list[str]:
    """What weaving said to the log."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("shared.engine.weave")]


class TwoGpus:
    """What auto asks of the platform."""

    is_linked = True

    def is_cuda(self):
        return True

    def is_cpu(self):
        return False

    def get_device_name(self):
        return "NVIDIA H200"

    def device_id_to_physical_device_id(self, number):
        return number

    def is_fully_connected(self, numbers):
        assert numbers == [0, 1]
        return self.is_linked


PAYS = [
    *(Timing(num_tokens=n, off_us=100.0, fuse_us=us) for n, us in ((1, 101.0), (8, 97.0), (32, 90.0))),
    *(Timing(num_tokens=n, off_us=1000.0, fuse_us=fuse, full_us=full)
      for n, fuse, full in ((512, 1100.0, 1200.0), (1024, 970.0, 960.0), (2048, 960.0, 900.0))),
]  # fmt: skip
LOSES = [Timing(num_tokens=timing.num_tokens, off_us=100.0, fuse_us=120.0, full_us=130.0) for timing in PAYS]


@pytest.fixture
def gpus(monkeypatch):
    """Two of them, and what the short engines would measure; its `asked` counts how often they were started."""
    found = SimpleNamespace(platform=TwoGpus(), timings=PAYS, asked=0)

    def measure(settings):
        found.asked += 1
        return found.timings

    monkeypatch.setattr(weave_auto, "current_platform", found.platform)
    monkeypatch.setattr(weave_settings, "current_platform", found.platform)
    monkeypatch.setattr(weave_auto, "_measure", measure)
    return found


def auto(tmp_path, role="prefill", **changes):
    settings = msgspec.structs.replace(
        made(tmp_path, state_dir=str(tmp_path / "state"), **changes), role=role
    )
    return weave_arguments(settings, {})


@pytest.mark.parametrize(
    ("role", "mode", "fuse", "full"),
    [("prefill", "full", 1024, 2048), ("colocated", "full", 1024, 2048), ("decode", "fuse", 8, 0)],
)  # fmt: skip
def test_auto_weaves_prompts_and_fuses_decodes_from_where_it_was_measured_to_win(
    tmp_path, gpus, caplog, role, mode, fuse, full
):
    with caplog.at_level(logging.INFO):
        found = auto(tmp_path, role)
    hosted = found["additional_config"]["quire_weave"]
    assert (hosted["mode"], hosted["fuse_min_tokens"], hosted["min_tokens"]) == (mode, fuse, full)
    assert found["compilation_config"]["mode"] == 0
    (line,) = said(caplog)
    assert line.startswith(f"worker.weave = auto: steps are fused from {fuse} tokens on")


def test_auto_measures_once_and_another_role_reads_the_same_times(tmp_path, gpus):
    first = auto(tmp_path)
    assert auto(tmp_path) == first
    auto(tmp_path, "decode")
    assert gpus.asked == 1
    auto(tmp_path, weave_sms=8)
    assert gpus.asked == 2, "other sizes are measured anew"


@pytest.mark.parametrize("role", ["prefill", "decode", "colocated"])
def test_auto_is_vllms_own_way_where_it_loses_and_where_nothing_could_be_measured(
    tmp_path, gpus, caplog, role
):
    gpus.timings = LOSES
    with caplog.at_level(logging.INFO):
        assert auto(tmp_path, role) == {}
    assert "win nothing here" in said(caplog)[0]
    gpus.timings, gpus.asked = [], 0
    with caplog.at_level(logging.INFO):
        assert auto(tmp_path, role, weave_sms=4) == auto(tmp_path, role, weave_sms=4) == {}
    assert gpus.asked == 1, "a measurement that fails is not tried at every start"
    assert "nothing was measured" in said(caplog)[-1]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"state_dir": ""}, "no worker.state_dir"),
        ({"calibrate": "off"}, "worker.calibrate = off"),
        ({"transfer_mode": "by-layer"}, "each layer counts once"),
        ({"kv_layout": "token-major"}, "each layer counts once"),
    ],
)
def test_auto_measures_nothing_where_it_must_not_and_says_why(tmp_path, gpus, caplog, changes, says):
    settings = made(tmp_path, **{"state_dir": str(tmp_path)} | changes)
    with caplog.at_level(logging.INFO):
        assert weave_arguments(settings, {}) == {}
    (line,) = said(caplog)
    assert says in line
    assert not gpus.asked


def test_auto_needs_nvlink_a_known_model_and_more_than_one_rank(tmp_path, gpus, caplog):
    with caplog.at_level(logging.INFO):
        assert auto(tmp_path, tensor_parallel_size=1) == {}
        assert not said(caplog)
        assert auto(tmp_path, model={"architectures": ["GemmaForCausalLM"]}) == {}
        gpus.platform.is_linked = False
        assert auto(tmp_path) == {}
    model, links = said(caplog)
    assert "GemmaForCausalLM is none of" in model
    assert "NVLink" in links
    assert not gpus.asked


def test_an_engine_that_cannot_be_measured_is_said_with_its_error(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(weave_auto, "PROBES_LIMIT_S", 30.0)
    monkeypatch.setattr(weave_auto.sys, "executable", "/bin/false")
    with caplog.at_level(logging.WARNING):
        assert weave_auto._measure(made(tmp_path)) == []
    assert "stock engine to measure ended with status 1" in said(caplog)[0]
