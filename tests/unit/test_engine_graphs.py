"""How many requests an engine runs at once, and which of its steps are recorded as CUDA graphs, if nobody says."""

from types import SimpleNamespace

import pytest

from shared.engine.worker_config import WorkerSettings, for_role, on_device
from shared.errors import SettingsError

engine_arguments = pytest.importorskip("shared.engine.engine_arguments")


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(engine_arguments, "current_platform", SimpleNamespace(is_cpu=lambda: False))


def told(hosted: dict | None = None, **changes) -> dict:
    """What vLLM is told of an engine on a GPU."""
    return engine_arguments.engine_arguments(on_device(WorkerSettings(**changes), "cuda"), hosted or {})


def test_a_gpu_runs_more_requests_at_once_than_a_cpu_unless_the_settings_say_how_many():
    gpu, cpu = (on_device(WorkerSettings(), device) for device in ("cuda", "cpu"))
    assert (gpu.max_num_seqs, gpu.enforce_eager) == (256, False)
    assert (cpu.max_num_seqs, cpu.enforce_eager) == (64, True)
    assert on_device(WorkerSettings(max_num_seqs=8), "cuda").max_num_seqs == 8


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, 1024),
        ({"max_num_seqs": 16}, 1024),  # vLLM's own choice would be 32
        ({"max_num_seqs": 1024}, 1024),
        ({"graph_tokens": 64, "max_num_seqs": 100}, 200),
        ({"graph_tokens": 64, "max_num_seqs": 1024}, 512),
        ({"graph_tokens": 2048}, 2048),
        ({"max_num_batched_tokens": 256}, 256),
    ],
)
def test_steps_of_short_prompts_are_recorded_however_few_requests_run(on_gpu, changes, tokens):
    assert told(**changes)["compilation_config"] == {"max_cudagraph_capture_size": tokens}


def test_nothing_is_recorded_of_an_eager_engine_and_vllm_chooses_where_it_is_asked_to(on_gpu, monkeypatch):
    assert "compilation_config" not in told(enforce_eager=True)
    assert "compilation_config" not in told(graph_tokens=0)
    woven = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert told({"compilation_config": woven})["compilation_config"] == woven
    monkeypatch.setattr(engine_arguments, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    assert "compilation_config" not in told()


@pytest.mark.parametrize("name", ["graph_tokens", "max_num_seqs"])
def test_a_negative_number_of_either_is_refused(name):
    with pytest.raises(SettingsError, match=name):
        for_role(WorkerSettings(**{name: -1}), role="colocated", instance="colocated-0", port=9000)
