"""Coefficients from measured times: non-negative least squares on the relative error. The only module with numpy here.

The model is linear in its coefficients once the tile, the ridge (FLOP per byte at which arithmetic and memory take the
same time) and the steps that wait for their launches are given; these are searched on small grids. A column of the fit
is the model's own prediction with one coefficient at 1 and the others at 0, so that the formulas exist once, in
model.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product, starmap

import msgspec
import numpy as np
import numpy.typing as npt

from shared.costmodel.model import CostModel
from shared.costmodel.observation import Observation, predict, steps_of
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
LAUNCHES = ("launch_ms", "idle_launch_ms")
COMMUNICATION = ("all_reduce_ms", "all_reduce_ms_per_gb", "stage_hop_ms")  # the frame's: not fitted
CPU_TILES = ((1, 1), (16, 1), (32, 1), (64, 1))
GPU_TILES = ((1, 1), (64, 128), (128, 128), (256, 128))
RIDGES = (0.0, 1.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 192.0, 256.0)
GRAPH_TOKENS = (64, 128, 256, 512)  # vLLM's largest graph is one of these unless it was told otherwise
LAUNCH_REACH = (0, 256, 512, 1024, 2048, 4096)  # tokens of a step: larger ones do not wait for their launches
LAUNCH_PENALTY = 0.005  # as in COLUMNS
LEAST_LAUNCHED = 3  # observations that show it
SLACK = 1.05  # launches may be so much shorter than the work that waits for them: noise
ROUNDS = 4  # of reweighting: an outlier counts by its size, not by its square
FULL_WEIGHT_ERROR = 0.05
SLOW_WEIGHT = 0.6  # of what took longer than predicted: other work on a machine only ever adds
EASE = 0.8  # clocks, and steps that another one overlaps
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


def _column(frame: CostCoefficients, changes: dict[str, float], seen: Sequence[Observation]) -> Array:
    model = CostModel(msgspec.structs.replace(frame, **changes))
    return np.array([predict(model, one) for one in seen])


def _solve(columns: Array, known: Array, measured: Array, trust: Array, penalties: Array) -> Array:
    """Coefficients. `known`: ms that are explained already."""
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
    return x / scale


@dataclass(frozen=True, slots=True)
class _Launches:
    """Which steps wait for their launches. `reach`: those without a graph of up to so many tokens."""

    graph_tokens: int
    reach: int
    idle: bool  # and prompts alone that graphs hold


@dataclass(frozen=True, slots=True)
class _Fit:
    loss: float
    coefficients: CostCoefficients
    launches: _Launches | None


@dataclass(frozen=True, slots=True)
class _Task:
    """What is to be explained, and what is the same for every tile, ridge and launch that is tried."""

    frame: CostCoefficients
    zero: CostCoefficients  # costs nothing
    seen: Sequence[Observation]
    measured: Array  # ms
    trust: Array
    known: Array  # ms: communication, where the frame has ranks
    fixed: Array  # a column for each of COLUMNS but the first
    step_tokens: npt.NDArray[np.int64]  # of observations that were one step; 0: of several
    is_prompt: npt.NDArray[np.bool_]

    def attempt(
        self, tile: tuple[int, int], ridge: float, launches: _Launches | None = None
    ) -> CostCoefficients | None:
        """The best with these; of steps that wait for their launches only the launching is seen.

        None: by what was found some of them would not wait.
        """
        tiled = msgspec.structs.replace(self.zero, tile_tokens=tile[0], tile_columns=tile[1])
        work = _column(tiled, {"matmul_ms_per_gflop": 1.0, "memory_ms_per_gb": ridge}, self.seen)
        columns, penalties = [work, *self.fixed], list(COLUMNS.values())
        masks = self.launched(launches) if launches is not None else {}
        for mask in masks.values():
            columns[0] = np.where(mask, 0.0, columns[0])
            columns.append(mask.astype(float))
            penalties.append(LAUNCH_PENALTY)
        found = _solve(np.column_stack(columns), self.known, self.measured, self.trust, np.array(penalties))
        for mask, least_ms in zip(masks.values(), found[len(COLUMNS) :], strict=True):
            if (work[mask] * found[0] > least_ms * SLACK).any():
                return None
        names = [*COLUMNS, *masks]
        values = {name: float(value) for name, value in zip(names, found, strict=True)}
        values["memory_ms_per_gb"] = ridge * values["matmul_ms_per_gflop"]
        values |= {name: getattr(self.frame, name) for name in COMMUNICATION}
        if launches is not None:
            values["graph_tokens"] = launches.graph_tokens
        return msgspec.structs.replace(tiled, **values)

    def launched(self, launches: _Launches) -> dict[str, npt.NDArray[np.bool_]]:
        """By the coefficient that they show: observations of one step that waits for its launches."""
        tokens, graph_tokens = self.step_tokens, launches.graph_tokens
        waits = self.is_prompt | (graph_tokens == 0)  # a batch is behind a step, and so is a decode
        masks = {}
        if launches.reach > graph_tokens:
            masks["launch_ms"] = waits & (tokens > graph_tokens) & (tokens <= launches.reach)
        if launches.idle:
            masks["idle_launch_ms"] = self.is_prompt & (tokens > 0) & (tokens <= graph_tokens)
        return masks

    def loss(self, coefficients: CostCoefficients) -> float:
        """Mean relative error, the largest ones clipped."""
        errors = relative_errors(CostModel(coefficients), self.seen)
        return float(np.average(np.minimum(errors, 0.5), weights=self.trust))


def _task(frame: CostCoefficients, seen: Sequence[Observation]) -> _Task:
    nothing = msgspec.structs.replace(
        frame, memory_ms_per_gb=0.0, graph_tokens=0, **dict.fromkeys([*COLUMNS, *LAUNCHES], 0.0)
    )
    zero = msgspec.structs.replace(nothing, **dict.fromkeys(COMMUNICATION, 0.0))
    steps = [steps_of(one, frame.max_batched_tokens) for one in seen]
    return _Task(
        frame,
        zero,
        seen,
        measured=np.array([one.ms for one in seen]),
        trust=np.array([1.0 / (1.0 + WAITED_WEIGHT * one.waited_ratio) for one in seen]),
        known=_column(nothing, {}, seen),
        fixed=np.array([_column(zero, {name: 1.0}, seen) for name in list(COLUMNS)[1:]]),
        step_tokens=np.array([found[0].num_tokens if len(found) == 1 else 0 for found in steps]),
        is_prompt=np.array([one.kind == "prefill" for one in seen]),
    )


def fit(
    frame: CostCoefficients,
    seen: Sequence[Observation],
    *,
    tiles: Sequence[tuple[int, int]] = (),
    graph_tokens: int | None = None,
) -> CostCoefficients:
    """The frame's shape, device and sizes with coefficients that explain what was seen, and their errors.

    Args: graph_tokens: of the largest step that a graph holds; 0: none does; None: not known, it is found too.
    Raises: ClusterError on too few or impossible observations. Cost for 50 of them: 0.1 s for a CPU, 1 s for a GPU.
    """
    seen = _possible(seen)
    if len(seen) < LEAST_OBSERVATIONS:
        raise ClusterError(f"a cost model needs {LEAST_OBSERVATIONS} measurements, and there are {len(seen)}")
    task = _task(frame, seen)
    is_gpu = frame.num_processors > 1
    some = tiles or (GPU_TILES if is_gpu else CPU_TILES)
    best = _search(task, product((None,), some, RIDGES))
    if is_gpu:
        # launching and memory can seem one the other: the ridge is searched with the launches, and again
        tile = best.coefficients.tile_tokens, best.coefficients.tile_columns
        sizes = GRAPH_TOKENS if graph_tokens is None else (graph_tokens,)
        found = _search(task, product(_shown(task, sizes), (tile,), RIDGES), best)
        if found.launches is not None:
            best = _search(task, product((found.launches,), some, RIDGES))
    return with_errors(best.coefficients, seen)


def _possible(seen: Sequence[Observation]) -> list[Observation]:
    """Without what cannot be: a step reads every weight, so no prompt takes less than the fastest step of decodes.

    A batch is timed between two outputs, and the first may reach its reader late. One such time, relative to which
    errors count, would outweigh the whole profile.
    """
    least_ms = min((one.ms for one in seen if one.kind == "decode" and one.ms > 0), default=0.0) * EASE
    return [one for one in seen if one.ms > (0.0 if one.kind == "decode" else least_ms)]


def _shown(task: _Task, sizes: Sequence[int]) -> Iterator[_Launches]:
    """Launches that enough observations show."""
    for launches in starmap(_Launches, product(sizes, LAUNCH_REACH, (False, True))):
        counts = [int(mask.sum()) for mask in task.launched(launches).values()]
        if counts and min(counts) >= LEAST_LAUNCHED:
            yield launches


def _search(
    task: _Task,
    choices: Iterable[tuple[_Launches | None, tuple[int, int], float]],
    best: _Fit | None = None,
) -> _Fit:
    """The one that explains most; a later one must be better, not equal: the finest tile comes first.

    Args: choices: launches, tile and ridge; one of them fits, or there is a `best` already.
    """
    for launches, tile, ridge in choices:
        coefficients = task.attempt(tile, ridge, launches)
        if coefficients is None:
            continue
        loss = task.loss(coefficients)
        if best is None or loss < 0.99 * best.loss:
            best = _Fit(loss, coefficients, launches)
    assert best is not None
    return best


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
