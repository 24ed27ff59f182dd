"""One compose project of the real files, with the engine's packages mounted from this environment."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.free_ports import free_port
from tests.support import patience

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose"
FILES = ("-f", str(COMPOSE / "compose.yaml"), "-f", str(COMPOSE / "ci" / "mounted-engine.yaml"))
PREPARE_DEADLINE_S = 1200
BUILD_DEADLINE_S = 600
START_DEADLINE_S = 300
WORKERS = ("prefill", "decode")


def require_docker() -> None:
    """Skip with the reason why not; fail instead where QUIRE_REQUIRE_DOCKER=1 promises Docker. Images that are being
    made meanwhile (.ci/run) are waited for.
    """
    if prepared := os.environ.get("QUIRE_DOCKER_PREPARED"):
        wait_until(Path(prepared).is_file, PREPARE_DEADLINE_S, "the images for the Docker tests are made")
        code, _, log = Path(prepared).read_text().partition("\n")
        assert code == "0", f"preparing the Docker tests failed:\n{log}"
    reason = _why_not()
    if reason and os.environ.get("QUIRE_REQUIRE_DOCKER") == "1":
        pytest.fail(f"QUIRE_REQUIRE_DOCKER=1, but {reason}")
    if reason:
        pytest.skip(reason)


def _why_not() -> str:
    if shutil.which("docker") is None:
        return "there is no docker command"
    for words, what in ((["info"], "Docker engine"), (["compose", "version"], "docker compose plugin")):
        if subprocess.run(["docker", *words], capture_output=True, timeout=60).returncode:
            return f"no {what} answers"
    if sys.version_info[:2] != (3, 11):
        return f"the image has Python 3.11 and cannot use the packages of {sys.version.split()[0]}"
    return ""


@dataclass
class ComposeProject:
    """A project of its own name and ports; nothing of it outlives down()."""

    name: str
    gateway_port: int = field(default_factory=free_port)
    jaeger_port: int = field(default_factory=free_port)

    def compose(self, *words: str, deadline_s: float = 300) -> str:
        """Standard output of one compose command. Raises: AssertionError with the command's errors."""
        files = (*FILES, "-f", str(self._patient()))
        command = ["docker", "compose", "--project-name", self.name, *files, *words]
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("QUIRE_")},
            "QUIRE_PORT": str(self.gateway_port),
            "QUIRE_JAEGER_PORT": str(self.jaeger_port),
            "QUIRE_DISAGGREGATION": "always",  # every answer passes both workers, also of an idle cluster
            "QUIRE_SITE_PACKAGES": sysconfig.get_path("purelib"),
        }
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, env=environment)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr[-4000:]}"
        return done.stdout

    def _patient(self) -> Path:
        """A file for services that the machine may keep from its cores for seconds; made anew each time."""
        names = {"worker": ("prefill", "decode")}
        services = {
            name: {"environment": patience.environment([section])}
            for section in patience.LIMITS_MS
            for name in names.get(section, (section,))
        }
        path = Path(tempfile.gettempdir()) / f"{self.name}-patience.json"
        path.write_text(json.dumps({"services": services}))
        return path

    def up(self, *words: str) -> None:
        """Start what is missing and wait until all of it is healthy; on failure show the logs."""
        wait = ("--wait", "--wait-timeout", str(START_DEADLINE_S))
        try:
            self.compose("up", "-d", *wait, *words, deadline_s=START_DEADLINE_S + 60)
        except AssertionError:
            print(self.compose("ps", "-a"))
            print(self.compose("logs", "--no-color", "--tail", "60"))
            raise

    def down(self) -> None:
        """Remove containers, networks and volumes."""
        self.compose("down", "-v", "--remove-orphans", deadline_s=300)
        self._patient().unlink()

    def containers(self, service: str) -> list[str]:
        """Ids of the service's containers."""
        return self.compose("ps", "-q", service).split()

    def url(self, path: str) -> str:
        """An address of the gateway."""
        return f"http://127.0.0.1:{self.gateway_port}{path}"

    def instances(self) -> list[dict[str, object]]:
        """The coordinator's list of instances, asked from inside: it is not published."""
        answer = self._ask("coordinator", 8103, "/v1/instances")
        return answer["instances"] if isinstance(answer, dict) else answer

    def ready(self, service: str, port: int) -> dict[str, object]:
        """What a service says in /ready, asked from inside."""
        return self._ask(service, port, "/ready")

    def _ask(self, service: str, port: int, path: str) -> dict[str, Any]:
        program = (
            f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:{port}{path}').read().decode())"
        )
        return json.loads(self.compose("exec", "-T", service, "python3", "-S", "-E", "-c", program))

    def spans(self, request_id: str) -> list[dict[str, object]]:
        """Spans of the request's trace, with the name of their service, from Jaeger's query API."""
        query = {
            "service": "quire-gateway",
            "tags": json.dumps({"quire.request_id": request_id}),
            "limit": "5",
        }
        try:
            answer = httpx.get(f"http://127.0.0.1:{self.jaeger_port}/api/traces", params=query, timeout=10)
        except httpx.TransportError:  # who waits for them asks again
            return []
        found = []
        for trace in answer.raise_for_status().json()["data"] or []:
            services = {key: process["serviceName"] for key, process in trace["processes"].items()}
            found += [{**span, "service": services[span["processID"]]} for span in trace["spans"]]
        return found


def inspect(container: str, template: str) -> str:
    """One value of `docker inspect`."""
    done = subprocess.run(
        ["docker", "inspect", "-f", template, container],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def wait_until(holds: object, deadline_s: float, what: str) -> float:
    """Seconds until holds() is true. Raises: AssertionError at the deadline."""
    assert callable(holds)
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < deadline_s, f"not within {deadline_s} s: {what}"
        time.sleep(0.25)
    return time.monotonic() - started
