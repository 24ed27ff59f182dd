"""A cluster whose prefill engine weaves over two ranks loses one of them in the middle of its work."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from deploy.local.services_table import Ports
from tests.integration.mempool_rig import until
from tests.support.local_cluster import LocalCluster
from tests.support.processes import descendants, is_gone

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.whole_machine, pytest.mark.timeout(900)]

NUM_CLIENTS = 6
PROMPT_TOKENS = 700  # woven: on a CPU steps of 256 tokens and more are
DETECTION_S = 30.0  # that it ends; how soon: test_weave_rank_lost.py


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    flags = ["dtype=float32", "prefill_tensor_parallel=2", "prefill_weave=full"]
    words = [word for flag in flags for word in ("--set", flag)]
    with LocalCluster(tmp_path_factory.mktemp("weave") / "home", *words) as found:
        yield found


def prompt(client: int) -> list[int]:
    return [3 + (client * 1009 + 31 * n) % 4000 for n in range(PROMPT_TOKENS)]


def ask(cluster: LocalCluster, client: int) -> httpx.Response:
    body = {
        "model": "quire-demo",
        "prompt": prompt(client),
        "max_tokens": 24,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=180)


def num_unfinished(cluster: LocalCluster) -> int:
    """Requests that the prefill engine has."""
    _, admin = Ports(gateway=cluster.base + 90, base=cluster.base).worker("prefill", 0)
    status = httpx.get(f"http://127.0.0.1:{admin}/status", timeout=30).json()
    return status["num_running"] + status["num_waiting"]


def test_each_client_gets_the_right_answer_or_an_error_in_openais_form_and_the_engine_comes_back(cluster):
    front = cluster.pid_of("prefill-0")
    pids = [front, *descendants(front)]
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        asked = [threads.submit(ask, cluster, client) for client in range(NUM_CLIENTS)]
        until(lambda: num_unfinished(cluster) > 0 or all(one.done() for one in asked), "it computes a prompt")
        os.kill(pids[-1], signal.SIGKILL)
        until(lambda: all(is_gone(pid) for pid in pids), "the whole instance ends", DETECTION_S)
        answers = [one.result() for one in asked]
    cluster.wait_replaced("prefill-0", front)
    again = [ask(cluster, client) for client in range(NUM_CLIENTS)]
    assert [answer.status_code for answer in again] == [200] * NUM_CLIENTS
    for answer, right in zip(answers, again, strict=True):
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == right.json()["choices"][0]["text"]
        else:
            error = answer.json()["error"]
            assert answer.status_code >= 500, answer.text
            assert error["message"], "and says what"
            assert {"type", "code"} <= error.keys(), error
