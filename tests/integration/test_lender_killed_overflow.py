"""A lender gets SIGKILL in the middle of a real engine's answer, while the engine's cached blocks lie in its pages: the
answer and all later ones are stock vLLM's, and the market takes the memory of the dead back.

One colocated worker that borrows by itself, as in test_exactness_lent_pages.py; the lender is a process of its own.
"""

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.local.config import paths_of
from tests.integration.killed_lender import lending_process
from tests.integration.mempool_rig import until
from tests.integration.test_exactness import CASES, assert_same, completion_body
from tests.integration.test_exactness_lent_pages import LENDING, NAMES, cluster_of
from tests.support.local_cluster import LocalCluster

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

SILENT_MS = 3_000  # then a lender that says nothing gets its memory back
MOST_ASKED = 400
NUM_USED = 4  # blocks that came back from lent pages, before


@pytest.fixture
def cluster(tmp_path_factory):
    env = LENDING | {"QUIRE_MEMPOOL_LENDING_SILENT_MS": str(SILENT_MS)}
    with cluster_of(tmp_path_factory.mktemp("killed"), env) as cluster:
        yield cluster


def counter(cluster: LocalCluster, name: str) -> int:
    return cluster.pool()["counters"].get(name, 0)


def leased(cluster: LocalCluster) -> int:
    return sum(space["pages_by_state"].get("leased", 0) for space in cluster.pool()["spaces"])


def test_an_answer_whose_cached_blocks_a_killed_lender_has_is_stocks_and_so_are_those_behind_it(
    reference, cluster
):
    def ask(client: httpx.Client, name: str) -> None:
        answer = client.post("/v1/completions", json=completion_body(CASES[name], reference[name]))
        assert_same(name, answer.json(), reference[name])

    def ask_and_kill(client: httpx.Client, name: str, lender: Any) -> None:
        """The lender dies behind the first tokens."""
        body = {**completion_body(CASES[name], reference[name]), "stream": True}
        tokens: list[int] = []
        with client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice.get("token_ids") or []
                if tokens and lender.poll() is None:
                    lender.kill()
                    lender.wait()
                    assert len(tokens) < len(reference[name]["choices"][0]["token_ids"])
        assert [tokens] == [choice["token_ids"] for choice in reference[name]["choices"]]

    socket = Path(paths_of(cluster.home).sockets) / "mempool.sock"
    names = cycle(NAMES)
    with httpx.Client(base_url=cluster.url, timeout=300) as client, lending_process(socket) as lender:
        for _ in range(MOST_ASKED):
            if counter(cluster, "blocks_pulled_from_peer") >= NUM_USED and leased(cluster):
                break
            ask(client, next(names))
        assert leased(cluster), "it borrows, and reads what it has there"
        ask_and_kill(client, next(names), lender)
        for _ in range(MOST_ASKED):
            ask(client, next(names))
            if not leased(cluster):
                break
        until(lambda: not leased(cluster), "the pages of the dead come home")
        for name in NAMES:
            ask(client, name)
    assert not counter(cluster, "checks_pages_corrupt") + counter(cluster, "checks_copies_wrong")
    assert counter(cluster, "lending_loans_reclaim") > 0
