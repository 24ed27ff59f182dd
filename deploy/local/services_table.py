"""The one table of services: the supervisor runs from it, and compose.yaml is tested to agree with it.

ROWS says what does not depend on addresses: module, order, health, limits. build() turns it into the
processes of one machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from deploy.local.addresses import LOOPBACK, Joined, in_url, machine_suffix, reachable
from deploy.local.port_table import Ports, coordinator_urls
from deploy.local.service_order import Spec

GIB = 1 << 30
MIB = 1 << 20

Launcher = Literal["exec", "zygote"]
ProbeKind = Literal["http", "redis", "keeper", "zygote"]


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of service. Memory and CPU are hints: limits in compose, shown by `quire doctor`."""

    module: str  # "": no Python service of ours
    section: str  # of the settings; "": none
    depends_on: tuple[str, ...]
    health_path: str  # "": a connection is the probe
    image: Literal["runtime", "engine", "redis"]
    memory_bytes: int
    cpus: float
    restart: Literal["always"] = "always"
    start_timeout_ms: int = 60_000
    stop_grace_ms: int = (
        2_000  # behind its drain_deadline_ms, where something is under way; else from the signal on
    )


ROWS: dict[str, Row] = {
    "redis": Row("", "", (), "", "redis", 256 * MIB, 0.5),
    "coordinator": Row(
        "services.coordinator", "coordinator", ("redis",), "/ready", "runtime", 256 * MIB, 0.5
    ),
    "scheduler": Row(
        "services.scheduler", "scheduler", ("coordinator",), "/ready", "runtime", 256 * MIB, 0.5
    ),
    "keeper": Row("services.mempool.keeper", "keeper", (), "", "runtime", 64 * MIB, 0.1),
    "mempool": Row(
        "services.mempool",
        "mempool",
        ("keeper",),
        "/ready",
        "runtime",
        1 * GIB,
        1.0,
        start_timeout_ms=240_000,  # a successor looks at every page; killed over it, the next one begins anew
    ),
    "prefill": Row(
        "services.prefill",
        "worker",
        ("coordinator", "scheduler", "mempool"),
        "/ready",
        "engine",
        3 * GIB,
        1.0,
        start_timeout_ms=240_000,
        stop_grace_ms=4_000,
    ),
    "decode": Row(
        "services.decode",
        "worker",
        ("coordinator", "scheduler", "mempool"),
        "/ready",
        "engine",
        3 * GIB,
        1.0,
        start_timeout_ms=240_000,
        stop_grace_ms=4_000,
    ),
    "gateway": Row(
        "services.gateway",
        "gateway",
        ("redis", "coordinator", "scheduler"),
        "/ready",
        "runtime",
        512 * MIB,
        1.0,
        start_timeout_ms=300_000,  # ready only once a worker is
        stop_grace_ms=5_000,
    ),
}
ZYGOTE = "engine-zygote"
ZYGOTE_START_TIMEOUT_MS = 240_000
SCHEDULER_SILENT_MS = 8_000
AWAIT_MODELS = ("prefill", "decode", "gateway", ZYGOTE)  # ready only once a model is loaded, or vLLM imported


@dataclass(frozen=True, slots=True)
class Probe:
    """How readiness is seen."""

    kind: ProbeKind
    host: str = LOOPBACK
    port: int = 0
    path: str = "/ready"  # of keeper: its socket's


@dataclass(frozen=True, slots=True)
class Service:
    """One process of this machine."""

    name: str
    row: str  # key of ROWS, or ZYGOTE
    module: str
    command: tuple[str, ...]  # whole command line; of a module: after `python -m MODULE`
    depends_on: tuple[str, ...]
    probe: Probe
    listens: tuple[tuple[str, int], ...] = ()  # (host, port) that must be free before it starts
    env: Mapping[str, str] = field(default_factory=dict)
    launcher: Launcher = "exec"
    start_timeout_ms: int = 60_000
    stop_grace_ms: int = 2_000
    drain_ms: int = 0  # before it, by the service's own setting
    served_by: tuple[str, ...] = ()  # stopped only behind it
    silent_ms: int | None = None  # None: as the supervisor's rules say

    @property
    def spec(self) -> Spec:
        """The part of it that decides."""
        return Spec(
            name=self.name,
            depends_on=self.depends_on,
            needs_live=(ZYGOTE,) if self.launcher == "zygote" else (),
            start_timeout_ms=self.start_timeout_ms,
            stop_grace_ms=self.stop_grace_ms,
            drain_ms=self.drain_ms,
            served_by=self.served_by,
            silent_ms=self.silent_ms,
        )


@dataclass(frozen=True, slots=True)
class Worker:
    """One engine replica of this machine."""

    role: Literal["prefill", "decode", "colocated"]
    index: int
    gpus: str = ""  # CUDA_VISIBLE_DEVICES; "": as inherited
    machine: str = ""  # part of the name where a cluster has several

    @property
    def name(self) -> str:
        """Its instance id and the supervisor's name of it."""
        return f"{self.role}-{self.index}{self.machine}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything build() needs; made by plan.py from the settings and the machine."""

    host: str
    ports: Ports
    python: str
    workers: tuple[Worker, ...]
    launcher: Launcher
    device: str
    engine: str
    model_dir: str
    model_name: str
    redis_command: tuple[str, ...]  # (): somebody else's server
    sockets: str
    threads: int  # of each engine on CPU
    common_flags: tuple[str, ...]  # for every service of ours
    row_flags: Mapping[str, tuple[str, ...]]  # more, by key of ROWS
    secrets: Mapping[str, Mapping[str, str]]  # row -> environment: what must not be on a command line
    address: str = ""  # where other machines of the cluster reach this one; "": it is alone
    join: Joined | None = None  # the machine with the control plane; None: this one
    ready_timeout_ms: int = 0  # for how long `quire up` waits: an engine may take as long
    memory_market: bool = False  # whether the mempool reports to the coordinator, and lends by itself
    standby: bool = False  # whether a second coordinator waits for the first one's lease to lapse
    drains_ms: Mapping[str, int] = field(
        default_factory=dict
    )  # drain_deadline_ms, by section of the settings


def build(plan: Plan) -> list[Service]:
    """The processes, in the order of ROWS."""
    services = [_redis(plan)] if plan.redis_command else []
    if plan.launcher == "zygote":
        services.append(_zygote(plan))
    if not plan.join:
        services += [_coordinator(plan, "coordinator", plan.ports.coordinator)]
        services += [_coordinator(plan, "standby", plan.ports.standby)] if plan.standby else []
        services += [_scheduler(plan)]
    services += [_keeper(plan), _mempool(plan)]
    services += [_worker(plan, worker) for worker in plan.workers]
    services += [] if plan.join else [_gateway(plan)]
    return services


def _ipc(plan: Plan, name: str) -> str:
    """ZeroMQ address within this machine: half the latency of loopback TCP, private to the folder's owner."""
    return f"ipc://{plan.sockets}/{name}.ipc"


def _shared(plan: Plan, name: str, port: int) -> str:
    """As _ipc, or TCP where other machines connect too."""
    return f"tcp://{in_url(plan.address)}:{port}" if plan.address else _ipc(plan, name)


def _reports(plan: Plan) -> str:
    if plan.join is not None:
        return f"tcp://{in_url(plan.join.host)}:{Ports(0, plan.join.base_port).reports}"
    return _shared(plan, "reports", plan.ports.reports)


def coordinators(plan: Plan) -> tuple[str, ...]:
    """URLs of those that this machine's services ask."""
    host, ports = plan.address or LOOPBACK, plan.ports
    if plan.join is not None:
        host, ports = plan.join.host, Ports(0, plan.join.base_port)
    return coordinator_urls(host, ports, standby=plan.standby)


def _coordinator_url(plan: Plan) -> str:
    return ",".join(coordinators(plan))


def _service(
    plan: Plan,
    row: str,
    name: str,
    flags: tuple[str, ...],
    *,
    probe: Probe,
    listens: tuple[int, ...],
    shared: int = 0,
    launcher: Launcher = "exec",
    env: Mapping[str, str] | None = None,
) -> Service:
    kind, others = ROWS[row], plan.address and shared  # where other machines connect
    absent = {
        *(() if plan.redis_command else ("redis",)),
        *(("coordinator", "scheduler") if plan.join else ()),
    }
    return Service(
        name=name,
        row=row,
        module=kind.module,
        command=("--instance", name, *flags, *plan.row_flags.get(row, ()), *plan.common_flags),
        depends_on=tuple(d for d in kind.depends_on if d not in absent),
        probe=probe,
        listens=(*((probe.host, port) for port in listens), *(((plan.address, shared),) if others else ())),
        env={**plan.secrets.get(row, {}), **(env or {})},
        launcher=launcher,
        start_timeout_ms=_start_timeout_ms(plan, row, kind.start_timeout_ms),
        stop_grace_ms=kind.stop_grace_ms,
        drain_ms=plan.drains_ms.get(kind.section, 0),
    )


def _start_timeout_ms(plan: Plan, row: str, least_ms: int) -> int:
    """Loading a large model from a slow disk takes what it takes, and what is killed over it begins anew."""
    return max(least_ms, plan.ready_timeout_ms) if row in AWAIT_MODELS else least_ms


def _redis(plan: Plan) -> Service:
    return Service(
        name="redis",
        row="redis",
        module="",
        command=plan.redis_command,
        depends_on=(),
        probe=Probe("redis", port=plan.ports.redis),
        listens=((LOOPBACK, plan.ports.redis),),
    )


def _zygote(plan: Plan) -> Service:
    socket = ("--socket", f"{plan.sockets}/zygote.sock")
    return Service(
        name=ZYGOTE,
        row=ZYGOTE,
        module="shared.engine.zygote",
        command=(*socket, "--device", plan.device, "--threads", str(plan.threads)),
        depends_on=(),
        probe=Probe("zygote"),
        start_timeout_ms=_start_timeout_ms(plan, ZYGOTE, ZYGOTE_START_TIMEOUT_MS),
    )


def _coordinator(plan: Plan, name: str, port: int) -> Service:
    host = plan.address or LOOPBACK
    flags = ("--listen", f"{in_url(host)}:{port}")
    probe = Probe("http", host=host, port=port)
    return _service(plan, "coordinator", name, flags, probe=probe, listens=(port,))


def _scheduler(plan: Plan) -> Service:
    ports = plan.ports
    flags = (
        *("--listen", _ipc(plan, "place"), "--report-listen", _reports(plan)),
        *("--admin-listen", f"{LOOPBACK}:{ports.scheduler_admin}"),
        *("--coordinator-url", _coordinator_url(plan)),
    )
    probe = Probe("http", port=ports.scheduler_admin)
    admin = (ports.scheduler_admin,)
    found = _service(plan, "scheduler", "scheduler", flags, probe=probe, listens=admin, shared=ports.reports)
    # nothing is served meanwhile, and its successor knows within a second what it knew
    return replace(found, silent_ms=SCHEDULER_SILENT_MS)


def _keeper_socket(plan: Plan) -> str:
    return f"{plan.sockets}/keeper.sock"


def _keeper(plan: Plan) -> Service:
    """It has no instance and no traces: it must stay small."""
    kind = ROWS["keeper"]
    return Service(
        name="keeper",
        row="keeper",
        module=kind.module,
        command=("--socket", _keeper_socket(plan), *plan.row_flags.get("keeper", ())),
        depends_on=kind.depends_on,
        probe=Probe("keeper", path=_keeper_socket(plan)),
        start_timeout_ms=kind.start_timeout_ms,
        stop_grace_ms=kind.stop_grace_ms,
    )


def _mempool(plan: Plan) -> Service:
    port = plan.ports.mempool_admin
    flags = (
        *("--socket", f"{plan.sockets}/mempool.sock", "--admin-listen", f"{LOOPBACK}:{port}"),
        *("--keeper-socket", _keeper_socket(plan)),
    )
    if plan.memory_market:
        flags += ("--coordinator-url", _coordinator_url(plan))
        if plan.join is not None:  # the first machine's has the plain name
            flags += ("--market-name", "mempool" + machine_suffix(plan.address, plan.ports.base))
    if plan.address:
        flags += ("--peer-listen", f"tcp://{in_url(plan.address)}:{plan.ports.mempool_peers}")
    probe, peers = Probe("http", port=port), plan.ports.mempool_peers
    return _service(plan, "mempool", "mempool", flags, probe=probe, listens=(port,), shared=peers)


def _worker(plan: Plan, worker: Worker) -> Service:
    port, admin = plan.ports.worker(worker.role, worker.index)
    flags = (
        *("--listen", _shared(plan, worker.name, port), "--admin-listen", f"{LOOPBACK}:{admin}"),
        *("--scheduler-reports", _reports(plan)),
        *("--coordinator-url", _coordinator_url(plan)),
        *("--mempool-socket", f"{plan.sockets}/mempool.sock"),
        *("--model-dir", plan.model_dir, "--model-name", plan.model_name),
        *("--engine", plan.engine, "--device", plan.device),
        *(("--role", "colocated") if worker.role == "colocated" else ()),
    )
    return _service(
        plan,
        "prefill" if worker.role == "prefill" else "decode",
        worker.name,
        flags,
        probe=Probe("http", port=admin),
        listens=(admin,),
        shared=port,
        launcher=plan.launcher,
        env={"CUDA_VISIBLE_DEVICES": worker.gpus} if worker.gpus else None,
    )


def _gateway(plan: Plan) -> Service:
    port = plan.ports.gateway
    flags = (
        *("--listen", f"{in_url(plan.host)}:{port}"),
        *("--scheduler", _ipc(plan, "place")),
        *("--coordinator-url", _coordinator_url(plan)),
        *("--model-dir", plan.model_dir, "--model-name", plan.model_name),
    )
    probe = Probe("http", host=reachable(plan.host), port=port)
    service = _service(plan, "gateway", "gateway-0", flags, probe=probe, listens=())
    workers = tuple(worker.name for worker in plan.workers)
    return replace(service, name="gateway", listens=((plan.host, port),), served_by=workers)


def managed_keys(services: Sequence[Service]) -> dict[str, set[str]]:
    """Settings that the cluster decides, by section: flags, and variables such as QUIRE_GATEWAY_REDIS_URL."""
    out: dict[str, set[str]] = {}
    for service in services:
        section = ROWS[service.row].section if service.row in ROWS else ""
        if section:
            keys = out.setdefault(section, set())
            keys.update(w[2:].replace("-", "_") for w in service.command if w.startswith("--"))
            prefix = f"QUIRE_{section.upper()}_"
            keys.update(n.removeprefix(prefix).lower() for n in service.env if n.startswith(prefix))
    return out
