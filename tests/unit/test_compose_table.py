"""compose.yaml says the same as deploy/local/services_table.py, and hardens every container."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.local.services_table import ROWS, Plan, Ports, Service, Worker, build
from services.coordinator.config import CoordinatorSettings
from services.gateway.config import GatewaySettings
from services.mempool.config import MempoolSettings
from services.mempool.keeper.config import KeeperSettings
from services.scheduler.config import SchedulerSettings
from shared.engine.vllm_setup import VLLM_VERSION
from shared.engine.worker_config import WorkerSettings

COMPOSE = Path(__file__).parents[2] / "deploy" / "compose"
PORTS = Ports(gateway=8000, base=8100)
# What containers need beyond the table: their own settings, secrets and the address that they are reached by.
COMPOSE_ONLY = {
    "trace_endpoint", "redis_url", "api_keys", "coordinator_key", "advertise", "capacity_bytes",
    "kv_cache_bytes", "threads", "disaggregation", "lending", "dram_bytes", "journal_fsync",
}  # fmt: skip
IMAGES = {"runtime": "quire/runtime", "engine": "quire/engine", "redis": "redis:"}


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((COMPOSE / name).read_text("utf-8"))


FILE = load("compose.yaml")
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
STRUCTS = {
    "coordinator": CoordinatorSettings, "scheduler": SchedulerSettings, "mempool": MempoolSettings,
    "keeper": KeeperSettings,
    "prefill": WorkerSettings, "decode": WorkerSettings, "gateway": GatewaySettings,
}  # fmt: skip
OURS = [name for name, row in ROWS.items() if row.module]


def table() -> dict[str, Service]:
    plan = Plan(
        host="127.0.0.1", ports=PORTS, python="python", workers=(Worker("prefill", 0), Worker("decode", 0)),
        launcher="exec", device="cpu", engine="vllm", model_dir="/model", model_name="quire-demo",
        redis_command=("redis-server",), sockets="/run/quire", threads=1, common_flags=(),
        row_flags={}, secrets={}, memory_market=True,
    )  # fmt: skip
    return {service.row: service for service in build(plan)}


def words(service: str) -> list[str]:
    """The command as words; a shell's script is split as the shell would."""
    command = SERVICES[service]["command"]
    return shlex.split(command[2]) if command[:2] == ["sh", "-c"] else command


def flags(found: list[str] | tuple[str, ...]) -> dict[str, str]:
    return {
        word[2:].replace("-", "_"): found[place + 1]
        for place, word in enumerate(found)
        if word.startswith("--")
    }


def settings_of(service: str) -> set[str]:
    prefix = f"QUIRE_{ROWS[service].section.upper()}_"
    variables = SERVICES[service].get("environment", {})
    return flags(words(service)).keys() | {
        name.removeprefix(prefix).lower() for name in variables if name.startswith(prefix)
    }


def by_default(value: str) -> str:
    """Of ${NAME:-value}."""
    return value.partition(":-")[2].removesuffix("}") if value.startswith("${") else value


# One machine's processes meet at sockets in a folder; in containers the same listeners have these ports.
PORT_OF_SOCKET = {
    "place.ipc": PORTS.scheduler,
    "reports.ipc": PORTS.reports,
    "prefill-0.ipc": PORTS.worker("prefill", 0)[0],
    "decode-0.ipc": PORTS.worker("decode", 0)[0],
}


def port_of(address: str) -> int:
    if address.startswith("ipc://"):
        return PORT_OF_SOCKET[address.rpartition("/")[2]]
    return int(address.rpartition(":")[2].split("/")[0])


def test_every_row_of_the_table_is_a_service_and_only_jaeger_is_added():
    assert set(SERVICES) == {*ROWS, "jaeger"}


@pytest.mark.parametrize("name", OURS)
def test_a_service_runs_the_module_of_its_row(name):
    assert f"-m {ROWS[name].module}" in " ".join(words(name))


@pytest.mark.parametrize("name", OURS)
def test_a_service_gets_the_settings_that_the_table_decides(name):
    wanted = flags(table()[name].command).keys()
    assert settings_of(name) - COMPOSE_ONLY == wanted


@pytest.mark.parametrize("name", OURS)
def test_every_setting_that_a_service_gets_exists(name):
    assert settings_of(name) <= set(STRUCTS[name].__struct_fields__)


@pytest.mark.parametrize("name", OURS)
def test_listeners_have_the_ports_of_the_table(name):
    ours, theirs = flags(words(name)), flags(table()[name].command)
    for key in ("listen", "report_listen", "admin_listen"):
        if key in theirs:
            assert port_of(ours[key]) == port_of(theirs[key])


@pytest.mark.parametrize("name", OURS)
def test_links_lead_to_the_ports_of_the_table(name):
    ours, theirs = flags(words(name)), flags(table()[name].command)
    for key in ("scheduler", "scheduler_reports", "coordinator_url"):
        if key in theirs:
            assert port_of(ours[key]) == port_of(theirs[key])
            assert ours[key].split("//")[1].split(":")[0] in SERVICES


@pytest.mark.parametrize("name", OURS)
def test_the_health_check_asks_the_path_and_port_of_the_table(name):
    probe = table()[name].probe
    url = f"http://127.0.0.1:{probe.port}{ROWS[name].health_path}"
    assert SERVICES[name]["healthcheck"]["test"][-1] == (
        f"unix:{probe.path}" if probe.kind == "keeper" else url
    )


@pytest.mark.parametrize("name", ROWS)
def test_a_service_waits_for_those_that_its_row_names_to_be_healthy(name):
    waits = SERVICES[name].get("depends_on", {})
    healthy = {other for other, how in waits.items() if how["condition"] == "service_healthy"}
    assert healthy >= set(ROWS[name].depends_on)


@pytest.mark.parametrize("name", ROWS)
def test_limits_and_image_are_those_of_the_row(name):
    limits = {
        key: by_default(value) for key, value in SERVICES[name]["deploy"]["resources"]["limits"].items()
    }
    factors = {"m": 1 << 20, "g": 1 << 30}
    memory = int(limits["memory"][:-1]) * factors[limits["memory"][-1]]
    assert memory == ROWS[name].memory_bytes
    assert float(limits["cpus"]) >= ROWS[name].cpus
    assert IMAGES[ROWS[name].image] in SERVICES[name]["image"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_has_no_privileges_and_a_bounded_share(name):
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["user"].split(":")[0] not in ("", "0", "root")
    assert service["restart"] == "unless-stopped"
    assert {"memory", "cpus"} <= service["deploy"]["resources"]["limits"].keys()
    assert not service.get("privileged")
    assert "container_name" not in service


def test_all_our_containers_run_as_the_one_user_whom_the_mempool_serves():
    assert len({SERVICES[name]["user"] for name in OURS}) == 1


def test_only_the_gateway_and_jaeger_are_published_and_only_on_loopback():
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published.keys() == {"gateway", "jaeger"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_workers_have_no_way_out_of_the_cluster_network():
    assert FILE["networks"]["cluster"] == {"internal": True}
    reaching_out = {name for name, service in SERVICES.items() if service["networks"] != ["cluster"]}
    assert reaching_out == {"gateway", "jaeger"}


def test_redis_serves_the_network_whatever_its_image_says_of_protected_mode():
    """Debian's refuses all but loopback; the others would start, be healthy, and have neither journal nor tree."""
    command = SERVICES["redis"]["command"]
    assert command[command.index("--protected-mode") + 1] == "no"
    assert (SERVICES["redis"]["networks"], "ports" in SERVICES["redis"]) == (["cluster"], False)


def test_a_model_folder_that_is_not_there_is_refused_and_not_made():
    """An empty folder of root's was made of a wrong name, and the workers failed over it again and again."""
    for name in ("prefill", "decode", "gateway"):
        (model,) = (volume for volume in SERVICES[name]["volumes"] if "/model" in str(volume))
        assert (model["type"], model["read_only"], model["bind"]) == (
            "bind",
            True,
            {"create_host_path": False},
        )


def test_large_models_on_cpu_get_the_memory_and_the_time_that_they_need():
    for name in ("prefill", "decode"):
        limits, health = SERVICES[name]["deploy"]["resources"]["limits"], SERVICES[name]["healthcheck"]
        assert limits["memory"] == "${QUIRE_WORKER_MEMORY:-3g}"
        assert health["retries"] == "${QUIRE_WORKER_HEALTH_RETRIES:-80}"


def test_the_coordinators_page_is_published_by_an_overlay_of_its_own_and_only_on_loopback():
    overlay = load("page.yaml")["services"]
    assert overlay.keys() == {"coordinator"}
    (port,) = overlay["coordinator"]["ports"]
    assert port == f"127.0.0.1:${{QUIRE_COORDINATOR_PORT:-{PORTS.coordinator}}}:{PORTS.coordinator}"
    assert set(overlay["coordinator"]["networks"]) == {"cluster", "edge"}, (
        "an internal network publishes nothing"
    )


def test_for_tests_only_the_workers_change():
    assert load("ci/mounted-engine.yaml")["services"].keys() == {"prefill", "decode"}


def test_with_gpus_the_workers_and_the_mempool_that_makes_their_pages_have_them_and_nobody_else():
    overlay = load("gpu.yaml")["services"]
    assert overlay.keys() == {"prefill", "decode", "mempool"}
    for service in overlay.values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        assert "quire/engine-cuda" in service["image"]
        assert service["build"]["args"]["REQUIREMENTS"] == "engine-cuda.txt"
    assert overlay["mempool"]["deploy"]["resources"]["reservations"]["devices"][0]["count"] == "all"
    assert overlay["mempool"]["build"]["dockerfile"].endswith("Dockerfile.engine"), (
        "the small image has no CUDA"
    )


def test_the_cuda_image_is_the_hosted_vllm_with_what_the_mempool_needs_for_gpu_pages():
    requirements = COMPOSE.parents[1] / "requirements"
    files = [(requirements / name).read_text("utf-8") for name in ("engine-cuda.txt", "engine.txt")]
    assert files[0].startswith("-r engine.txt\n")
    lock = "".join(files).splitlines()
    pinned = dict(
        line.split(" ")[0].split("==") for line in lock if "==" in line and not line.startswith("#")
    )
    assert pinned["vllm"] == VLLM_VERSION
    runtime = (requirements / "runtime.txt").read_text("utf-8").splitlines()
    small = {line.split("==")[0] for line in runtime if "==" in line and not line.startswith("#")}
    assert small <= pinned.keys(), "the mempool and its keeper run from this image too"
    assert "cuda-bindings" in pinned


@pytest.mark.parametrize("name", ["Dockerfile.runtime", "Dockerfile.engine"])
def test_a_dockerfile_pulls_no_frontend_and_drops_root(name):
    lines = (COMPOSE / name).read_text("utf-8").splitlines()
    assert not any(line.startswith("# syntax=") for line in lines)
    assert "USER 10001:10001" in lines
    assert any("chmod -R a+rX /app" in line for line in lines[: lines.index("USER 10001:10001")]), (
        "a checkout under umask 077 is nobody else's to read"
    )
    assert all("--require-hashes" in line for line in lines if "pip install" in line)
