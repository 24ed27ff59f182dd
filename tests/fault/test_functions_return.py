"""A process that stood still takes no function with it: when it goes on, everything that Quire does is done again.

The other fault tests see that nothing is wrong or lost; a cluster that answers rightly while its gateway looks up no
prefix any more, or whose engines take nothing back from decode, passes them. Here two prefill workers and a decode
worker, each with pages of its own, under other requests that fill them; one process at a time gets SIGSTOP for longer
than anybody waits for it (default limits), then two turns of a conversation and a prompt with the same head must show
in their receipts, in the mempool's counters and in their trace that they were looked up, handed off, predicted, pushed
back and not computed again.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.local_cluster import LocalCluster
from tests.support.spans import spans_of_request

STOPPED_S = 3.0  # all silences are noticed within 2 s
RETURNS_S = 60.0  # of functions, in turns of LOOK_EVERY_S
LOOK_EVERY_S = 0.5
BLOCK_TOKENS = 32
HEAD_TOKENS, ANSWER_TOKENS, MORE_TOKENS = 200, 40, 40
WAIT_S = 120.0
SPANS = {
    "gateway.receive",
    "tree.lookup",
    "schedule",
    "prefill.compute",
    "handoff.transfer",
    "decode",
    "kv.return",
}
PROCESSES = ["gateway", "scheduler", "redis", "coordinator", "mempool", "keeper", "prefill-0", "decode-0"]
FLAGS = (
    "--prefill",
    "2",
    "--set",
    "kv_space=own",
    "--set",
    "pd_caching=3",
    "--set",
    f"mempool_bytes={128 << 20}",
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    home = tmp_path_factory.mktemp("returns") / "home"
    with LocalCluster(home, *FLAGS, env={"QUIRE_WORKER_CALIBRATE": "auto"}, is_patient=False) as running:
        wait_for_all(running)
        yield running


@pytest.fixture(scope="module")
def pids(cluster: LocalCluster) -> dict[str, int]:
    return {service["name"]: service["pid"] for service in cluster.status()["services"]}


def some_tokens(count: int) -> list[int]:
    """No prompt has them yet."""
    return [random.randrange(300, 3_000) for _ in range(count)]


def ask(cluster: LocalCluster, prompt: list[int], max_tokens: int = ANSWER_TOKENS) -> dict[str, Any]:
    body = {
        "model": "quire-demo", "prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True,
        "return_token_ids": True, "quire_receipt": True,
    }  # fmt: skip
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def num_look_ups(cluster: LocalCluster) -> float:
    text = httpx.get(f"{cluster.url}/metrics", timeout=WAIT_S).text
    wanted = 'quire_prompttree_lookups_total{outcome="ok"'
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(wanted))


def num_pushed_back(cluster: LocalCluster) -> int:
    return cluster.pool()["counters"].get("blocks_pushed_back", 0)


def missing(cluster: LocalCluster) -> list[str]:
    """Functions that are not there: [] when all are."""
    try:
        return not_done(cluster)
    except (httpx.HTTPError, AssertionError) as error:
        return [f"no answer: {error!r}"]


def not_done(cluster: LocalCluster) -> list[str]:
    """What two turns of a conversation and a prompt with the same head lacked. Raises: as ask()."""
    looked_up, pushed_back = num_look_ups(cluster), num_pushed_back(cluster)
    head = some_tokens(HEAD_TOKENS)
    first = ask(cluster, head)
    deadline = time.monotonic() + 3.0
    while num_pushed_back(cluster) == pushed_back:
        if time.monotonic() > deadline:
            return ["decode's blocks are not pushed back"]
        time.sleep(0.02)
    time.sleep(0.3)  # until the trees say so
    turns = head + first["choices"][0]["token_ids"] + some_tokens(MORE_TOKENS)
    second, third = ask(cluster, turns), ask(cluster, head + some_tokens(MORE_TOKENS))
    found = []
    if num_look_ups(cluster) < looked_up + 3:
        found.append("the prompt tree is not asked")
    for name, answer, num_known in (
        ("first turn", first, 0),
        ("second turn", second, HEAD_TOKENS + ANSWER_TOKENS - 1),
        ("same head", third, HEAD_TOKENS),
    ):
        receipt = answer["quire_receipt"]
        if receipt["placement"] != "disaggregated":
            found.append(f"{name}: placed {receipt['placement']}")
        if receipt["predicted_ttft_ms"] is None:
            found.append(f"{name}: nothing is predicted")
        num_new = answer["usage"]["prompt_tokens"] - num_known // BLOCK_TOKENS * BLOCK_TOKENS
        computed = receipt["stages"][0]["tokens_computed"]
        if computed != num_new:
            found.append(f"{name}: {computed} tokens were computed, {num_new} are new")
    return found


def keep_asking(cluster: LocalCluster, stop: threading.Event, failed: list[str]) -> None:
    while not stop.is_set():
        try:
            ask(cluster, some_tokens(100), 20)
        except (httpx.HTTPError, AssertionError) as error:
            failed.append(repr(error))


def stand_still(cluster: LocalCluster, pid: int) -> list[str]:
    """The process, under three clients. Returns what they were told instead of an answer."""
    stop, failed = threading.Event(), []
    clients = [threading.Thread(target=keep_asking, args=(cluster, stop, failed)) for _ in range(3)]
    for client in clients:
        client.start()
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.5)
    stop.set()
    for client in clients:
        client.join()
    return failed


def wait_for_all(cluster: LocalCluster) -> None:
    tries, deadline = [missing(cluster)], time.monotonic() + RETURNS_S
    while tries[-1]:
        assert time.monotonic() < deadline, tries
        time.sleep(LOOK_EVERY_S)
        tries.append(missing(cluster))


@pytest.mark.parametrize("name", PROCESSES)
def test_every_function_returns_when_a_process_that_stood_still_goes_on(cluster, pids, name):
    refused = stand_still(cluster, pids[name])
    print(
        f"{name}: {len(refused)} requests were refused meanwhile {refused[:1]}"
    )  # other tests are about those
    wait_for_all(cluster)


def test_none_was_replaced_and_a_trace_is_whole_after_all_of_them_have_stood_still(cluster, pids):
    assert {service["name"]: service["pid"] for service in cluster.status()["services"]} == pids
    answer = ask(cluster, some_tokens(HEAD_TOKENS))
    spans_of_request(cluster.home, answer["id"], until=SPANS)  # fails where one does not come
