"""Sizes of a launch and of the memory that ranks share: numbers in, numbers out; no torch, no CUDA.

arena of one rank:  lane 0: input | out | whole residual | flags | epochs | slots | turns    lane 1: ...    failed word
"""

from dataclasses import dataclass
from functools import lru_cache

from shared.errors import InvalidRequest
from shared.kernels.allreduce_rmsnorm.plan import (
    ELEMENT_BYTES,
    MAX_WORLD,
    VECTOR_ELEMENTS,
    Algorithm,
    Engine,
    check_shape,
    num_ctas,
)

VECTOR_BYTES = 16
WARP_THREADS = 32
MAX_CTAS = 256  # words of flags; no GPU that we know has as many SMs
CTA_THREADS = 512  # with up to 128 registers each
ROW_VECTORS = 4  # that a thread keeps of its row between sum and norm
SEGMENT_VECTORS = 256
MAX_STAGES = 12
IN_FLIGHT = 16  # loads that a thread of the plain engine has under way: with 512 threads 128 KiB an SM
MIN_STAGES = 2  # with one nothing is under way while it is summed
OWN_SHARED_BYTES = 1024  # at most, that kernels declare themselves
SHARED_BYTES = (227 << 10) - OWN_SHARED_BYTES  # of a CTA of sm_90 and sm_100; sm_120 has 99 KiB
PUSH_THREADS = 1024
PUSH_SLOT_BYTES = 4 << 20  # of all ranks' rows: more is two-shot's
NUM_SLOTS = 2
ALIGN_BYTES = 512


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What a kernel is compiled for; how it is cut up within, with defaults (bench_allreduce_rmsnorm.py --sweep).

    most_shared_bytes: dynamic shared memory that a CTA may have.
    """

    world: int
    hidden: int
    bf16: bool
    segment_vectors: int = SEGMENT_VECTORS
    max_stages: int = MAX_STAGES
    in_flight: int = IN_FLIGHT
    relaxed_arrival: bool = False
    most_push_threads: int = PUSH_THREADS
    most_shared_bytes: int = SHARED_BYTES

    @property
    def vectors(self) -> int:
        """16-byte pieces of a row."""
        return self.hidden // VECTOR_ELEMENTS

    @property
    def row_threads(self) -> int:
        """Threads of a row in the plain engine."""
        return _up(-(-self.vectors // ROW_VECTORS), WARP_THREADS)

    @property
    def rows_per_cta(self) -> int:
        """Rows in work at a time in a CTA of the plain engine."""
        return CTA_THREADS // self.row_threads

    @property
    def push_threads(self) -> int:
        """Threads of a row, and of a CTA, in the push engine."""
        return min(self.most_push_threads, _up(self.vectors, WARP_THREADS))

    @property
    def segment(self) -> int:
        """Vectors of a bulk engine's stage, a consuming thread each."""
        return min(self.segment_vectors, _up(self.vectors, WARP_THREADS))

    @property
    def stages(self) -> int:
        """Segments under way in a CTA of the bulk engine: as many as fit, and one for the compiler where none does."""
        return max(1, self._fitting_stages)

    @property
    def has_bulk(self) -> bool:
        """Whether the bulk engine fits at all; long rows of many ranks do not where a CTA has 99 KiB."""
        return self._fitting_stages >= MIN_STAGES

    @property
    def _fitting_stages(self) -> int:
        stage_bytes = (self.world + 1) * self.segment * VECTOR_BYTES
        return min(self.max_stages, (self.most_shared_bytes - self._ready_bytes) // stage_bytes)

    @property
    def _ready_bytes(self) -> int:
        return 2 * self.vectors * VECTOR_BYTES

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the bulk engine."""
        return self.stages * (self.world + 1) * self.segment * VECTOR_BYTES + self._ready_bytes

    def defines(self) -> dict[str, int]:
        """For the compiler, but PARAMS_BYTES."""
        return {
            "WORLD": self.world,
            "HIDDEN": self.hidden,
            "BF16": int(self.bf16),
            "ROW_THREADS": self.row_threads,
            "ROWS_PER_CTA": self.rows_per_cta,
            "PUSH_THREADS": self.push_threads,
            "SEGMENT": self.segment,
            "STAGES": self.stages,
            "IN_FLIGHT": self.in_flight,
            "RELAXED_ARRIVAL": int(self.relaxed_arrival),
        }

    @lru_cache(maxsize=1024)  # noqa: B019  shapes live as long as the process
    def launch(self, engine: Engine, algorithm: Algorithm, num_tokens: int, most_ctas: int) -> "Launch":
        """The same on every rank."""
        ctas = num_ctas(algorithm, num_tokens, self.world, min(most_ctas, MAX_CTAS))
        if engine is Engine.BULK:
            return Launch(ctas, self.segment + WARP_THREADS, self.shared_bytes)
        if engine is Engine.PUSH:
            return Launch(ctas, self.push_threads, 0)
        return Launch(ctas, self.row_threads * self.rows_per_cta, 0)


@dataclass(frozen=True, slots=True)
class Launch:
    """Grid, block, dynamic shared memory."""

    ctas: int
    threads: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Lane:
    """Offsets of one lane in a rank's arena; `whole` is -1 where there is none."""

    input: int
    out: int
    whole: int
    flags: int
    epochs: int
    slots: int
    turns: int


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Where everything lies in each rank's arena; the same on all ranks."""

    lanes: tuple[Lane, ...]
    failed: int
    num_bytes: int


def push_tokens(world: int, hidden: int, max_tokens: int) -> int:
    """Rows that a slot holds of each rank: the most that the push engine sums. At least 16, or max_tokens."""
    return min(max_tokens, PUSH_SLOT_BYTES // (world * hidden * ELEMENT_BYTES))


def arena_layout(hidden: int, max_tokens: int, num_lanes: int, *, whole_residual: bool) -> ArenaLayout:
    """Flags, epochs, slots, turns and the failed word start as zeros. Raises: InvalidRequest."""
    check_shape(1, 0, hidden, max_tokens)
    if not 1 <= num_lanes <= 8:
        raise InvalidRequest(f"{num_lanes} lanes: 1 to 8")
    place = 0

    def take(num_bytes: int) -> int:
        nonlocal place
        here, place = place, place + _up(num_bytes, ALIGN_BYTES)
        return here

    rows_bytes = max_tokens * hidden * ELEMENT_BYTES
    slot_bytes = min(PUSH_SLOT_BYTES, MAX_WORLD * rows_bytes)  # enough for any world
    lanes = tuple(
        Lane(
            input=take(rows_bytes),
            out=take(rows_bytes),
            whole=take(rows_bytes) if whole_residual else -1,
            flags=take(MAX_CTAS * MAX_WORLD * 4),
            epochs=take(MAX_CTAS * 4),
            slots=take(NUM_SLOTS * slot_bytes),
            turns=take(2 * 4),
        )
        for _ in range(num_lanes)
    )
    failed = take(4)
    return ArenaLayout(lanes, failed, place)
