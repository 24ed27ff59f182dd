"""Settings of the local cluster (section `cluster`), and what is refused of them."""

from typing import Literal

import msgspec

from deploy.local.addresses import check_address, check_url, parse_join
from shared import settings
from shared.errors import SettingsError

MAX_RANKS = 64  # of one engine
MAX_WORKERS_PER_ROLE = 10  # ports base+20.. and base+40..
MAX_WAIT_S = 7 * 24 * 3600  # beyond 24 days no socket has a timeout
_MAX_BYTES = 1 << 50
# least, most and an example; None is the default
_RANGES: dict[str, tuple[int, int, int]] = {
    "threads": (0, 1024, 1),
    "max_model_len": (0, 1 << 31, 8192),
    "kv_cache_bytes": (0, _MAX_BYTES, 1 << 30),
    "mempool_bytes": (0, _MAX_BYTES, 1 << 30),
    "dram_bytes": (0, _MAX_BYTES, 8 << 30),
    "gateway_processes": (0, 128, 1),
    "log_cap_bytes": (1, _MAX_BYTES, 16 << 20),
    "ready_timeout_s": (1, MAX_WAIT_S, 300),
}


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `quire up` starts. 0 and "" mean: the service's own default."""

    model: str = ""  # folder or Hugging Face id; "": the demo model of this repository
    model_name: str = ""  # as clients name it; "": the folder's name or the id
    engine: Literal["vllm", "mock"] = "vllm"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # disaggregated: also no request on one instance because that is predicted to be cheaper
    topology: Literal["auto", "disaggregated", "colocated"] = "auto"
    num_prefill: int = 1  # 0: none on this machine; only with address
    num_decode: int = 1  # colocated: how many workers there are
    launcher: Literal["auto", "exec", "zygote"] = "auto"
    host: str = "127.0.0.1"  # of the gateway; everything else is on loopback, but for what address says
    # of this machine, for other machines of the cluster, on a private network: coordinator, reports, workers and
    # mempool listen there; "": this machine is the whole cluster
    address: str = ""
    join: str = ""  # HOST:BASE_PORT of the machine with the control plane; "": it is this one
    port: int = 8000
    base_port: int = 8100  # the services' own ports are this plus a fixed offset
    home: str = ""  # "": QUIRE_HOME, else .quire in the repository
    redis_url: str = ""  # "": QUIRE_REDIS_URL, else an own server
    # of the own server. always: the coordinator lends memory only behind a durable journal; every write of the prompt
    # tree waits for the disk too. "": always with memory_market, else everysec
    journal_fsync: Literal["", "everysec", "always"] = ""
    policy: Literal["", "cost", "prompt_tree", "least_load", "session"] = ""
    api_keys: list[str] = []
    gateway_processes: int = 0
    dtype: str = ""
    max_model_len: int = 0
    kv_cache_bytes: int = 0  # of each engine; on a GPU with the 640 MiB of the mempool's CUDA context
    mempool_bytes: int = 0
    pd_caching: Literal["", "basic", "1", "2", "3"] = (
        ""  # which end keeps what, and what goes back to prefill
    )
    transfer_mode: Literal["", "by-request-agg", "by-request", "by-layer"] = (
        ""  # in what pieces, and when, blocks go from prefill to decode
    )
    # instances lend memory to each other by themselves (docs/memory-market.md); on CPU with kv_space own, as each lends
    # to another space than its own
    memory_market: bool = False
    # a second coordinator on this machine, which grants and answers 3 s after the first one has stopped for any reason;
    # machines that join must say so too
    standby: bool = False
    lending_profiles: list[str] = []  # files of `quire profile`: who lends, how much, up to which rate
    # of host memory behind the engines' pages, of each model; 0: none, with memory_market as much as mempool_bytes. Not
    # said, on GPUs with an address, which send blocks to other machines through it: mempool_bytes or 8 GiB, a quarter
    # of the machine's at most
    dram_bytes: int | None = None
    kv_space: str = ""  # own: every worker's pages in host memory apart from the others', for NUMA nodes
    gpu_memory_utilization: float = 0.0  # 0: the engine's own, divided where workers share a GPU
    threads: int = 0  # of each engine on CPU, of each of its ranks
    tensor_parallel: int = 0  # ranks of each engine, each with its own GPU; 0: 1
    prefill_tensor_parallel: int = 0  # 0: as tensor_parallel
    decode_tensor_parallel: int = 0  # colocated workers' too; 0: as tensor_parallel
    prefill_weave: Literal["", "auto", "off", "fuse", "full"] = ""  # worker.weave of that role
    decode_weave: Literal["", "auto", "off", "fuse", "full"] = ""  # colocated workers' too
    trace_endpoint: str = ""  # OTLP/HTTP base URL; "": the local span store
    trace_sample_ratio: float = 1.0
    log_level: settings.LogLevel | Literal[""] = ""
    log_cap_bytes: int = 16 << 20  # per file; one older file is kept
    ready_timeout_s: int = 300  # of `quire up`; a worker that loads may take as long


def check(found: ClusterSettings) -> ClusterSettings:
    """Cross-field checks. Raises: SettingsError naming the key and a value that works."""
    parse_join(found.join)
    check_address(found.address, joins=bool(found.join))
    least = 0 if found.address and found.num_prefill + found.num_decode > 0 else 1
    for name in ("num_prefill", "num_decode"):
        if not least <= getattr(found, name) <= MAX_WORKERS_PER_ROLE:
            raise SettingsError(f"setting cluster.{name}: must be {least} to {MAX_WORKERS_PER_ROLE}; try 1")
    for name in ("tensor_parallel", "prefill_tensor_parallel", "decode_tensor_parallel"):
        if not 0 <= getattr(found, name) <= MAX_RANKS:
            raise SettingsError(f"setting cluster.{name}: must be 0 (the default) to {MAX_RANKS}; try 1")
    if not 1 <= found.port <= 65535:
        raise SettingsError(f"setting cluster.port: {found.port} is no port; try 8000")
    if not 1 <= found.base_port <= 65535 - 100:
        raise SettingsError(f"setting cluster.base_port: {found.base_port} leaves no room; try 8100")
    if found.base_port <= found.port < found.base_port + 60:
        raise SettingsError(
            f"setting cluster.port: {found.port} is among the services' own ports "
            f"({found.base_port} to {found.base_port + 59}); set --base-port too"
        )
    for name, (least, most, good) in _RANGES.items():
        if (said := getattr(found, name)) is not None and not least <= said <= most:
            raise SettingsError(f"setting cluster.{name}: {said} is not in {least}..{most}; try {good}")
    for name, good in (("trace_sample_ratio", 1), ("gpu_memory_utilization", 0.9)):
        if not 0.0 <= getattr(found, name) <= 1.0:
            raise SettingsError(f"setting cluster.{name}: must be 0 to 1; try {good}")
    if found.launcher == "zygote" and (found.engine == "mock" or found.device == "cuda"):
        raise SettingsError("setting cluster.launcher: zygote is for vLLM on CPU; try auto")
    if not found.host:
        raise SettingsError("setting cluster.host: must not be empty; try 127.0.0.1")
    _check_servers(found)
    _check_keys(found.api_keys)
    return found


def _check_keys(keys: list[str]) -> None:
    """As the gateway will, which starts last. Raises: SettingsError, which names no key."""
    from services.gateway.auth import load_keys

    if any("," in key for key in keys):  # they are handed over with commas between them
        raise SettingsError("setting cluster.api_keys: an entry has a comma; want key or key:tenant")
    try:
        load_keys(keys, "")
    except SettingsError as error:
        raise SettingsError(error.message.replace("gateway.api_keys", "cluster.api_keys")) from error


def _check_servers(found: ClusterSettings) -> None:
    """Of others. Raises: SettingsError."""
    if found.trace_endpoint:
        from shared.observe.otlp import check_no_secret

        check_no_secret("setting cluster.trace_endpoint", found.trace_endpoint)
        check_url("setting cluster.trace_endpoint:", found.trace_endpoint, "http://127.0.0.1:4318")
    if found.redis_url:
        from shared.transport.redis_link import parse_redis_url

        try:
            parse_redis_url(found.redis_url)
        except SettingsError as error:  # which says nothing of a password
            raise SettingsError(
                "setting cluster.redis_url: it, or QUIRE_REDIS_URL, is no redis:// address; "
                "try redis://127.0.0.1:6379/0"
            ) from error
