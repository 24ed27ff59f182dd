"""Coefficients from measured times: non-negative least squares on the relative error. The only module with numpy here.

The model is linear in its coefficients once the tile and the ridge (FLOP per byte at which arithmetic and memory take
the same time) are given; these are searched on a small grid. A column of the fit is the model's own prediction with one
coefficient at 1 and the others at 0, so that the formulas exist once, in model.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from shared.costmodel.model import CostModel
from shared.costmodel.observation import Observation, predict
from shared.errors import ClusterError
from shared.wire.cost import CostCoefficients

Array = npt.NDArray[np.float64]

LEAST_OBSERVATIONS = 4
# Coefficients, and how much a share of the time that one explains is held against it: where two explain the same
# samples, an operator is preferred to a constant, because it is known how it scales.
COLUMNS: dict[str, float] = {
    "matmul_ms_per_gflop": 0.002,
    "attention_ms_per_gflop": 0.002,
    "attention_square_ms_per_gflop": 0.01,
    "kv_read_ms_per_gb": 0.005,
    "step_overhead_ms": 0.002,
    "chunk_ms": 0.01,
    "decode_request_ms": 0.005,
    "token_ms": 0.03,
    "request_ms": 0.005,
    "prompt_token_ms": 0.01,
}
COMMUNICATION = ("all_reduce_ms", "all_reduce_ms_per_gb", "stage_hop_ms")  # the frame's: not fitted
CPU_TILES = ((1, 1), (16, 1), (32, 1), (64, 1))
GPU_TILES = ((1, 1), (64, 128), (128, 128), (256, 128))
RIDGES = (0.0, 1.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
ROUNDS = 4  # of reweighting: an outlier counts by its size, not by its square
FULL_WEIGHT_ERROR = 0.05
SLOW_WEIGHT = 0.6  # of what took longer than predicted: other work on a machine only ever adds
WAITED_WEIGHT = 4.0  # how much less a measurement counts that other work on the machine held up


def nnls(a: Array, b: Array) -> Array:
    """x >= 0 that minimises |a x - b|. Lawson and Hanson's active set. Cost: some solves of the columns' size."""
    num_columns = a.shape[1]
    x = np.zeros(num_columns)
    passive = np.zeros(num_columns, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(a.T @ b).max(initial=0.0)))
    for _ in range(6 * num_columns):
        gradient = a.T @ (b - a @ x)
        candidates = ~passive & (gradient > tolerance)
        if not candidates.any():
            break
        passive[int(np.argmax(np.where(candidates, gradient, -np.inf)))] = True
        while passive.any():
            s = np.zeros(num_columns)
            s[passive] = np.linalg.lstsq(a[:, passive], b, rcond=None)[0]
            if s[passive].min() > 0:
                x = s
                break
            falling = passive & (s <= 0)
            step = float((x[falling] / np.maximum(x[falling] - s[falling], 1e-300)).min())
            x = x + step * (s - x)
            passive &= x > 1e-14
            x[~passive] = 0.0
    return x


@dataclass(frozen=True, slots=True)
class _Fit:
    loss: float
    coefficients: CostCoefficients


def _column(frame: CostCoefficients, changes: dict[str, float], seen: Sequence[Observation]) -> Array:
    model = CostModel(msgspec.structs.replace(frame, **changes))
    return np.array([predict(model, one) for one in seen])


def _solve(
    columns: Array, known: Array, measured: Array, trust: Array, penalties: Array
) -> tuple[Array, float]:
    """(coefficients, mean relative error, the largest errors clipped). `known`: ms that are explained already."""
    relative = columns / measured[:, None]
    scale = relative.mean(axis=0)
    scale[scale <= 0] = 1.0
    relative = relative / scale
    weights, target = np.sqrt(trust), np.maximum(0.0, 1.0 - known / measured)
    shrink = np.diag(penalties * np.sqrt(len(measured)))
    zeros = np.zeros(len(penalties))
    x = zeros
    for _ in range(ROUNDS):
        x = nnls(np.vstack([relative * weights[:, None], shrink]), np.concatenate([weights * target, zeros]))
        errors = relative @ x - target
        weights = np.sqrt(trust * np.minimum(1.0, FULL_WEIGHT_ERROR / np.maximum(np.abs(errors), 1e-12)))
        weights[errors < 0] *= SLOW_WEIGHT
    return x / scale, float(np.average(np.minimum(np.abs(relative @ x - target), 0.5), weights=trust))


def fit(
    frame: CostCoefficients, seen: Sequence[Observation], *, tiles: Sequence[tuple[int, int]] = ()
) -> CostCoefficients:
    """The frame's shape, device and sizes with coefficients that explain what was seen, and their errors.

    Raises: ClusterError on too few or impossible observations. Cost: 0.1 to 0.3 s for 50 of them.
    """
    seen = [one for one in seen if one.ms > 0]
    if len(seen) < LEAST_OBSERVATIONS:
        raise ClusterError(f"a cost model needs {LEAST_OBSERVATIONS} measurements, and there are {len(seen)}")
    measured = np.array([one.ms for one in seen])
    trust = np.array([1.0 / (1.0 + WAITED_WEIGHT * one.waited_ratio) for one in seen])
    penalties = np.array(list(COLUMNS.values()))
    nothing = msgspec.structs.replace(frame, memory_ms_per_gb=0.0, **dict.fromkeys(COLUMNS, 0.0))
    known = _column(nothing, {}, seen)  # communication, where the frame has ranks
    zero = msgspec.structs.replace(nothing, **dict.fromkeys(COMMUNICATION, 0.0))
    fixed = [_column(zero, {name: 1.0}, seen) for name in list(COLUMNS)[1:]]
    best: _Fit | None = None
    for tile_tokens, tile_columns in tiles or (CPU_TILES if frame.num_processors == 1 else GPU_TILES):
        tiled = msgspec.structs.replace(zero, tile_tokens=tile_tokens, tile_columns=tile_columns)
        for ridge in RIDGES:
            work = _column(tiled, {"matmul_ms_per_gflop": 1.0, "memory_ms_per_gb": ridge}, seen)
            found, loss = _solve(np.column_stack([work, *fixed]), known, measured, trust, penalties)
            if best is not None and loss >= 0.99 * best.loss:
                continue  # a finer model must be better, not equal
            values = {name: float(value) for name, value in zip(COLUMNS, found, strict=True)}
            values["memory_ms_per_gb"] = ridge * values["matmul_ms_per_gflop"]
            values |= {name: getattr(frame, name) for name in COMMUNICATION}
            best = _Fit(loss, msgspec.structs.replace(tiled, **values))
    assert best is not None
    return with_errors(best.coefficients, seen)


def with_errors(coefficients: CostCoefficients, seen: Sequence[Observation]) -> CostCoefficients:
    """The same with error statistics over these observations."""
    errors = relative_errors(CostModel(coefficients), seen)
    return msgspec.structs.replace(
        coefficients,
        median_error_ratio=float(np.quantile(errors, 0.5)),
        p90_error_ratio=float(np.quantile(errors, 0.9)),
        num_samples=len(errors),
    )


def relative_errors(model: CostModel, seen: Sequence[Observation]) -> list[float]:
    """|predicted - measured| / measured of each."""
    return [abs(predict(model, one) - one.ms) / one.ms for one in seen]


@dataclass(frozen=True, slots=True)
class ArchModel:
    """The paper's other way: x and y straight to ms, a x^2 y + b x^2 + c x y + d x + e. For comparison only."""

    weights: tuple[float, ...]
    factor: float = 1.0

    def prefill_ms(self, num_tokens: int, cached_tokens: int = 0) -> float:
        """As CostModel's, and without its guarantees."""
        return self.factor * float(np.dot(self.weights, _arch_row(num_tokens, cached_tokens)))

    def scaled(self, *, tp: int) -> "ArchModel":
        """All it can do: divide the whole (MemServe 5.3.2 halves it for two ranks)."""
        return ArchModel(self.weights, self.factor / tp)


def _arch_row(num_tokens: int, cached_tokens: int) -> list[float]:
    x, y = float(num_tokens), cached_tokens / num_tokens
    return [x * x * y, x * x, x * y, x, 1.0]


def fit_arch(seen: Sequence[Observation]) -> ArchModel:
    """From the single prompts among what was seen; least squares on the relative error. Raises: ClusterError."""
    single = [one for one in seen if one.kind == "prefill"]
    if len(single) < LEAST_OBSERVATIONS:
        raise ClusterError(
            f"an arch-level model needs {LEAST_OBSERVATIONS} prompts, and there are {len(single)}"
        )
    measured = np.array([one.ms for one in single])
    rows = np.array([_arch_row(*one.prompts[0]) for one in single])
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    weights = np.linalg.lstsq(rows / scale / measured[:, None], np.ones(len(single)), rcond=None)[0]
    return ArchModel(tuple(float(w) for w in weights / scale))
