"""The compose files start a cluster that serves, is traced, restarts a killed worker and leaves nothing."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from tests.integration.compose_project import (
    BUILD_DEADLINE_S,
    COMPOSE,
    START_DEADLINE_S,
    ComposeProject,
    inspect,
    require_docker,
    wait_until,
)

pytestmark = [pytest.mark.docker, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

TRACE_DEADLINE_S = 120
RIGHT_COUNT = ", ".join(map(str, range(1, 21))) + "."
SERVICES_OF_A_TRACE = {"quire-gateway", "quire-scheduler", "quire-prefill", "quire-decode"}


@pytest.fixture(scope="module")
def project() -> Iterator[ComposeProject]:
    require_docker()
    project = ComposeProject(f"quire-test-{os.getpid()}")
    try:
        project.compose("build", "-q", deadline_s=BUILD_DEADLINE_S)
        project.up()
        yield project
    finally:
        project.down()


def stream_chat(project: ComposeProject, question: str) -> tuple[str, str]:
    """(request id, text) of one streamed answer that ended in [DONE]."""
    body = {
        "model": "quire-demo",
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "temperature": 0,
        "max_tokens": 60,
    }
    text, request_id, last = "", "", ""
    with httpx.stream("POST", project.url("/v1/chat/completions"), json=body, timeout=180) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            last = line.removeprefix("data: ")
            if last != "[DONE]":
                chunk = json.loads(last)
                assert "error" not in chunk, chunk
                request_id = chunk["id"]
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    assert last == "[DONE]"
    return request_id, text


def test_with_the_overlay_for_gpus_compose_gives_a_worker_one_and_the_mempool_all_and_loosens_nothing():
    """Merged by compose itself; the CUDA image is not built here: it has nine gigabytes."""
    require_docker()
    files = ("-f", str(COMPOSE / "compose.yaml"), "-f", str(COMPOSE / "gpu.yaml"))
    merged = subprocess.run(
        ["docker", "compose", *files, "config", "--format", "json"],
        capture_output=True, text=True, timeout=60, env={**os.environ, "QUIRE_DECODE_GPU": "3"},
    )  # fmt: skip
    assert merged.returncode == 0, merged.stderr
    services = json.loads(merged.stdout)["services"]
    wanted = {"prefill": {"device_ids": ["0"]}, "decode": {"device_ids": ["3"]}, "mempool": {"count": -1}}
    for name, gpus in wanted.items():
        service = services[name]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "capabilities": ["gpu"], **gpus}
        assert service["build"]["dockerfile"].endswith("Dockerfile.engine")
        assert service["build"]["args"]["REQUIREMENTS"] == "engine-cuda.txt"
        assert (service["image"], service["user"]) == ("quire/engine-cuda", "10001:10001")
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory"}
    with_gpus = {name for name, s in services.items() if "reservations" in s["deploy"]["resources"]}
    assert with_gpus == wanted.keys()


def test_the_services_reach_redis(project):
    """Healthy they are without it, too: a coordinator that cannot journal does not lead."""
    assert project.ready("coordinator", 8103)["role"] == "leader"
    for worker, port in (("prefill", 8121), ("decode", 8141)):
        assert project.ready(worker, port)["prompt_tree"] == "in_sync"


def test_a_streamed_chat_is_answered(project):
    _, text = stream_chat(project, "Who are you?")
    assert text.startswith("I am Quire's demo model")


def test_the_trace_of_a_request_has_spans_of_every_service_it_passed(project):
    request_id, _ = stream_chat(project, "What does os.path.join do?")

    def services() -> set[object]:
        return {span["service"] for span in project.spans(request_id)}

    wait_until(lambda: services() >= SERVICES_OF_A_TRACE, TRACE_DEADLINE_S, f"spans of {SERVICES_OF_A_TRACE}")

    def names() -> set[object]:
        return {span["operationName"] for span in project.spans(request_id)}

    # the root span ends last, and may travel with the gateway's next batch
    wait_until(lambda: "gateway.receive" in names(), TRACE_DEADLINE_S, "the root span")
    assert len({span["traceID"] for span in project.spans(request_id)}) == 1


def test_a_killed_worker_comes_back_and_serves(project):
    (container,) = project.containers("decode")
    before = int(inspect(container, "{{.RestartCount}}"))
    os.kill(int(inspect(container, "{{.State.Pid}}")), signal.SIGKILL)
    wait_until(lambda: int(inspect(container, "{{.RestartCount}}")) > before, 120, "the container restarts")

    def healthy() -> bool:
        return inspect(container, "{{.State.Health.Status}}") == "healthy"

    seconds = wait_until(healthy, START_DEADLINE_S, "the worker is healthy")
    print(f"decode worker healthy again {seconds:.1f} s after its restart")
    _, text = stream_chat(project, "hello")
    assert text.startswith("Hello")


def test_two_decode_workers_need_no_name_or_port_of_their_own_and_one_goes_on_alone(project):
    """`up --scale decode=2`: both are members, both serve, and the death of one takes nothing from the other.

    Which of them the scheduler takes is its own affair: the one that dies has served, and then the other serves all.
    """
    project.up("--no-recreate", "--scale", "decode=2")
    containers = project.containers("decode")
    assert len(containers) == 2
    names = {f"decode-{container[:12]}": container for container in containers}

    def live() -> set[object]:
        return {i["instance"] for i in project.instances() if i["role"] == "decode" and i["state"] == "live"}

    wait_until(lambda: live() == set(names), START_DEADLINE_S, "both are members")
    answers = asyncio.run(counts(project, 8))
    assert {text for _, text in answers} == {RIGHT_COUNT}
    assert {decoder for decoder, _ in answers} <= set(names)

    killed = answers[0][0]
    subprocess.run(["docker", "kill", names[killed]], check=True, capture_output=True, timeout=60)
    answers = asyncio.run(counts(project, 8))  # at once: before anybody else has noticed
    assert {text for _, text in answers} == {RIGHT_COUNT}
    assert {decoder for decoder, _ in answers} == set(names) - {killed}
    wait_until(lambda: live() == set(names) - {killed}, 120, "the dead worker is a member no more")


async def counts(project: ComposeProject, number: int) -> list[tuple[str, str]]:
    """(decode instance, text) of as many requests at once, each a prompt of its own."""
    async with httpx.AsyncClient(base_url=project.url(""), timeout=180, trust_env=False) as client:

        async def one(seed: int) -> tuple[str, str]:
            body = {
                "model": "quire-demo",
                "messages": [{"role": "user", "content": "Count to 20."}],
                "temperature": 0,
                "max_tokens": 80,
                "user": f"scale-{seed}",
                "quire_receipt": True,
            }
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            found = answer.json()
            return found["quire_receipt"]["stages"][-1]["instance"], found["choices"][0]["message"]["content"]

        return await asyncio.gather(*(one(seed) for seed in range(number)))


def test_nothing_is_left_after_down(project):
    """Runs last: it takes the project away."""
    project.down()
    of_project = ["--filter", f"label=com.docker.compose.project={project.name}", "-q"]
    for words in (["ps", "-a"], ["volume", "ls"], ["network", "ls"]):
        left = subprocess.run(["docker", *words, *of_project], capture_output=True, text=True, timeout=60)
        assert left.stdout == ""
