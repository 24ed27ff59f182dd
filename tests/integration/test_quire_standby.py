"""`quire up --set standby=true`: when the coordinator stops, however it does, the second one answers and registers."""

import os
import signal
import time

import httpx
import pytest

from deploy.local.config import DEMO_MODEL
from tests.support.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ANSWERS_S = 60.0  # the lease's 3 s, and what a busy machine needs


def role(url: str) -> str:
    """Of a coordinator: "standby" where it says that another one leads."""
    try:
        answer = httpx.get(url + "/v1/instances", timeout=2)
    except httpx.HTTPError:
        return "silent"
    if answer.status_code == 503:
        return "standby" if answer.json()["code"] == "market.standby" else "unready"
    return "leader" if answer.is_success else f"{answer.status_code}"


def until(holds, what: str) -> None:
    deadline = time.monotonic() + ANSWERS_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_the_standby_leads_while_the_coordinator_stands_still_and_refers_to_it_when_that_was_its_place(
    tmp_path,
):
    flags = (
        "--engine",
        "mock",
        "--model",
        str(DEMO_MODEL),
        "--set",
        "standby=true",
        "--set",
        "memory_market=true",
    )
    with LocalCluster(tmp_path, *flags) as cluster:
        urls = {
            name: f"http://127.0.0.1:{cluster.base + port}"
            for name, port in (("coordinator", 3), ("standby", 8))
        }
        until(lambda: sorted(map(role, urls.values())) == ["leader", "standby"], "one leads")
        (first,) = [name for name, url in urls.items() if role(url) == "leader"]
        (second,) = set(urls) - {first}
        os.kill(cluster.pid_of(first), signal.SIGSTOP)
        until(lambda: role(urls[second]) == "leader", "the lease has lapsed")

        old = cluster.kill("decode-0")  # its successor registers where nobody has stood still
        cluster.wait_replaced("decode-0", old)
        said = cluster.quire("chat", "hello", "--max-tokens", "4")
        assert said.stdout.strip()
        members = httpx.get(urls[second] + "/v1/instances", timeout=5).json()
        assert {"prefill-0", "decode-0"} <= {one["instance"] for one in members["instances"]}
        # the supervisor replaces what does not answer; the replacement, or whoever woke, stands by
        until(lambda: role(urls[first]) == "standby", "one leads, and it is the other one")
