"""Engines of unequal tensor parallelism in spaces of their own: blocks are cut anew on their way, tokens equal stock's.

The reference is stock vLLM with one rank. In float32 the greedy and the seeded answers of two ranks are the same here;
where they were not, the reference would have to be stock vLLM with as many ranks.
"""

import asyncio
import os
import signal
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from deploy.local.services_table import Ports
from tests.integration.mempool_rig import until
from tests.integration.test_exactness import (
    BLOCK_TOKENS,
    CASES,
    assert_same,
    complete,
    is_one_token,
    stage,
)
from tests.support.cluster_dram import dram_behind_host_memory, empty
from tests.support.exactness_cases import ANSWER_TOKENS
from tests.support.local_cluster import LocalCluster
from tests.support.open_files import open_files
from tests.support.processes import descendants, is_gone
from tests.support.spans import spans_of_request

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.whole_machine, pytest.mark.timeout(1500)]

FIRST = [
    "greedy-5", "greedy-32", "greedy-33", "greedy-257", "greedy-640", "seeded-100", "top-k-min-p", "logprobs-greedy",
    "penalties", "json-schema", "n3-seeded", "stop-crossing", "max-tokens-1",
]  # fmt: skip
DETECTION_S = 8.0  # 0.3 on a quiet machine; vLLM alone takes 9
LISTENING = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


class Split:
    """A cluster whose prefill and decode engines have so many ranks."""

    def __init__(self, prefill: int, decode: int, has_dram: bool, home: Path) -> None:
        self.has_dram = has_dram
        self.strangers = shared_memory()  # of whoever else uses vLLM on this machine
        self.ranks = {"prefill": prefill, "decode": decode}
        flags = ["dtype=float32", "kv_space=own"]
        flags += [f"{role}_tensor_parallel={count}" for role, count in self.ranks.items()]
        words = [word for flag in flags for word in ("--set", flag)]
        self.cluster = LocalCluster(home, *words, env=dram_behind_host_memory(home) if has_dram else None)

    def counted(self, name: str) -> int:
        return self.cluster.pool()["counters"].get(name, 0)

    def in_doubt(self) -> int:
        """Pages that no engine and no index has."""
        states = self.cluster.pool()["pages_by_state"]
        return sum(states[name] for name in ("retiring", "leased", "quarantined"))

    def num_running(self, role: str) -> int:
        """Requests in the engine's steps."""
        _, admin = Ports(gateway=self.cluster.base + 90, base=self.cluster.base).worker(role, 0)
        return httpx.get(f"http://127.0.0.1:{admin}/status", timeout=30).json()["num_running"]

    def spaces(self) -> dict[str, dict]:
        """By role."""
        found = {space["devices"][0]: space for space in self.cluster.pool()["spaces"]}
        return {role: found[f"cpu:{role}-0"] for role in self.ranks}


# with host memory behind a space, what no engine pins leaves it at once: a next turn moves it again
@pytest.fixture(
    scope="module",
    params=[(2, 1, False), (1, 2, True)],
    ids=["prefill-2-decode-1", "prefill-1-decode-2-dram"],
)
def split(request, tmp_path_factory):
    found = Split(*request.param, tmp_path_factory.mktemp("tp") / "home")
    with found.cluster:
        yield found


def long_answers(url: str, over: threading.Event, told: list[str]) -> list[str]:
    """One behind the other, until it is over or one is not given; the texts."""
    long = {
        "model": "quire-demo",
        "prompt": [5, 6, 7],
        "max_tokens": 2_000,
        "ignore_eos": True,
        "quire_receipt": True,
    }
    while not over.is_set():
        answer = httpx.post(f"{url}/v1/completions", json=long, timeout=180)
        told.append(answer.text)
        if answer.status_code != httpx.codes.OK or stage(answer.json(), "decode") is None:
            break
    return told


def listening(pid: int) -> list[str]:
    """Local addresses, in hexadecimal, of the TCP sockets on which the process listens."""
    inodes = {name[8:-1] for name in open_files(pid).values() if name.startswith("socket:")}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    return [row[1].rpartition(":")[0] for row in rows if row[3] == LISTENING and row[9] in inodes]


def test_every_case_equals_stock_though_the_ranks_are_unequal(reference, split):
    wrong = []
    with httpx.Client(base_url=split.cluster.url, timeout=180) as client:
        for name in FIRST:
            answer = complete(client, CASES[name], reference[name])
            try:
                assert_same(name, answer, reference[name])
                decode = stage(answer, "decode")
                if not is_one_token(reference[name]):
                    assert answer["quire_receipt"]["placement"] == "disaggregated", name
                    assert decode["tokens_computed"] == (
                        1 if name != "n3-seeded" else decode["tokens_computed"]
                    ), name
            except AssertionError as error:
                where = traceback.extract_tb(error.__traceback__)[-1].lineno
                wrong.append(f"{str(error).splitlines()[0]}, line {where}: {answer}")
    assert not wrong, "\n".join(wrong)
    spaces = split.spaces()
    assert spaces["prefill"]["content_key"] != spaces["decode"]["content_key"]
    pages = {role: space["page_bytes"] * split.ranks[role] for role, space in spaces.items()}
    assert pages["prefill"] == pages["decode"], "a block is cut over the ranks"
    assert split.counted("blocks_pulled") > 50
    assert not split.counted("pulls_failed")


def second_turn(split: Split, client: httpx.Client, length: int, reference: dict) -> dict:
    """The next turn, once what decode completed is back; checks that only the new blocks are computed and moved."""
    name = f"second-{length}"
    prompt_tokens = len(reference[name]["prompt"])
    kept_blocks = (len(reference[f"greedy-{length}"]["prompt"]) + ANSWER_TOKENS - 1) // BLOCK_TOKENS
    before = split.counted("blocks_pulled")
    answer = complete(client, CASES[name], reference[name])
    assert_same(name, answer, reference[name])
    prefill, decode = stage(answer, "prefill"), stage(answer, "decode")
    assert prefill["tokens_computed"] == prompt_tokens - kept_blocks * BLOCK_TOKENS, prefill
    assert decode["tokens_computed"] == 1, decode
    assert decode["tokens_engine"] + decode["tokens_pool"] == prompt_tokens, decode
    moved = split.counted("blocks_pulled") - before
    assert split.has_dram or moved == -(-prompt_tokens // BLOCK_TOKENS) - kept_blocks, moved
    return answer


@pytest.mark.parametrize("length", [777, 1500])  # behind these prompts decode completes a block
def test_a_second_turn_computes_and_moves_only_what_is_new(reference, split, length):
    first = f"greedy-{length}"
    before = split.counted("blocks_pushed_back")
    with httpx.Client(base_url=split.cluster.url, timeout=180) as client:
        assert_same(first, answer := complete(client, CASES[first], reference[first]), reference[first])
        until(lambda: split.counted("blocks_pushed_back") > before, "what decode completed is back")
        spans_of_request(split.cluster.home, answer["id"], until={"kv.return"})  # of this one
        second_turn(split, client, length, reference)
    assert split.cluster.pool_at_rest()["num_leases"] == 0


def test_blocks_of_every_rank_go_out_to_host_memory_and_come_back(reference, split):
    """Swapped out between two turns by the nine calls."""
    if not split.has_dram:
        pytest.skip("no host memory behind these spaces")
    first, second = "greedy-257", "second-257"
    with httpx.Client(base_url=split.cluster.url, timeout=180) as client:
        assert_same(first, complete(client, CASES[first], reference[first]), reference[first])
        for role in split.ranks:
            assert asyncio.run(empty(split.cluster, f"{role}-0")) > 0
        before = split.counted("blocks_pulled_from_dram")
        answer = complete(client, CASES[second], reference[second])
    assert_same(second, answer, reference[second])
    kept_tokens = (257 + ANSWER_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    prefill = stage(answer, "prefill")
    assert prefill["tokens_pool"] == kept_tokens, prefill
    assert prefill["tokens_computed"] == len(reference[second]["prompt"]) - kept_tokens, prefill
    assert split.counted("blocks_pulled_from_dram") - before >= kept_tokens // BLOCK_TOKENS


def test_no_engine_listens_beyond_this_machine(split):
    fronts = {role: split.cluster.pid_of(f"{role}-0") for role in split.ranks}
    pids = {role: [front, *descendants(front)] for role, front in fronts.items()}
    for role, count in split.ranks.items():
        assert len(pids[role]) >= (2 + count if count > 1 else 2), pids
        for pid in pids[role]:
            assert set(listening(pid)) <= LOOPBACK, (role, pid, listening(pid))


def test_a_rank_that_dies_ends_its_engine_and_the_next_one_finds_the_sealed_pages(reference, split):
    """One of the two ranks; in the decode engine while the other one waits for it in a step."""
    first = "greedy-1000"
    role = max(split.ranks, key=split.ranks.__getitem__)
    over, told = threading.Event(), []
    with httpx.Client(base_url=split.cluster.url, timeout=180) as client, ThreadPoolExecutor() as threads:
        assert_same(first, complete(client, CASES[first], reference[first]), reference[first])
        front = split.cluster.pid_of(f"{role}-0")
        pids = [front, *descendants(front)]
        try:
            if role == "decode":
                # its ranks wait for each other so busily that this process may see no CPU while one is answered
                asked = threads.submit(long_answers, split.cluster.url, over, told)
                until(lambda: split.num_running(role) > 0 or asked.done(), "it is in a step")
                assert not asked.done(), asked.result()
        finally:
            over.set()
        ranks = [pid for pid in pids if b"grammar_child" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(ranks[-1], signal.SIGKILL)  # the last one; who tries grammars out may die alone
        until(lambda: all(is_gone(pid) for pid in pids), "the whole instance ends", DETECTION_S)
        split.cluster.wait_replaced(f"{role}-0", front)
        assert_same(first, answer := complete(client, CASES[first], reference[first]), reference[first])
    prefill = stage(answer, "prefill")
    assert prefill["tokens_computed"] <= BLOCK_TOKENS, prefill
    if not split.has_dram:
        assert not prefill["tokens_peer"] + prefill["tokens_dram"], "they are in its own space"
    until(lambda: not split.in_doubt(), "every page is accounted for")
    until(lambda: shared_memory() <= split.strangers, "no shared memory is left")


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*-cpushm_*")}
