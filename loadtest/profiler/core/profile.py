"""The profile as data: what a model keeps, holds, lacks, and whether it lends or borrows. AQUA 4, 4.1, 9.4.

All bytes are of one GPU: tensor-parallel shards hold equal parts. The file is one JSON object; whoever places models
reads `model`, `tp`, `role` and `bytes_per_gpu` of it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from shared.errors import SettingsError

FORMAT = "quire-profile/1"
Role = Literal["producer", "consumer", "neutral"]
GB = 1_000_000_000
THRESHOLD_BYTES = 10 * GB  # AQUA 4: "free memory above a threshold (e.g., 10 GB)"
CHUNK_TOKENS = 512
BURSTS = (2.0, 3.0, 5.0)


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """AQUA 4.1: TTFT under 1 s, P99 TBT under 100 ms. ttft_share: of the requests that must keep the first; the paper
    names no percentile for it, and a prompt that alone takes longer says nothing of the rate."""

    ttft_ms: float = 1_000.0
    tbt_ms: float = 100.0
    ttft_share: float = 0.9
    tbt_share: float = 0.99

    def __post_init__(self) -> None:
        if not (self.ttft_ms > 0 and self.tbt_ms > 0):
            raise SettingsError(
                f"limits must be above 0 ms, not {self.ttft_ms:g} (TTFT) and {self.tbt_ms:g} (TBT); try 1000 and 100"
            )
        if not (0 < self.ttft_share <= 1 and 0 < self.tbt_share <= 1):
            raise SettingsError(
                f"shares must be in (0, 1], not {self.ttft_share:g} and {self.tbt_share:g}; try 0.9 and 0.99"
            )


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run at one rate. ttft_ms, tbt_ms: at the SLO's shares; a failed request counts as one that took for ever,
    and -1 says that the share itself failed. tbt_ms: over all gaps between tokens of all requests."""

    rate_per_s: float
    seed: int
    num_requests: int
    num_failed: int
    ttft_ms: float
    ttft_p50_ms: float
    tbt_ms: float
    peak_kv_bytes: int
    kept: bool = False


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """factor times the stable rate for a while. demand_bytes: KV at the peak if nobody waited (demand.py); swap_bytes:
    what of it the engine's own memory has no room for. ttft_ms: as the run without preemption had it. turns_*: of the
    same burst in fair slices, where that was run: its TTFT, and the most that lay in swap space, of one GPU."""

    factor: float
    demand_bytes: int
    swap_bytes: int
    ttft_ms: float
    num_requests: int
    num_failed: int
    turns_ttft_ms: float = 0.0
    turns_swap_bytes: int = 0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for; the paper's values where it names some. need_factor: the burst that bytes_per_gpu is for.

    seconds, least_requests: a run's arrivals go on until both are reached.
    """

    slo: Slo = Slo()
    threshold_bytes: int = THRESHOLD_BYTES
    chunk_tokens: int = CHUNK_TOKENS
    step_per_s: float = 0.5
    bursts: tuple[float, ...] = BURSTS
    need_factor: float = 2.0
    burst_s: float = 60.0
    seconds: float = 60.0
    least_requests: int = 150
    seed: int = 1
    lengths: str = ""

    def __post_init__(self) -> None:
        if (
            self.threshold_bytes < 0
            or self.burst_s <= 0
            or self.seconds <= 0
            or self.least_requests < 1
            or self.chunk_tokens < 1
        ):
            raise SettingsError(
                "the threshold must be at least 0 bytes, a chunk at least 1 token, and runs and bursts longer than 0 s"
            )
        if any(not (math.isfinite(factor) and factor > 1) for factor in self.bursts):
            raise SettingsError(f"burst factors must be above 1, not {_row(self.bursts)}; try 2,3,5")
        if self.bursts and self.need_factor not in self.bursts:
            raise SettingsError(
                f"the need is that of one of the bursts {_row(self.bursts)}, not of {self.need_factor:g}"
            )


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What `quire profile` writes. bytes_per_gpu: surplus positive, need negative, 0 for neutral.

    pool_bytes: KV memory; peak_kv_bytes: most of it in use at the stable rate; free_bytes: the rest. Of a callable they
    are the device's memory, what was used and what was free at peak throughput, and stable_rate_per_s is its items/s.
    num_instances: that the rate was shared by. swap_bytes: by burst factor ("2", "3", "5").
    series: [arrival in s, TTFT ms, TPOT ms] of a run's requests, by rate.
    batches: of a callable (sweep.py).
    """

    format: str = FORMAT
    model: str
    tp: int
    role: Role
    bytes_per_gpu: int
    stable_rate_per_s: float
    num_instances: int = 1
    pool_bytes: int
    peak_kv_bytes: int
    free_bytes: int
    swap_bytes: dict[str, int] = {}
    settled: bool = True
    reason: str = ""
    source: str = ""
    calibrated: bool = True
    settings: dict[str, Any] = {}
    machine: dict[str, Any] = {}
    runs: list[dict[str, Any]] = []
    bursts: list[dict[str, Any]] = []
    series: dict[str, list[list[float]]] = {}
    batches: list[dict[str, Any]] = []


def nearest_rank(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """The smallest value that at least `share` of the weight does not exceed. Args: (value, weight > 0). 0 for none."""
    total, reached = sum(weight for _, weight in weighted), 0.0
    for value, weight in sorted(weighted):
        reached += weight
        if reached >= share * total * (1 - 1e-12):
            return value
    return 0.0


def judge(measured: Measured, slo: Slo) -> bool:
    """Whether a run kept the SLO. One without requests says nothing against it."""
    return 0 <= measured.ttft_ms <= slo.ttft_ms and measured.tbt_ms <= slo.tbt_ms


def label(free_bytes: int, need_bytes: int, threshold_bytes: int) -> tuple[Role, int]:
    """(role, bytes_per_gpu), as AQUA 4.1: what has more free than the threshold lends it; else what needs swap space in
    bursts borrows; the rest is the paper's "producer with 0 memory to offer", here neutral."""
    if free_bytes > threshold_bytes:
        return "producer", free_bytes
    if need_bytes > 0:
        return "consumer", -need_bytes
    return "neutral", 0


def factor_name(factor: float) -> str:
    """A burst's key in the file: "2", "2.5"."""
    return f"{factor:g}"


def size_text(count: int) -> str:
    """31.80 GB, 12.20 MB: for people, in the decimal units of data sheets."""
    return f"{count / GB:.2f} GB" if not 0 < abs(count) < GB // 10 else f"{count * 1000 / GB:.2f} MB"


def encode(profile: Profile) -> bytes:
    """The file: indented JSON, one line a run or request."""
    head = msgspec.to_builtins(profile)
    text = msgspec.json.format(msgspec.json.encode(head), indent=2)
    return text + b"\n"


def decode(data: bytes, source: str = "the profile") -> Profile:
    """Raises: SettingsError when it is none, or says what cannot be."""
    try:
        found = msgspec.json.decode(data, type=Profile)
    except msgspec.MsgspecError as error:
        raise SettingsError(f"{source} is no profile of `quire profile`: {error}") from error
    if found.format != FORMAT:
        raise SettingsError(f"{source} has the format {found.format!r}, not {FORMAT!r}")
    signs: Mapping[Role, bool] = {
        "producer": found.bytes_per_gpu > 0,
        "consumer": found.bytes_per_gpu < 0,
        "neutral": found.bytes_per_gpu == 0,
    }
    if found.tp < 1 or not signs[found.role]:
        raise SettingsError(
            f"{source}: {found.bytes_per_gpu} bytes on {found.tp} GPUs cannot be those of a {found.role}"
        )
    return found


def _row(factors: Sequence[float]) -> str:
    return ",".join(factor_name(factor) for factor in factors)
