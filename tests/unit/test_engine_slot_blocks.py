"""What an engine whose requests lie in slots settles before it starts, and says in its log."""

from types import SimpleNamespace

import msgspec
import pytest
from structlog.testing import capture_logs

from shared.engine.worker_config import WorkerSettings, block_tokens
from shared.vmm.geometry import common_models

engine_arguments = pytest.importorskip("shared.engine.engine_arguments")
SETTINGS = WorkerSettings(mempool_socket="/run/pool", kv_layout="token-major")


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(engine_arguments, "current_platform", SimpleNamespace(is_cpu=lambda: False))


def config(name: str, tp_size: int) -> SimpleNamespace:
    """As vLLM describes a model of the documentation's table."""
    (shape,) = (found for one, ranks, found in common_models() if (one, ranks) == (name, tp_size))
    torch = pytest.importorskip("torch")
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        get_num_layers=lambda parallel: shape.num_layers,
        get_num_kv_heads=lambda parallel: shape.num_kv_heads,
        get_head_size=lambda: shape.head_dim,
    )
    cache = SimpleNamespace(cache_dtype="auto")
    return SimpleNamespace(model_config=model, parallel_config=None, cache_config=cache)


def settled(name, tp_size, **changes):
    """Settings, and the log's events by name."""
    with capture_logs() as lines:
        found = engine_arguments.with_slots(
            msgspec.structs.replace(SETTINGS, **changes), config(name, tp_size)
        )
    return found, {line["event"]: line for line in lines}


@pytest.mark.parametrize(
    ("layout", "name", "tp_size", "tokens", "waste_percent"),
    [
        ("token-major", "Llama-3-8B", 1, 64, 0.0),
        ("token-major", "Llama-3-70B", 4, 128, 0.0),
        ("token-major", "Yi-34B", 1, 64, 6.2),
        ("token-major", "Qwen2.5-0.5B", 2, 1024, 0.0),
        ("layer-major", "Llama-3-8B", 1, 1024, 0.0),
    ],
)
def test_unless_told_otherwise_a_block_on_a_gpu_has_the_tokens_that_waste_least_and_the_log_says_so(
    on_gpu, layout, name, tp_size, tokens, waste_percent
):
    found, lines = settled(name, tp_size, kv_layout=layout)
    assert block_tokens(found, on_cpu=False) == tokens
    said = lines["slot_blocks"]
    assert (said["block_tokens"], said["prefix_hit_step_tokens"]) == (tokens, tokens)
    assert said["waste_percent"] == pytest.approx(waste_percent, abs=0.1)


def test_tokens_that_were_named_stay_and_the_log_says_what_they_waste(on_gpu):
    found, lines = settled("Qwen2.5-0.5B", 2, block_tokens=64)
    assert found.block_tokens == 64
    assert lines["slot_blocks"]["waste_percent"] == 81.2


def test_with_a_block_table_or_on_a_cpu_nothing_changes(on_gpu, monkeypatch):
    found, lines = settled("Llama-3-70B", 4, kv_layout="cross-layer")
    assert (block_tokens(found, on_cpu=False), lines) == (64, {})
    monkeypatch.setattr(engine_arguments, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    found, lines = settled("Llama-3-70B", 4)
    assert (block_tokens(found, on_cpu=True), lines) == (32, {})


@pytest.mark.parametrize("asked", [False, True])
def test_the_log_says_that_slots_run_eager_where_nobody_asked_for_it(on_gpu, asked):
    _, lines = settled("Llama-3-8B", 1, enforce_eager=asked)
    assert ("slots_run_eager" in lines) is not asked
