"""Settings of the gateway, and the only place of this service that knows where they come from."""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from services.gateway.auth import load_keys, load_weights
from services.gateway.origins import check_origins
from shared import settings
from shared.cpus import usable_cpus
from shared.errors import SettingsError

ABOUT = "OpenAI's HTTP API over the cluster (python -m services.gateway --model-dir FOLDER)."  # for --help


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Effective settings of one gateway process; see README.md for what each is good for."""

    instance: str = "gateway-0"
    log_level: settings.LogLevel = "info"
    trace_endpoint: str = ""
    trace_dir: str = ""
    trace_sample_ratio: float = 1.0

    listen: str = "127.0.0.1:8000"
    processes: int = 0  # that share the address; 0: one for every eight cores, eight at most
    scheduler: str = "tcp://127.0.0.1:8101"
    redis_url: str = "redis://127.0.0.1:8104/0"  # "": no prompt tree
    coordinator_url: str = "http://127.0.0.1:8103"
    coordinator_key: str = ""
    model_dir: str = ""
    model_name: str = ""

    api_keys: list[str] = []
    api_keys_file: str = ""  # lines of `key` or `key tenant`; # begins a comment
    # `scheme://host[:port]` of pages that may read answers in a browser (CORS); `*`: of all, as with vLLM; "": of none
    allowed_origins: list[str] = msgspec.field(default_factory=lambda: ["*"])

    max_body_bytes: int = 16 << 20
    max_header_bytes: int = 16 << 10
    header_timeout_ms: int = 10_000
    body_idle_timeout_ms: int = 10_000
    keep_alive_timeout_ms: int = 65_000
    slow_reader_bytes: int = 256 << 10  # unsent beside its largest event before a stream is cut off
    unread_timeout_ms: int = 60_000  # of what is unsent, while its client takes nothing of it

    max_concurrent_requests: int = 1024  # per process
    max_concurrent_per_tenant: int = 0  # 0: no limit of its own
    # `tenant=weight`: of engines that are short (worker.local_policy); others: 1
    tenant_weights: list[str] = []
    tokenizer_threads: int = 1

    tree_lookup_deadline_ms: int = 20  # a look-up has returned by then, timers' lateness included
    tree_max_blocks: int = 4096
    tree_cache_answers: int = 0  # look-ups that a process remembers; 0: each asks Redis (decision 0012)
    tree_cache_age_ms: int = 250  # for so long
    membership_interval_ms: int = 1000
    placement_deadline_ms: int = 15_000  # first placement, and each new one after a failure
    # how long a request waits when every instance is full, unless another of its prompts runs, or has
    shed_wait_ms: int = 1_000
    place_reply_ms: int = 1_000
    request_deadline_ms: int = 600_000
    # a begun stream that lost its instance: to its next token, else one error event
    resume_deadline_ms: int = 1_800
    worker_silent_ms: int = 1_500  # a worker that answers no heartbeat for so long is lost
    # attempts that are placed again when an instance fails, per process: this share of the requests, ...
    retry_share: float = 0.2
    retry_floor_per_s: float = 5.0  # ... and so many a second, ...
    # ... of which so many may be saved: as many as an engine of 256 sequences may hold
    retry_burst: float = 1_024.0
    drain_deadline_ms: int = 30_000


CORES_PER_PROCESS = 8  # on 16 cores two are at half load within 5 ms; each more costs CPU for every request
MOST_PROCESSES = 8


def useful_processes(num_cpus: float) -> int:
    """How many gateways a machine of so many cores has by itself."""
    return max(1, min(MOST_PROCESSES, int(num_cpus) // CORES_PER_PROCESS))


def split_listen(listen: str) -> tuple[str, int]:
    """Host and port of `host:port`. Raises: SettingsError."""
    host, sep, port = listen.rpartition(":")
    if not sep or not host or not port.isdigit() or int(port) > 65535:
        raise SettingsError(f"setting gateway.listen: {listen!r} is no host:port; try 127.0.0.1:8000")
    return host.strip("[]"), int(port)


def check_values(found: GatewaySettings) -> None:
    """What is wrong whatever the model, and wherever the file of keys may be. Raises: SettingsError."""
    split_listen(found.listen)
    load_keys(found.api_keys, "")
    load_weights(found.tenant_weights)
    check_origins(found.allowed_origins)
    settings.check_share("gateway", "trace_sample_ratio", found.trace_sample_ratio)
    for name in (
        "max_body_bytes", "max_header_bytes", "max_concurrent_requests", "placement_deadline_ms",
        "place_reply_ms", "request_deadline_ms", "resume_deadline_ms", "worker_silent_ms", "header_timeout_ms",
        "body_idle_timeout_ms", "tree_lookup_deadline_ms", "tree_cache_age_ms", "membership_interval_ms",
        "keep_alive_timeout_ms", "slow_reader_bytes", "unread_timeout_ms", "tokenizer_threads",
    ):  # fmt: skip
        if getattr(found, name) < 1:
            raise SettingsError(f"setting gateway.{name}: {getattr(found, name)} must be at least 1")
    if found.tree_cache_answers < 0:
        raise SettingsError("setting gateway.tree_cache_answers: must be 0 (none) or more, e.g. 1024")
    for name in (
        "retry_share", "retry_floor_per_s", "retry_burst", "max_concurrent_per_tenant", "shed_wait_ms",
        "drain_deadline_ms", "tree_max_blocks", "processes",
    ):  # fmt: skip
        if not getattr(found, name) >= 0:
            raise SettingsError(f"setting gateway.{name}: {getattr(found, name)} must not be negative")


def _check(found: GatewaySettings) -> None:
    check_values(found)
    if not found.model_dir:
        raise SettingsError("setting gateway.model_dir: name the folder that holds tokenizer.json")
    if not Path(found.model_dir, "tokenizer.json").is_file():
        raise SettingsError(f"setting gateway.model_dir: no tokenizer.json in {found.model_dir!r}")
    load_keys(found.api_keys, found.api_keys_file)  # here: a child that fails at it would be started for ever


def load(argv: Sequence[str]) -> GatewaySettings:
    """Defaults, TOML, QUIRE_GATEWAY_* and flags. Raises: SettingsError naming the key and what works."""
    found = settings.load(GatewaySettings, "gateway", argv, about=ABOUT)
    if found.processes == 0:
        found = with_processes(found, useful_processes(usable_cpus()))
    _check(found)
    if not found.model_name:
        found = msgspec.structs.replace(found, model_name=Path(found.model_dir).resolve().name)
    return found


def with_listen(found: GatewaySettings, listen: str) -> GatewaySettings:
    """The same settings with the address that was really taken (port 0 was asked for)."""
    return msgspec.structs.replace(found, listen=listen)


def with_processes(found: GatewaySettings, processes: int) -> GatewaySettings:
    """The same settings with another number of processes."""
    return msgspec.structs.replace(found, processes=processes)


def use_shared_metrics(folder: str) -> None:
    """Keep metrics in files that all processes of this gateway share; call before they are imported."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # noqa: TID251 - prometheus_client has no other way


def go_on_in_metrics_of(number: int) -> None:
    """Count on in the files of the process of this number that is gone: one file for each death would add up. Call in
    the new process, before it has a metric. Gauges carry the number as `pid`.
    """
    from prometheus_client import values  # imported here: after use_shared_metrics()

    values.ValueClass = values.MultiProcessValue(lambda: number)  # type: ignore[assignment]


def shared_metrics_folder() -> str:
    """Folder of use_shared_metrics(), "" when each process has its own."""
    return os.environ.get("PROMETHEUS_MULTIPROC_DIR", "")  # noqa: TID251 - as above
