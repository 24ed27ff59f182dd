"""`quire up` on two hosts, the second joining the first: prefill there, decode here, one cluster. Root only.

Both hosts are network namespaces with a loopback of their own, and nothing but a veth pair between them: a break of it
cuts the pages and the control plane at once.
"""

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.integration.test_exactness import (
    CASES,
    assert_same,
    complete,
    completion_body,
    stage,
)
from tests.support.local_cluster import LocalCluster

NAMES = ["greedy-64", "greedy-257", "seeded-100", "greedy-1000", "n3-short", "max-tokens-2"]
AFTER = ["greedy-320", "greedy-511", "greedy-33", "greedy-161", "greedy-640"]
CLONE_NEWNET = 0x40000000
CUT_S = 3.0
ANSWER_S = 120.0

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def cluster(hosts, tmp_path_factory):
    """The first host's, with the gateway; the second host's workers have joined it."""
    common = ("--set", "dtype=float32", "--set", "topology=disaggregated")
    first = LocalCluster(
        tmp_path_factory.mktemp("one") / "home", *common,
        "--set", "address=10.213.7.1", "--set", "num_decode=0", prefix=hosts.prefix(0),
    )  # fmt: skip
    with first:
        second = LocalCluster(
            tmp_path_factory.mktemp("two") / "home", *common,
            "--set", "address=10.213.7.2", "--set", "num_prefill=0",
            "--set", f"join=10.213.7.1:{first.base}", prefix=hosts.prefix(1),
        )  # fmt: skip
        with second:
            yield first


@pytest.fixture(scope="module")
def on_first(hosts):
    """Runs functions in threads that are on the first host."""

    def enter() -> None:
        fd = os.open(f"/var/run/netns/{hosts.names[0]}", os.O_RDONLY)
        try:
            assert ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET) == 0, os.strerror(
                ctypes.get_errno()
            )
        finally:
            os.close(fd)

    with ThreadPoolExecutor(2, initializer=enter) as pool:
        yield pool


def ask(url, name, reference):
    """Stock's tokens; the decode stage's receipt."""
    with httpx.Client(base_url=url, timeout=ANSWER_S) as client:
        answer = complete(client, CASES[name], reference[name])
    assert_same(name, answer, reference[name])
    assert answer["quire_receipt"]["placement"] == "disaggregated"
    return stage(answer, "decode")


def test_a_second_machine_joins_and_tokens_equal_stock(reference, cluster, on_first):
    for name in NAMES:
        decode = on_first.submit(ask, cluster.url, name, reference).result()
        assert decode["instance"].startswith("decode-0-10-213-7-2-")
        if CASES[name]["params"].get("n", 1) == 1:
            assert decode["tokens_computed"] == 1, f"{name}: {decode}"


def test_a_cut_between_the_machines_ends_requests_in_time_and_the_cluster_goes_on_after_it(
    reference,
    cluster,
    on_first,
    hosts,
):
    def attempt(name):
        """A right answer, or an error that says so. Where it ran, or the error's status."""
        with httpx.Client(base_url=cluster.url, timeout=ANSWER_S) as client:
            response = client.post("/v1/completions", json=completion_body(CASES[name], reference[name]))
        if response.status_code == 200:
            assert_same(name, response.json(), reference[name])
            return response.json()["quire_receipt"]["placement"]
        assert response.status_code in (500, 502, 503, 504), response.text
        return response.status_code

    pending = [on_first.submit(attempt, name) for name in AFTER[:3]]
    time.sleep(0.1)
    hosts.cut()
    time.sleep(CUT_S)
    hosts.mend()
    for each in pending:
        each.result(ANSWER_S)
    until_s = time.monotonic() + ANSWER_S
    while on_first.submit(attempt, AFTER[3]).result() != "disaggregated":  # the scheduler knows both again
        assert time.monotonic() < until_s
        time.sleep(0.5)
    assert on_first.submit(ask, cluster.url, AFTER[4], reference).result()["tokens_computed"] == 1
