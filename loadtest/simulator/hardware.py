"""Costs without a measurement: from a GPU's data sheet and a model's sizes. UNCALIBRATED: good for ratios and orders.

The shares of peak are what well-tuned dense kernels reach; a calibrated instance (`quire model show`) replaces it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from loadtest.results import load_result
from loadtest.simulator.known import ASSUMED, GIVEN, Known, known_of
from loadtest.simulator.prices import ModelPrices, kv_bytes_per_token
from shared.costmodel.shapes import shape_of
from shared.errors import SettingsError
from shared.wire.cost import CostCoefficients, ModelShape

MATMUL_SHARE, ATTENTION_SHARE, MEMORY_SHARE = 0.65, 0.5, 0.8  # of peak
RESERVE_SHARE = 0.1  # of a GPU's memory: activations, graphs, contexts
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok")  # in a config.json
GB = 1e9
MEMORY_TOKENS = 1 << 20  # where nothing says how many there are


@dataclass(frozen=True, slots=True)
class Gpu:
    """Of the data sheet: dense bfloat16, memory."""

    tflop_per_s: float
    memory_gb_per_s: float
    memory_gb: float
    num_processors: int


GPUS = {
    "h200": Gpu(989, 4800, 141, 132),
    "h100": Gpu(989, 3350, 80, 132),
    "a100": Gpu(312, 2039, 80, 108),
    "l40s": Gpu(362, 864, 48, 142),
}
LARGEST_GRAPH_TOKENS = 512  # vLLM's default
MODELS = {
    "llama-8b": ModelShape(num_layers=32, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8,
                           head_dim=128, vocab_size=128256),
    "qwen-32b": ModelShape(num_layers=64, hidden_size=5120, intermediate_size=25600, num_heads=64, num_kv_heads=8,
                           head_dim=128, vocab_size=151936),
    "llama-70b": ModelShape(num_layers=80, hidden_size=8192, intermediate_size=28672, num_heads=64, num_kv_heads=8,
                            head_dim=128, vocab_size=128256),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Machine:
    """One instance: its costs, and how many tokens of KV it has room for.

    known: what else running instances say; source: which those are, in words. memory_source: where memory_tokens are
    from.
    """

    prices: ModelPrices
    memory_tokens: int
    calibrated: bool
    words: str  # for people
    memory_source: str = GIVEN
    known: Known = field(default_factory=Known)
    source: str = ""


def weights_gb(shape: ModelShape) -> float:
    """Of the whole model."""
    attention = shape.hidden_size * shape.head_dim * 2 * (shape.num_heads + shape.num_kv_heads)
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size
    return (shape.num_layers * layer + 2 * shape.vocab_size * shape.hidden_size) * shape.dtype_bytes / GB


def kv_bytes_of(shape: ModelShape, tp: int) -> float:
    """Of one token on all ranks: they divide the KV heads as far as there are some."""
    return kv_bytes_per_token(shape) * max(1.0, tp / shape.num_kv_heads)


def memory_at(shape: ModelShape, tokens: int, *, tp: int, other: int) -> int:
    """KV tokens of an engine of `other` GPUs, where one of `tp` has `tokens`: a GPU has as many bytes for weights and
    KV as now. Of a mixture of experts the shape says too little of the weights.

    Raises: SettingsError where the weights leave no room.
    """
    all_gb = (weights_gb(shape) + tokens * kv_bytes_of(shape, tp) / GB) * other / tp
    found = int((all_gb - weights_gb(shape)) * GB / kv_bytes_of(shape, other))
    if found < 1:
        raise SettingsError(
            f"an engine of {other} GPUs has no room for the weights: {all_gb:.0f} GB as the engines of {tp} use; use a "
            "larger --tp, or give --memory-tokens"
        )
    return found


def analytic(
    gpu: Gpu, shape: ModelShape, *, tp: int = 1, name: str = "", max_batched_tokens: int = 8192
) -> CostCoefficients:
    """Coefficients from the data sheet. All-reduces as over NVLink."""
    per_gb = 1000 / (gpu.memory_gb_per_s * MEMORY_SHARE)
    return CostCoefficients(
        shape=shape,
        tp=tp,
        device=name,
        num_processors=gpu.num_processors,
        max_batched_tokens=max_batched_tokens,
        tile_tokens=128,
        tile_columns=128,
        matmul_ms_per_gflop=1 / (gpu.tflop_per_s * MATMUL_SHARE),
        attention_ms_per_gflop=1 / (gpu.tflop_per_s * ATTENTION_SHARE),
        memory_ms_per_gb=per_gb,
        kv_read_ms_per_gb=per_gb,
        step_overhead_ms=1.5,
        chunk_ms=0.2,
        decode_request_ms=0.005,
        request_ms=2.0,
        prompt_token_ms=0.0005,
        all_reduce_ms=0.015 if tp > 1 else 0.0,
        all_reduce_ms_per_gb=3.3 if tp > 1 else 0.0,
    )


def with_slots(coefficients: CostCoefficients, max_running: int) -> CostCoefficients:
    """Of an engine that runs so many requests at once: vLLM's largest graph follows from that, unless it has none."""
    size = min(2 * max_running, LARGEST_GRAPH_TOKENS)
    return msgspec.structs.replace(coefficients, graph_tokens=size if coefficients.graph_tokens else 0)


def from_data_sheet(gpu_name: str, model: str, *, tp: int = 1, max_batched_tokens: int = 8192) -> Machine:
    """Args: model: one of MODELS, or a folder with a config.json. Raises: SettingsError, of experts too."""
    gpu = GPUS.get(gpu_name.lower())
    if gpu is None:
        raise SettingsError(f"no data sheet of the GPU {gpu_name!r}; there are {', '.join(GPUS)}")
    # its shape has the experts of one token: neither what lies in memory nor what a step of many requests reads
    if model not in MODELS and any(_config(model).get(key) not in (None, 0, 1) for key in EXPERTS):
        raise SettingsError(
            f"{model} is a mixture of experts: its memory and its steps do not follow from a data sheet; take a "
            "calibrated instance's costs (--cost, as `quire model show --json` prints them) and --memory-tokens"
        )
    shape = model_shape(model)
    memory_gb = gpu.memory_gb * (1 - RESERVE_SHARE) * tp - weights_gb(shape)
    memory_tokens = int(memory_gb * GB / kv_bytes_of(shape, tp))
    if memory_tokens < 4096:
        raise SettingsError(
            f"{model} needs {weights_gb(shape):.0f} GB for its weights alone; {tp} x {gpu_name} have no room for it: "
            "use a larger --tp"
        )
    found = analytic(gpu, shape, tp=tp, name=gpu_name, max_batched_tokens=max_batched_tokens)
    words = f"{model} on {tp} x {gpu_name}, from the data sheet (uncalibrated)"
    return Machine(ModelPrices(found), memory_tokens, False, words, memory_source="from the data sheet")


def model_shape(model: str) -> ModelShape:
    """Raises: SettingsError."""
    if model in MODELS:
        return MODELS[model]
    read = _config(model)
    return shape_of(read, str(read.get("torch_dtype") or read.get("dtype") or "bfloat16"))


def _config(model: str) -> dict[str, Any]:
    """Raises: SettingsError."""
    config = Path(model) / "config.json"
    if not config.is_file():
        raise SettingsError(
            f"model {model!r} is none of {', '.join(MODELS)} and no folder with a config.json"
        )
    try:
        found = json.loads(config.read_text())
    except ValueError as error:
        raise SettingsError(f"{config} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise SettingsError(f"{config} has to be an object, as of a Hugging Face model")
    return found


def from_file(path: Path, *, memory_tokens: int = 0, tp: int = 0, gpu: str = "", model: str = "") -> Machine:
    """Coefficients as JSON, what `quire model show --json` printed, or the result file that `make measure
    NAME=cost-model` wrote: of that the ones of this GPU and model, where they are named.

    Args: memory_tokens: 0: what the data sheet leaves room for where a result's GPU and model are named, else as
    from_coefficients has it. Raises: SettingsError.
    """
    try:
        read = load_result(path)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(str(error)) from error
    if isinstance(read, dict) and isinstance(read.get("samples"), list):
        read = _of_result(read["samples"], path, tp=tp, gpu=gpu, model=model)
        if not memory_tokens and gpu.lower() in GPUS and model:
            found = from_coefficients(read, memory_tokens=MEMORY_TOKENS, source=path.name, tp=tp)
            sheet = from_data_sheet(gpu, model, tp=found.prices.coefficients.tp)
            return replace(found, memory_tokens=sheet.memory_tokens, memory_source=sheet.memory_source)
    return from_coefficients(read, memory_tokens=memory_tokens, source=path.name, tp=tp)


def measured(samples: Sequence[Any], *, gpu: str = "", model: str = "", tp: int = 0) -> list[dict[str, Any]]:
    """Coefficients of a cost-model result's samples: fitted to each point of the grid at its fastest (profile -1), of
    this GPU, shape and parallelism where they are given."""
    shape = msgspec.to_builtins(model_shape(model)) if model else {}
    found = []
    for row in samples:
        if not isinstance(row, dict) or row.get("part") != "model" or row.get("profile") != -1:
            continue
        coefficients = row.get("coefficients")
        same = coefficients.get("shape") if isinstance(coefficients, dict) else None
        if (
            isinstance(same, dict)
            and gpu.lower() in ("", row.get("device"))
            and tp in (0, row.get("tp"))
            and all(same.get(key, value) == value for key, value in shape.items())
        ):
            found.append(coefficients)
    return found


def _of_result(samples: Sequence[Any], path: Path, *, tp: int, gpu: str, model: str) -> dict[str, Any]:
    """Of the parallelism that was asked for, or of another. Raises: SettingsError."""
    known = measured(samples)
    if not known:
        raise SettingsError(
            f"{path} is a result file without cost coefficients; expected loadtest/results/cost-model.json, or what "
            "`quire model show --json` prints"
        )
    fits = measured(samples, gpu=gpu, model=model, tp=tp) or measured(samples, gpu=gpu, model=model)
    if not fits:
        devices = ", ".join(sorted({str(one.get("device")) for one in known}))
        raise SettingsError(
            f"{path} has no costs of {model or 'this model'} on {gpu or 'this GPU'}; it was measured on {devices}: see "
            "--gpu and --model"
        )
    return fits[0]


def from_coefficients(read: Any, *, memory_tokens: int, source: str, tp: int = 0) -> Machine:
    """Prices are corrected by what the instances have learned, where they say it.

    Args: read: coefficients, or instances by name with their "coefficients" (see known.Row); memory_tokens: 0: as the
    instances say, else MEMORY_TOKENS; tp: of the engines asked for, prices and the instances' memory scaled where they
    were calibrated at another; 0: as calibrated. Raises: SettingsError.
    """
    is_dict = isinstance(read, dict)
    is_nested = is_dict and any(isinstance(row, dict) and row.get("coefficients") for row in read.values())
    if is_dict and read.get("coefficients"):
        read, is_nested = {source: read}, True  # one instance's part
    try:
        base, known = known_of(read) if is_nested else (msgspec.convert(read, CostCoefficients), Known())
        assert base is not None
    except msgspec.ValidationError as error:
        why = f" ({error})" if is_nested or (is_dict and "shape" in read) else ""
        raise SettingsError(
            f"{source} has no cost coefficients{why}; expected what `quire model show --json` prints, or "
            "loadtest/results/cost-model.json"
        ) from error
    words = f"coefficients of {base.device or 'an unnamed device'} from {source}"
    if known.correction_words:
        words += f", corrected as measured since: {known.correction_words}"
    found, is_scaled = base, tp not in (0, base.tp)
    if is_scaled:
        found = msgspec.structs.replace(base, tp=tp)
        words += f", scaled from TP {base.tp} to {tp}"
    memory_source = GIVEN
    if not memory_tokens:
        memory_tokens, memory_source = _memory(base, known, source, found.tp)
    prices = ModelPrices(
        found, prefill_correction=known.prefill_correction, decode_correction=known.decode_correction
    )
    return Machine(prices, memory_tokens, not is_scaled, words, memory_source, known, source)


def _memory(base: CostCoefficients, known: Known, source: str, tp: int) -> tuple[int, str]:
    """KV tokens of one engine, and where they are from. Raises: SettingsError."""
    tokens = known.sizes.kv_tokens
    if tokens is None:
        return MEMORY_TOKENS, ASSUMED
    if tp == base.tp:
        return tokens, f"from {source}"
    return memory_at(
        base.shape, tokens, tp=base.tp, other=tp
    ), f"from {source}, as many bytes a GPU at TP {tp}"
