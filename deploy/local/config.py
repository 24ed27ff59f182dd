"""Where the local cluster's settings come from, where its files live, and what its processes inherit."""

import difflib
import hashlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from deploy.local.cluster_settings import MAX_WAIT_S, ClusterSettings, check
from shared import settings
from shared.errors import SettingsError

REPO = Path(__file__).resolve().parents[2]
DEMO_MODEL = REPO / "deploy" / "models" / "quire-demo"
MAX_SOCKET_DIR_BYTES = 80  # a unix socket's path ends at 107 bytes
CA_FILES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
# Sections whose variables and TOML keys are checked at `quire up`, and who reads them.
SECTION_CONFIGS = {
    "gateway": "services.gateway.config",
    "scheduler": "services.scheduler.config",
    "coordinator": "services.coordinator.config",
    "mempool": "services.mempool.config",
    "keeper": "services.mempool.keeper.config",
    "worker": "shared.engine.worker_config",
}
# What to set instead of a service's own key that the cluster decides.
CLUSTER_KEYS = {
    "listen": "cluster.port, cluster.host or cluster.base_port",
    "admin_listen": "cluster.base_port",
    "report_listen": "cluster.base_port",
    "scheduler_reports": "cluster.base_port",
    "scheduler": "cluster.base_port",
    "coordinator_url": "cluster.base_port",
    "mempool_socket": "cluster.home",
    "keeper_socket": "cluster.home",
    "socket": "cluster.home",
    "trace_dir": "cluster.home or cluster.trace_endpoint",
    "model_dir": "cluster.model",
    "role": "cluster.topology",
    "instance": "cluster.num_prefill and cluster.num_decode",
    "peer_listen": "cluster.address",
    "processes": "cluster.gateway_processes",
    "capacity_bytes": "cluster.mempool_bytes",
    "dram_for_host": "cluster.dram_bytes",
    "pd_caching": "cluster.pd_caching",
    "transfer_mode": "cluster.transfer_mode",
    "state_dir": "cluster.home",
    "tensor_parallel_size": "cluster.tensor_parallel, prefill_tensor_parallel or decode_tensor_parallel",
    "weave": "--weave, cluster.prefill_weave or cluster.decode_weave",
}


class Paths(msgspec.Struct, frozen=True, kw_only=True):
    """Files of one cluster."""

    home: Path
    run: Path
    logs: Path
    traces: Path
    sockets: Path

    @property
    def control(self) -> Path:
        """Unix socket of the supervisor."""
        return self.sockets / "control.sock"

    @property
    def lock(self) -> Path:
        """Held (flock) by the supervisor for as long as it lives."""
        return self.run / "lock"

    @property
    def state(self) -> Path:
        """The last state, for a reader without the supervisor."""
        return self.run / "state.json"

    @property
    def settings(self) -> Path:
        """Effective settings that `quire up` hands to the supervisor; may hold keys, so 0600."""
        return self.run / "settings.json"


def use_system_certificates() -> None:
    """Downloads trust whom the operating system trusts, a company's own authority too; httpx has a list of its own."""
    bundle = next((path for path in CA_FILES if Path(path).is_file()), "")
    if bundle and not environment().get("SSL_CERT_FILE"):
        os.environ["SSL_CERT_FILE"] = bundle  # noqa: TID251  httpx has no other way that libraries leave open


def environment() -> Mapping[str, str]:
    """The process's environment; every other module of deploy/local asks this one."""
    return os.environ  # noqa: TID251  this is the config.py


def load(
    argv: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    toml_path: Path | None = None,
) -> ClusterSettings:
    """Effective cluster settings; every QUIRE_* variable and TOML key of every section is checked on the way.

    Raises: SettingsError naming an unknown key and the nearest right one, or a value that no service could start with.
    """
    env: Mapping[str, str] = environment() if environ is None else environ
    check_variable_names(env)
    found = settings.load(ClusterSettings, "cluster", argv, environ=env, toml_path=toml_path)
    sections = _check_sections(env, toml_path)
    found = check(_filled(found, env))
    if not found.join:  # else another machine has the gateway, and perhaps alone the file
        _check_keys_file(str(sections["gateway"]["api_keys_file"]))
    return found


def _check_keys_file(path: str) -> None:
    from services.gateway.auth import load_keys

    load_keys([], _absolute(path))


def _absolute(path: str) -> str:
    """As seen from this command's folder; "" stays that. Raises: SettingsError."""
    return path and str(expanded(path).absolute())


def _filled(found: ClusterSettings, env: Mapping[str, str]) -> ClusterSettings:
    home = str(expanded(found.home or env.get("QUIRE_HOME") or REPO / ".quire").absolute())
    settings.check_text(f"QUIRE_HOME (or cluster.home) {home!a}", home)
    return msgspec.structs.replace(
        found,
        home=home,
        redis_url=found.redis_url or env.get("QUIRE_REDIS_URL", ""),
        lending_profiles=[str(expanded(name).absolute()) for name in found.lending_profiles],
    )


def expanded(path: str | Path) -> Path:
    """With the home folder for `~` or `~user`. Raises: SettingsError where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise SettingsError(
            f"{str(path)!r} names the home folder of a user that this machine lacks"
        ) from error


def check_variable_names(env: Mapping[str, str]) -> None:
    """Raises: SettingsError on a QUIRE_* variable that nothing reads, with the nearest one that is read."""
    prefixes = tuple(f"QUIRE_{section.upper()}_" for section in settings.SECTIONS)
    for name in env:
        if name.startswith("QUIRE_") and name not in settings.GLOBAL_VARIABLES:
            if name.startswith(prefixes):
                continue  # settings.load() of its section checks the rest
            known = [*settings.GLOBAL_VARIABLES, *_section_variables()]
            close = [f"QUIRE_CLUSTER_{name.removeprefix('QUIRE_')}"]
            if close[0] not in known:
                close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            near = f"; did you mean {close[0]}?" if close else f"; known prefixes: {', '.join(prefixes)}"
            raise SettingsError(f"unknown variable {name}{near}")


def _section_variables() -> Iterator[str]:
    for section, keys in [("cluster", cluster_keys()), *((s, section_keys(s)) for s in SECTION_CONFIGS)]:
        yield from (f"QUIRE_{section.upper()}_{key.upper()}" for key in keys)


def section_keys(section: str) -> list[str]:
    """Names of all settings of one service; [] for a section without one."""
    struct = section_struct(SECTION_CONFIGS[section])
    return [field.name for field in msgspec.structs.fields(struct)] if struct is not None else []


def cluster_key(name: str) -> str:
    """`port` or `cluster.port` -> `port`. Raises: SettingsError for an unknown one, and for a
    service's own, with the variable that sets it.
    """
    section, dot, key = name.partition(".")
    if dot and section in SECTION_CONFIGS:
        variable = f"QUIRE_{section}_{key}".replace("-", "_").upper()
        raise SettingsError(f"--set {name}: that is a setting of one service; set {variable}")
    found = key if section == "cluster" else name
    if found.replace("-", "_") not in cluster_keys():
        raise SettingsError(
            f"--set {name}: no such setting of the cluster{settings.nearest(found, cluster_keys())}"
        )
    return found


def typed_command() -> str:
    """How this program was started, as far as the installed launcher says it."""
    return environment().get("_QUIRE_TYPED", sys.argv[0])


def cluster_keys() -> list[str]:
    """Names of all cluster settings."""
    return [field.name for field in msgspec.structs.fields(ClusterSettings)]


def _check_sections(env: Mapping[str, str], toml_path: Path | None) -> dict[str, dict[str, object]]:
    """Let each service's own module refuse unknown keys and wrong values now, rather than in a crash loop later.

    Returns: what was said, by section; keys that the cluster decides have their defaults still.
    """
    out: dict[str, dict[str, object]] = {}
    for section, module_name in SECTION_CONFIGS.items():
        struct = section_struct(module_name)
        if struct is not None:
            found = settings.load(struct, section, (), environ=env, toml_path=toml_path)
            importlib.import_module(module_name).check_values(found)
            out[section] = msgspec.structs.asdict(found)
    return out


def check_overrides(
    managed: Mapping[str, set[str]],
    *,
    environ: Mapping[str, str] | None = None,
    toml_path: Path | None = None,
) -> None:
    """Refuse a user's setting of one service that the cluster's own would silently overrule.

    Args: managed: section -> keys that `quire up` passes to its services.
    Raises: SettingsError naming the cluster's setting for it.
    """
    env: Mapping[str, str] = environment() if environ is None else environ
    if toml_path is None and env.get("QUIRE_CONFIG"):
        toml_path = Path(env["QUIRE_CONFIG"])
    toml = settings.read_toml(toml_path) if toml_path else {}
    for section, keys in managed.items():
        for key in sorted(keys):
            variable = f"QUIRE_{section.upper()}_{key.upper()}"
            if variable in env or key in toml.get(section, {}):
                instead = CLUSTER_KEYS.get(key, f"cluster.{key}")
                raise SettingsError(f"{section}.{key} ({variable}) is decided by `quire up`; set {instead}")


def kv_layout(environ: Mapping[str, str] | None = None) -> str:
    """worker.kv_layout. Raises: SettingsError."""
    return str(settings_of("worker", environ)["kv_layout"])


def drains_ms(environ: Mapping[str, str] | None = None) -> dict[str, int]:
    """How long what is under way at a service that is told to end may take, by section. Raises: SettingsError."""
    said = {name: int(str(settings_of(name, environ)["drain_deadline_ms"])) for name in ("gateway", "worker")}
    return {name: min(ms, 1000 * MAX_WAIT_S) for name, ms in said.items()}


def gateway_wants_keys(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the gateway's own settings have keys; cluster.api_keys are others. Raises: SettingsError."""
    own = settings_of("gateway", environ)
    return bool(own["api_keys"] or own["api_keys_file"])


def settings_of(section: str, environ: Mapping[str, str] | None = None) -> dict[str, object]:
    """One service's own, as every such service of this command will find them. Raises: SettingsError."""
    env: Mapping[str, str] = environment() if environ is None else environ
    struct = section_struct(SECTION_CONFIGS[section])
    assert struct is not None
    return msgspec.structs.asdict(settings.load(struct, section, (), environ=env))


def section_struct(module_name: str) -> type[msgspec.Struct] | None:
    """The settings struct that a service's config module defines."""
    module = importlib.import_module(module_name)
    for name, value in vars(module).items():
        if name.endswith("Settings") and isinstance(value, type) and issubclass(value, msgspec.Struct):
            return value
    return None


def paths_of(home: str | Path) -> Paths:
    """Where a cluster with this home keeps its files. Creates nothing."""
    root = Path(home).absolute()
    run = root / "run"
    sockets = run
    if len(os.fsencode(run)) > MAX_SOCKET_DIR_BYTES:
        digest = hashlib.sha256(os.fsencode(run)).hexdigest()[:12]
        sockets = Path("/tmp") / f"quire-{os.getuid()}-{digest}"
    return Paths(home=root, run=run, logs=run / "logs", traces=root / "traces", sockets=sockets)


def default_home(environ: Mapping[str, str] | None = None) -> Path:
    """Home of the cluster that commands talk to: cluster.home, QUIRE_HOME or .quire in the repository.

    Raises: SettingsError on a wrong cluster setting; other sections are not looked at.
    """
    env: Mapping[str, str] = environment() if environ is None else environ
    return Path(_filled(settings.load(ClusterSettings, "cluster", (), environ=env), env).home)


def make_folders(paths: Paths) -> None:
    """Create them, private to this user. Raises: SettingsError when one cannot be made or is another's."""
    for folder in (paths.home, paths.run, paths.logs, paths.traces, paths.sockets):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise SettingsError(
                f"cannot make {folder}: {error.strerror}; set QUIRE_HOME elsewhere"
            ) from error
    if paths.sockets.stat().st_uid != os.getuid() or paths.sockets.is_symlink():
        raise SettingsError(f"{paths.sockets} belongs to another user; set QUIRE_HOME to a shorter path")


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for a service, less the cluster's own keys, plus `extra`."""
    env = {k: v for k, v in environment().items() if not k.startswith("QUIRE_CLUSTER_")}
    env.setdefault("PYTHONUNBUFFERED", "1")
    env.update(extra)
    return env


def visible_gpus() -> str | None:
    """CUDA_VISIBLE_DEVICES as the user set it."""
    return environment().get("CUDA_VISIBLE_DEVICES")


def use_config_file(path: Path) -> None:
    """Make a TOML file the settings file of this command and of every process it starts."""
    os.environ["QUIRE_CONFIG"] = str(expanded(path).absolute())  # noqa: TID251  this is the config.py


def use_keys_file() -> None:
    """Make the path of gateway.api_keys_file absolute for every process that is started: they run in another folder."""
    if path := _absolute(str(settings_of("gateway")["api_keys_file"])):
        os.environ["QUIRE_GATEWAY_API_KEYS_FILE"] = path  # noqa: TID251  this is the config.py


def gateway_url(url: str = "") -> str:
    """Where clients find the gateway: an explicit URL, QUIRE_URL, else "". Either may end in /v1, as `up` prints it."""
    return (url or environment().get("QUIRE_URL", "")).rstrip("/").removesuffix("/v1").rstrip("/")


def api_key() -> str:
    """The key that `quire chat` and `quire place --apply` send. Raises: SettingsError where no header could hold it."""
    key = environment().get("QUIRE_API_KEY", "")
    if not (key.isascii() and key.isprintable()):
        raise SettingsError("QUIRE_API_KEY has characters that a header cannot hold; want printable ASCII")
    return key
