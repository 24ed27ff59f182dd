"""One short-lived engine that worker.weave = auto is decided by; see weave_auto.py, which runs it.

    python -m shared.engine.weave_probe stock|weave SETTINGS.json OUT.json WORKER_PID

A few layers of the model's shape with random weights; else the engine that SETTINGS.json (a worker's) stands for: stock
is told what that is told with `weave` off, in the same environment, but for OWN_ARGUMENTS. Prompts from 512 tokens on:
the forward pass on the slowest rank; fewer: a decode step of so many requests, the host's part included. OUT.json:
{tokens: {mode: us}}, medians. It takes no more of the GPUs than weights, one step and the caches of what it asks: a
mempool may have the rest. It ends when its worker does.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from shared.engine.vllm_setup import die_with_parent, engine_environment
from shared.engine.worker_config import WorkerSettings
from shared.weave.role_choice import LEAST_PROMPT_TOKENS
from shared.weave.turns import turns

LAYERS = 8
MOST_PROMPT_TOKENS = 32_768
BATCHES = (1, 8, 32)
REPEATS = 5
ROUND_BUDGET_S = 20.0  # of the rounds behind the first two
REQUEST_TOKENS = 256  # at least what a decode request's cache holds: 16 tokens, an answer, whole blocks
SPARE_TOKENS = 64  # of a request, behind its prompt
LEAST_UTILIZATION = 0.01  # vLLM refuses to start where less than that is free
SPARE_SHARE = 8  # one of so many tokens more
# What vLLM takes a model's context from: the least of those that a config has.
CONTEXT_FIELDS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip


# What a short engine is told otherwise: its size, no prompt found again in another mode's turn, no page of a mempool's.
# And its core is in the process that asks (VLLM_ENABLE_V1_MULTIPROCESSING=0), without a tokenizer.
OWN_ARGUMENTS = frozenset({
    "model", "load_format", "max_model_len", "kv_cache_memory_bytes", "gpu_memory_utilization", "enable_prefix_caching",
    "skip_tokenizer_init", "worker_extension_cls", "worker_cls", "scheduler_cls", "kv_transfer_config",
})  # fmt: skip


def probe_arguments(kind: str, settings: WorkerSettings, model: Path, longest: int) -> dict[str, Any]:
    """vLLM's. Args: model: of probe_model(); longest: tokens of a prompt."""
    from shared.engine.engine_arguments import engine_arguments, in_memory
    from shared.engine.weave_settings import weave_arguments

    hosted = {"async_scheduling": in_memory(settings)["async_scheduling"]}
    if kind == "weave":  # everything is, until the engine is told otherwise
        woven = msgspec.structs.replace(settings, weave="full", weave_min_tokens=2)
        hosted |= weave_arguments(woven, {})
    shape = json.loads((model / "config.json").read_text())
    found = engine_arguments(settings, hosted)
    if settings.device == "cpu":  # for tests: nothing is measured on one
        shape["torch_dtype"] = "float32"
        found |= {"dtype": "float32", "distributed_executor_backend": "mp"}
    else:
        found["gpu_memory_utilization"] = LEAST_UTILIZATION
    return found | {
        "model": str(model), "load_format": "dummy", "max_model_len": longest + SPARE_TOKENS,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": kv_bytes(shape, settings.tensor_parallel_size, longest),
    }  # fmt: skip


def probe_model(folder: Path, model_dir: Path, dtype: str, longest: int) -> Path:
    """The same shape with fewer layers, without weights, whose context holds a prompt of `longest` tokens."""
    config = json.loads((model_dir / "config.json").read_text())
    config["num_hidden_layers"] = min(LAYERS, config["num_hidden_layers"])
    for name in ("layer_types", "max_window_layers"):
        config.pop(name, None)
    if dtype != "auto":
        config["torch_dtype"] = dtype
    _hold(config, longest + SPARE_TOKENS)
    made = folder / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(config))
    return made


def _hold(config: dict[str, Any], tokens: int) -> None:
    """Raises the context to so many tokens: a step of several requests may be longer than one request of the model may.

    Times do not tell the difference: weights are random, and positions look rows up in a longer table.
    """
    config["max_position_embeddings"] = config.get("max_position_embeddings") or tokens
    for name in CONTEXT_FIELDS:
        if config.get(name) is not None:
            config[name] = max(config[name], tokens)
    for rope in (config.get("rope_scaling"), config.get("rope_parameters")):
        if not rope or "yarn" not in (rope.get("rope_type"), rope.get("type")):
            continue  # others' original length is no bound of the context
        least = math.ceil(tokens / (rope.get("factor") or 1.0))
        for place in (config, rope):
            if place.get("original_max_position_embeddings"):
                place["original_max_position_embeddings"] = max(
                    place["original_max_position_embeddings"], least
                )


def prompt_sizes(max_tokens: int) -> list[int]:
    """Doubling, up to what a step holds."""
    size, found = LEAST_PROMPT_TOKENS, []
    while size <= min(max_tokens, MOST_PROMPT_TOKENS):
        found.append(size)
        size *= 2
    return found


def kv_bytes(config: Mapping[str, Any], tp: int, max_tokens: int) -> int:
    """Of each rank's cache: the longest prompt, or the decode requests, whichever is more.

    Args: config: of the probe's model; max_tokens: of a step, of which the longest prompt is.
    """
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = max(1, (config.get("num_key_value_heads") or heads) // tp)
    kind = str(config.get("torch_dtype") or config.get("dtype") or "")
    token_bytes = 2 * config["num_hidden_layers"] * kv_heads * head_dim * (4 if "float32" in kind else 2)
    tokens = max(max_tokens, LEAST_PROMPT_TOKENS, max(BATCHES) * REQUEST_TOKENS) + REQUEST_TOKENS
    return (tokens + tokens // SPARE_SHARE) * token_bytes


def measured(
    engine: Any, sizes: list[int], batches: list[int], budget_s: float = ROUND_BUDGET_S
) -> dict[int, dict[str, float]]:
    """{tokens: {mode: us}}; modes take turns. The first round warms up, the second one is kept in any case."""
    modes = ["fuse", "full"] if engine.kind == "weave" else [engine.kind]
    found: dict[int, dict[str, list[float]]] = {}
    begin_s = 0.0
    for number in range(REPEATS + 1):
        if number == 2:
            begin_s = time.monotonic()
        elif number > 2 and time.monotonic() - begin_s > budget_s:
            break
        for size in sizes:
            for mode in turns(modes, number):
                engine.switch(mode)
                woven = engine.woven_steps()
                ms = engine.prefill_ms([10 + (7 * i + number) % 900 for i in range(size)])
                if mode == "full" and engine.woven_steps() == woven:
                    continue  # such a step has no cut
                if number:
                    found.setdefault(size, {}).setdefault(mode, []).append(ms * 1e3)
        for batch in batches:
            engine.switch(modes[0])
            ms = engine.decode_ms(batch)
            if number:
                found.setdefault(batch, {}).setdefault(modes[0], []).append(ms * 1e3)
    return {size: {mode: median(us) for mode, us in times.items()} for size, times in found.items()}


def main(argv: list[str]) -> int:
    """Exit status 0; what was found is in OUT.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("stock", "weave"))
    parser.add_argument("settings", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("worker", type=int)
    options = parser.parse_args(argv)
    die_with_parent(options.worker)
    settings = msgspec.json.decode(options.settings.read_bytes(), type=WorkerSettings)
    engine_environment(settings, settings.device)
    from shared.engine.preload import preload_architecture
    from shared.engine.weave_measured import MeasuredEngine

    preload_architecture(settings.model_dir)
    prompts = prompt_sizes(settings.max_num_batched_tokens)
    with tempfile.TemporaryDirectory(prefix="quire-probe-") as name:
        longest = max(prompts, default=LEAST_PROMPT_TOKENS)
        model = probe_model(Path(name), Path(settings.model_dir), settings.dtype, longest)
        arguments = probe_arguments(options.kind, settings, model, longest)
        engine = MeasuredEngine(options.kind, arguments, settings.device)
        batches = [batch for batch in BATCHES if batch <= settings.max_num_seqs]
        found = measured(engine, prompts, batches)
        options.out.write_text(json.dumps(found))
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
