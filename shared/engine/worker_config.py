"""Settings of a worker (section "worker"), common to the prefill and decode services.

The services' config.py files fill in their role's defaults with `for_role`; nothing else differs.
"""

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from shared.errors import SettingsError
from shared.settings import LogLevel, check_share
from shared.wire.reports import Role


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Effective settings of one worker. An empty string means the role's default, where one exists."""

    instance: str = ""
    log_level: LogLevel = "info"
    trace_endpoint: str = ""
    trace_dir: str = ""
    trace_sample_ratio: float = 1.0
    admin_listen: str = ""

    role: Literal["", "prefill", "decode", "colocated"] = ""  # "": the service's own
    listen: str = ""  # ZeroMQ address of the ROUTER
    advertise: str = ""  # what others connect to; "": the address that is really listened on
    scheduler_reports: str = "tcp://127.0.0.1:8102"
    coordinator_url: str = "http://127.0.0.1:8103"
    coordinator_key: str = ""
    redis_url: str = "redis://127.0.0.1:8104/0"  # "": this worker writes no prompt tree
    mempool_socket: str = ""  # "": no pool: every prompt is computed

    model_dir: str = ""
    model_name: str = ""  # "": the folder's name
    engine: Literal["vllm", "mock"] = "vllm"  # the mock is for fault and load tests only
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: str = "auto"  # the model's; float32 on a CPU that is slow with 16 bits (cpu_dtype.py)
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights, for measurements
    threads: int = 1  # OpenMP threads of a CPU engine
    kv_cache: Literal["auto", "pages", "copy"] = "auto"  # pages: the cache is the mempool's memory itself
    kv_layout: Literal["cross-layer", "token-major", "layer-major"] = (
        "cross-layer"  # the others: without block table
    )
    slot_kernel: Literal["auto", "flash3", "torch_flash2", "torch_sdpa"] = (
        "auto"  # of the layouts without block table
    )
    # pages in host memory apart from other host memory, by this name: of one NUMA node, say; "own": the
    # instance's; "": the common one
    kv_space: str = ""
    # which end keeps what: basic (neither), 1 (prefill), 2 (both), 3 (what decode completes goes back to prefill too)
    pd_caching: Literal["basic", "1", "2", "3"] = "3"
    # in what pieces, and when, blocks go from prefill to decode (shared/kv/transfer_mode.py); as mempool.transfer_mode
    transfer_mode: Literal["by-request-agg", "by-request", "by-layer"] = "by-request-agg"
    # 0: 64 on a GPU, 32 on a CPU (docs/decisions/0035); without block table on a GPU as many as waste least of a page,
    # by the model's shape: docs/page-geometry.md has the table
    block_tokens: int = 0
    max_model_len: int = 0  # 0: the model's own
    max_num_seqs: int = 0  # requests that run at once; 0: 256 on a GPU, 64 on a CPU
    max_num_batched_tokens: int = 2048
    # whose turn it is in the engine: fcfs (order of arrival) or cfs (fair slices where memory is short, shared/fair)
    local_policy: Literal["fcfs", "cfs"] = "fcfs"
    fair_slice_steps: int = 8  # engine steps between two plans
    # what slices are for: shares (tenants are served by weight, to the token) or bursts (everybody's first slice soon,
    # then the order of arrival; docs/decisions/0025). The three after it are by this, unless they say otherwise
    fair_for: Literal["shares", "bursts"] = "shares"
    # least served first, compared in units of so many tokens; within one, who came first. 1: to the token; more than an
    # answer has: order of arrival behind everybody's first slice. -1: by fair_for, as of the next two
    fair_quantum_tokens: int = -1
    fair_patience_slices: int = -1  # who waited so many goes first
    # while turns are taken, prompts that wait are computed over about so long, beside the decodes; 0: at once
    fair_spread_ms: float = -1.0
    fair_chunk_tokens: int = 512  # the least of a step that they then have
    # of a turn's time (a slice; in bursts half of the patience); where moving pages takes more: order of arrival
    fair_max_switch_share: float = 0.1
    fair_stay_ratio: float = 1.5  # slices that pay go on until moving takes so many times that share
    # whether blocks of parked requests leave for swap space (lent pages, host memory) where pages are short
    fair_swap: Literal["auto", "off"] = "auto"
    fair_swap_gb_per_s: float = 0.0  # of that space, for the decision whether slices pay; 0: as measured
    # how ranks add up: off (vLLM's way), fuse (with residual and norm in one operation), full (and steps of at least
    # weave_min_tokens in two parts, one's sum under the other's compute); 0: from where it was measured to pay. auto:
    # of these what wins in a short measurement before the first start on GPUs with NVLink (decode: fuse at most)
    weave: Literal["auto", "off", "fuse", "full"] = "off"
    weave_min_tokens: int = 0
    # multiprocessors that a part's sum takes from the other's compute; 0: the fewest from which it was measured, at the
    # engine's start, to be as fast as from more
    weave_sms: int = 0
    # whether fused sums may go through NVLink's switch where the GPUs give a multicast address (TokenWeave, Listing 1);
    # by maps of each other's memory where they do not. Never run by us
    weave_multicast: bool = False
    # of running requests' blocks that may lie outside the engine's memory (in lent pages, host memory), where attention
    # reads them in place: prompts may be longer than that memory; 0: none
    far_bytes: int = 0
    # 0: the engine's own choice. On a GPU in the mempool's pages, 640 MiB of it are the mempool's CUDA context
    kv_cache_bytes: int = 0
    gpu_memory_utilization: float = 0.0  # 0: the engine's own choice
    tensor_parallel_size: int = 1
    enforce_eager: bool = False  # a CPU engine is always eager, and one without block table
    # steps of at most so many tokens are recorded as CUDA graphs, at least (docs/decisions/0055, 0056); 0: vLLM's own
    # choice, twice max_num_seqs and 512 at most
    graph_tokens: int = 1024
    structured_backend: Literal["guidance", "xgrammar", "auto"] = "guidance"
    structured_any_whitespace: bool = False  # True: a small model may fill its answer with blanks

    # a short profile of the engine at its start, for the cost model; auto: unless state_dir has one of its kind
    calibrate: Literal["auto", "off", "always"] = "auto"
    state_dir: str = ""  # where profiles are kept; "": nowhere

    max_inflight: int = 1024  # attempts held at once; more are refused with a retryable code
    max_deadline_ms: int = 3_600_000  # longer deadlines of requests are cut to this
    report_interval_ms: int = 250
    drain_deadline_ms: int = 30_000
    acquire_timeout_ms: int = 250  # for the pool's answer; then the prompt is computed
    fetch_wait_ms: int = (
        1_000  # at least, for pages that the scheduler wants fetched; computing may be worth more
    )
    # prefill: its token is the client's, wherever a request allows that; or decode always draws it again
    handoff_mode: Literal["continue", "resample"] = "continue"
    handoff_ahead: bool = True  # prefill: blocks of a long prompt leave while the rest of it is computed
    handoff_wait_ms: int = (
        2_000  # decode: for the prefill side's pages, at least; computing may be worth more
    )
    handoff_ttl_ms: int = 10_000  # prefill: how long the pool holds pages that nobody fetches
    # decode: how long a handed-over prompt waits, its pages held where they are, until there is room for it and its
    # answer beside those that run; 0: it never does
    handoff_room_ms: int = 60_000
    # a prompt of so many tokens and more goes to the engine core while its pages come (docs/decisions/0057); 0: none
    early_from_tokens: int = 8_192
    lease_ttl_ms: int = 30_000
    hello_timeout_ms: int = 2_000
    gateway_silent_ms: int = 1_500  # a gateway that answers no heartbeat for so long is lost
    # an engine that gives no answer between two steps for so long hangs: its worker ends, to be started again; 0: two
    # minutes on a GPU, ten on a CPU, where one step of a large model may take minutes
    engine_silent_ms: int = 0

    mock_prefill_tokens_per_s: float = 50_000.0
    mock_step_ms: float = 10.0  # one decode step, whatever the batch
    mock_kv_blocks: int = 4096
    mock_start_ms: float = 0.0
    mock_eos_after_tokens: int = 0  # 0: never
    mock_die_after_tokens: int = 0  # 0: never; the engine dies once it has made so many in all
    mock_hang_after_tokens: int = 0  # 0: never; no output after so many in all
    mock_drop_first_steps: int = 0  # steps that take their time and produce nothing


_POSITIVE = (
    "threads", "fair_slice_steps", "fair_chunk_tokens",
    "max_num_batched_tokens", "tensor_parallel_size",
    "max_inflight", "max_deadline_ms", "report_interval_ms", "acquire_timeout_ms", "fetch_wait_ms", "handoff_wait_ms",
    "handoff_ttl_ms", "lease_ttl_ms", "hello_timeout_ms", "gateway_silent_ms", "mock_prefill_tokens_per_s",
    "mock_kv_blocks",
)  # fmt: skip
_NOT_NEGATIVE = (
    "block_tokens", "max_model_len", "kv_cache_bytes", "gpu_memory_utilization", "drain_deadline_ms", "mock_step_ms",
    "mock_start_ms", "mock_eos_after_tokens", "mock_die_after_tokens", "mock_hang_after_tokens",
    "mock_drop_first_steps", "fair_max_switch_share", "fair_swap_gb_per_s", "weave_min_tokens", "far_bytes",
    "handoff_room_ms", "engine_silent_ms", "max_num_seqs", "graph_tokens",
    "early_from_tokens",
)  # fmt: skip


GPU_BLOCK_TOKENS, CPU_BLOCK_TOKENS = 64, 32  # of a block, unless the settings say otherwise
GPU_SEQS, CPU_SEQS = 256, 64  # requests at once, likewise
BY_FAIR_FOR = -1  # of a setting that fair_for decides
MOST_FAR_MOVES = (
    1_024  # at once: what a lender wants back goes in one turn, not in several of the engine's steps each
)
MOST_WEAVE_SMS = 32  # what the fused operation can be told


def block_tokens(settings: WorkerSettings, *, on_cpu: bool) -> int:
    """Tokens of a block: the unit of hashing, sharing and moving.

    Without block table on a GPU they follow from the model's shape: engine_arguments.with_slots settles them first.
    """
    return settings.block_tokens or (CPU_BLOCK_TOKENS if on_cpu else GPU_BLOCK_TOKENS)


def on_device(settings: WorkerSettings, device: str) -> WorkerSettings:
    """With what follows from the device, "cpu" or "cuda", where the settings leave it open."""
    on_cpu = device == "cpu"
    return msgspec.structs.replace(
        settings, device=device, enforce_eager=settings.enforce_eager or on_cpu,
        max_num_seqs=settings.max_num_seqs or (CPU_SEQS if on_cpu else GPU_SEQS),
    )  # fmt: skip


def works_in_pages(settings: WorkerSettings) -> bool:
    """Whether the engine's cache is the mempool's memory, or one of its own with copies to and from pages."""
    return bool(settings.mempool_socket) and settings.kv_cache != "copy"


def has_slots(settings: WorkerSettings) -> bool:
    """Whether requests lie in slots of consecutive addresses, and attention reads them without a block table."""
    return works_in_pages(settings) and settings.kv_layout != "cross-layer"


def sends_ahead(settings: WorkerSettings) -> bool:
    """Whether a prompt's blocks, or its layers, leave for the decode side while the rest of it is computed."""
    if settings.role != "prefill" or settings.engine == "mock" or not works_in_pages(settings):
        return False
    if settings.transfer_mode == "by-layer":
        return True
    return settings.handoff_ahead and not _without_ahead(settings)


def ahead_prevented_by(settings: WorkerSettings) -> str:
    """The setting for which handoff_ahead, which is on and would do something, does nothing; "": there is none."""
    bare = msgspec.structs.replace(settings, local_policy="fcfs", far_bytes=0, kv_layout="cross-layer")
    return _without_ahead(settings) if sends_ahead(bare) and not sends_ahead(settings) else ""


def _without_ahead(settings: WorkerSettings) -> str:
    """The setting whose engine has another scheduler than the one that sends blocks ahead; "": there is none."""
    if settings.local_policy == "cfs":
        return "local_policy"
    if settings.far_bytes:
        return "far_bytes"
    return "kv_layout" if has_slots(settings) else ""


# measured on H200s for bursts (docs/decisions/0025)
_FAIR_FOR: Mapping[str, dict[str, float]] = {
    "shares": {"quantum_tokens": 1, "patience_slices": 32, "spread_ms": 0.0},
    "bursts": {"quantum_tokens": 1 << 20, "patience_slices": 128, "spread_ms": 500.0},
}


def fair_rules(settings: WorkerSettings) -> dict[str, float]:
    """Fields of shared.fair.rules.FairRules."""
    said = {
        "quantum_tokens": settings.fair_quantum_tokens,
        "patience_slices": settings.fair_patience_slices,
        "spread_ms": settings.fair_spread_ms,
    }
    return {
        **_FAIR_FOR[settings.fair_for],
        **{name: value for name, value in said.items() if value != BY_FAIR_FOR},
        "slice_steps": settings.fair_slice_steps,
        "max_switch_share": settings.fair_max_switch_share,
        "stay_ratio": settings.fair_stay_ratio,
        "chunk_tokens": settings.fair_chunk_tokens,
    }


def fair_swap(settings: WorkerSettings) -> dict[str, float]:
    """Of swap space, for the engine's scheduler: `is_on`, and `bytes_per_s` (0: as measured)."""
    return {"is_on": float(settings.fair_swap == "auto"), "bytes_per_s": settings.fair_swap_gb_per_s * 1e9}


def far_places(settings: WorkerSettings, block_bytes: int) -> dict[str, int]:
    """For the engine's scheduler and ranks: `far_blocks` at once, and places beyond these for blocks that move."""
    blocks = settings.far_bytes // block_bytes
    return {"far_blocks": blocks, "far_places": blocks + min(blocks, MOST_FAR_MOVES)}


def _is_wildcard(listen: str) -> bool:
    """Every interface of the machine: no address that somebody else could connect to."""
    host = listen.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return host == "*" or ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name, or an ipc path
        return False


def _check_fair(found: WorkerSettings) -> None:
    """Raises: SettingsError."""
    for name, least in (("fair_quantum_tokens", 1), ("fair_patience_slices", 1), ("fair_spread_ms", 0)):
        if getattr(found, name) != BY_FAIR_FOR and getattr(found, name) < least:
            raise SettingsError(
                f"setting worker.{name}: {getattr(found, name)} must be at least {least}, or {BY_FAIR_FOR}: by fair_for"
            )
    if found.fair_max_switch_share > 1.0:
        raise SettingsError(
            f"setting worker.fair_max_switch_share: {found.fair_max_switch_share} is no share; try 0.1"
        )
    if found.fair_stay_ratio < 1.0:
        raise SettingsError(f"setting worker.fair_stay_ratio: {found.fair_stay_ratio} is below 1; try 1.5")


def _check_weave(found: WorkerSettings) -> None:
    """Raises: SettingsError."""
    if found.weave_multicast and found.weave == "off":
        raise SettingsError(
            "setting worker.weave_multicast: nothing is fused with worker.weave off; try weave = fuse"
        )
    if found.weave == "full" and (found.kv_layout != "cross-layer" or found.transfer_mode == "by-layer"):
        raise SettingsError(
            "setting worker.weave: 'full' computes each layer twice, for a part of the step each; it needs kv_layout = "
            "cross-layer and whole prompts (transfer_mode by-request-agg or by-request); try fuse"
        )


def _check_far(found: WorkerSettings) -> None:
    """Raises: SettingsError."""
    if not found.far_bytes:
        return
    if not works_in_pages(found):
        raise SettingsError(
            "setting worker.far_bytes: blocks are read outside the engine's memory only by one that works in the "
            "pool's pages; set worker.mempool_socket and worker.kv_cache = pages, or try 0"
        )
    if has_slots(found):
        raise SettingsError(
            f"setting worker.far_bytes: kv_layout {found.kv_layout!r} reads a request's blocks side by side, without a "
            "table that could name a place elsewhere; set worker.kv_layout = cross-layer, or try 0"
        )
    if found.transfer_mode == "by-layer":
        raise SettingsError(
            "setting worker.far_bytes: with transfer_mode 'by-layer' decode holds a page for each block of a prompt, "
            "and a layer leaves from this engine's own page; set worker.transfer_mode = by-request-agg, or try 0"
        )


def check_values(found: WorkerSettings) -> None:
    """What is wrong in any role, whatever the model and the mempool. Raises: SettingsError naming the key."""
    for name in _POSITIVE:
        if getattr(found, name) <= 0:
            raise SettingsError(f"setting worker.{name}: {getattr(found, name)} must be greater than 0")
    for name in _NOT_NEGATIVE:
        if getattr(found, name) < 0:
            raise SettingsError(f"setting worker.{name}: {getattr(found, name)} must not be negative")
    check_share("worker", "trace_sample_ratio", found.trace_sample_ratio)
    _check_fair(found)
    if not 0 <= found.weave_sms <= MOST_WEAVE_SMS:
        raise SettingsError(
            f"setting worker.weave_sms: {found.weave_sms} is not in 0..{MOST_WEAVE_SMS}; try 0"
        )


def for_role(found: WorkerSettings, *, role: Role, instance: str, port: int) -> WorkerSettings:
    """Fill in a role's defaults and check the whole.

    Args: port: of the ROUTER; the admin listener's default is the next one.
    Raises: SettingsError naming the key and a working value.
    """
    check_values(found)
    if not found.model_dir or not Path(found.model_dir, "config.json").is_file():
        raise SettingsError(f"setting worker.model_dir: {found.model_dir!r} holds no config.json")
    if found.kv_layout != "cross-layer" and not works_in_pages(found):
        raise SettingsError(
            f"setting worker.kv_layout: {found.kv_layout!r} needs the pool's pages; set worker.mempool_socket and "
            "worker.kv_cache = pages"
        )
    if found.transfer_mode != "by-request-agg" and (
        not works_in_pages(found) or found.kv_layout == "token-major"
    ):
        raise SettingsError(
            f"setting worker.transfer_mode: {found.transfer_mode!r} needs the pool's pages and layers that follow each "
            "other in them; set worker.mempool_socket, worker.kv_cache = pages and another kv_layout than token-major"
        )
    if found.local_policy == "cfs" and (not works_in_pages(found) or found.transfer_mode == "by-layer"):
        raise SettingsError(
            "setting worker.local_policy: 'cfs' needs the pool's pages and whole prompts; set worker.mempool_socket, "
            "worker.kv_cache = pages and another transfer_mode than by-layer"
        )
    _check_far(found)
    _check_weave(found)
    listen = found.listen or f"tcp://127.0.0.1:{port}"
    if not listen.startswith(("tcp://", "ipc://")):
        raise SettingsError(
            f"setting worker.listen: {listen!r} is no ZeroMQ address; try tcp://127.0.0.1:{port}"
        )
    if _is_wildcard(listen) and not found.advertise:
        raise SettingsError(
            f"setting worker.advertise: with listen {listen!r}, name the address that others can reach, "
            f"e.g. tcp://worker-host:{port}"
        )
    return msgspec.structs.replace(
        found,
        role=found.role or role,
        instance=found.instance or instance,
        listen=listen,
        admin_listen=found.admin_listen or f"127.0.0.1:{port + 1}",
        model_name=found.model_name or Path(found.model_dir).resolve().name,
    )
