"""Somebody writes into a sealed page of a running cluster: the next answer is stock vLLM's nonetheless.

Real vLLM in its pages, at the default settings but for the rate: every block is in the sample. Without it the same
answer is wrong, which says that the bytes that are changed matter.
"""

import os
import struct
import time
from pathlib import Path

import httpx
import pytest

from shared.kv.page import PageState, unpack_word
from shared.kv.page_table import ENTRY, HEADER_WORDS, table_bytes
from tests.integration.test_exactness import BLOCK_TOKENS, CASES, assert_same, complete, stage
from tests.support.local_cluster import LocalCluster

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

CASE = "greedy-777"
LARGE = struct.pack("<f", 37.5)


def memory_of(pid: int, name: str) -> Path:
    """Path of the one memfd of a process with this name."""
    paths = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(link).startswith(f"/memfd:{name} "):
                paths[link.stat().st_ino] = link
        except FileNotFoundError:  # the process has closed one since; it keeps its memory's
            continue
    (path,) = paths.values()
    return path


def spoil_first_block(pid: int, page_bytes: int, num_pages: int) -> None:
    """Write over the block with which the only prompt begins, in the page where it is sealed."""
    with open(memory_of(pid, "quire-page-table"), "rb") as table:
        raw = table.read()
    words = struct.unpack_from(f"<{num_pages}Q", raw, HEADER_WORDS * 8)
    blocks = {}
    for page, word in enumerate(words):
        epoch, _, block_hash, parent = ENTRY.unpack_from(raw, table_bytes(num_pages) + page * ENTRY.size)
        if unpack_word(word) == (epoch, PageState.SEALED):
            blocks[block_hash] = (page, parent)
    (first,) = [page for page, parent in blocks.values() if parent not in blocks]
    with open(memory_of(pid, "quire-pages"), "r+b", buffering=0) as pages:
        pages.seek(first * page_bytes)
        pages.write(LARGE * (page_bytes // 8))


@pytest.mark.parametrize("rate", [1.0, 0.0])
def test_an_answer_after_somebody_wrote_into_a_sealed_page_is_right_where_sums_are_compared(
    reference, tmp_path, rate
):
    expected, case = reference[CASE], CASES[CASE]
    num_blocks = len(expected["prompt"]) // BLOCK_TOKENS
    with (
        LocalCluster(
            tmp_path / "home", "--set", "dtype=float32", env={"QUIRE_MEMPOOL_CHECKSUM_RATE": str(rate)}
        ) as cluster,
        httpx.Client(base_url=cluster.url, timeout=180) as client,
    ):
        assert_same(CASE, complete(client, case, expected), expected)
        if rate:
            deadline = time.monotonic() + 60
            while cluster.pool()["counters"]["checks_pages_summed"] < num_blocks:
                assert time.monotonic() < deadline, cluster.pool()["counters"]
                time.sleep(0.02)
        (space,) = cluster.pool()["spaces"]
        pid = cluster.pid_of("mempool")
        spoil_first_block(pid, cluster.pool()["page_bytes"], space["num_pages"])
        answer = complete(client, case, expected)
        counters = cluster.pool()["counters"]
        computed = stage(answer, "prefill")["tokens_computed"]
        if not rate:
            assert computed < len(expected["prompt"])  # it found the blocks
            told = [choice["token_ids"] for choice in answer["choices"]]
            assert told != [choice["token_ids"] for choice in expected["choices"]]
            return
        assert_same(CASE, answer, expected)
        assert computed == len(expected["prompt"])
        assert counters["checks_pages_corrupt"] == 1
        assert "1 pages changed while they were sealed" in " ".join(cluster.quire("status").stdout.split())
        assert counters["blocks_condemned"] >= num_blocks
        again = complete(client, case, expected)  # from blocks that were computed anew
        assert_same(CASE, again, expected)
        assert (
            stage(again, "prefill")["tokens_computed"] < BLOCK_TOKENS + len(expected["prompt"]) % BLOCK_TOKENS
        )
        assert cluster.pool()["counters"]["checks_pages_corrupt"] == 1
        assert cluster.pool_at_rest()["num_leases"] == 0
