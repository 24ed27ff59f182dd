"""Prompts of three times an engine's memory: blocks are read in place outside it, and every token is stock vLLM's.

See tests/support/far_run.py. Blocks lie in pages that another space lends, and in host memory; the lender takes its
pages back again and again, while they are read.
"""

import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from shared.ids import Epoch, InstanceId, LeaseId, SpaceId
from shared.wire.lending import Grant, Offer, ReclaimOrder, Token
from shared.wire.mempool_lending import LendingDone
from tests.integration.mempool_rig import DESCRIPTION, MempoolProcess, until
from tests.integration.test_exactness import MODEL, ROOT
from tests.integration.test_mempool_lending import Engine
from tests.integration.test_pages_under_pressure import PAGE_BYTES
from tests.support.exactness_cases import prompts

NUM_PAGES = 15  # of each space
NUM_LENT = 8
DRAM_PAGES = 130
ANSWER_TOKENS = 24
WORKER = {
    "kv_space": "own", "max_model_len": 1600, "max_num_batched_tokens": 512, "far_bytes": 80 * PAGE_BYTES,
}  # fmt: skip
POLICIES = {
    "fcfs": {"max_num_seqs": 4},
    "cfs": {"max_num_seqs": 1, "local_policy": "cfs", "fair_slice_steps": 2},  # one slot: they take turns
}
OTHER = msgspec.structs.replace(DESCRIPTION, model="other", fingerprint="g", block_bytes=PAGE_BYTES)
LIMIT_S = 800.0

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def cases() -> list[dict]:
    texts = prompts(MODEL)
    greedy = {"temperature": 0.0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    sampled = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    return [
        {"id": "three-times", "prompt": texts[1500][:1440], "params": greedy},
        {"id": "twice", "prompt": texts[1500][333:1300], "params": sampled},
        {"id": "short", "prompt": texts[257], "params": greedy},
    ]


class Lender:
    """The test's own engine: it lends pages, and wants them back as soon as blocks are read there."""

    def __init__(self, pool: MempoolProcess) -> None:
        self.engine = Engine(pool, "lender", OTHER)
        self.number = self.before = 0

    async def counter(self, name: str) -> int:
        status = await self.engine.client.status()
        return status.counters.get(name, 0) if status is not None else 0

    async def lend(self) -> None:
        """Until wanted_back()."""
        self.number += 1
        client = self.engine.client
        boot, length = Epoch(client.boot_generation), NUM_LENT * self.engine.header.page_bytes
        where = {
            "mempool": InstanceId("m"),
            "boot_generation": boot,
            "space": SpaceId(0),
            "length_bytes": length,
        }
        offer = Offer(
            offer_id=f"o{self.number}", producer=InstanceId("lender"), producer_epoch=Epoch(1), **where
        )
        await client.present(offer)
        self.before = await self.counter("far_blocks_out_peer")
        grant = Grant(
            lease_id=LeaseId(f"l{self.number}"), offer_id=offer.offer_id, consumer=InstanceId("far"),
            purpose="overflow", address="", token=Token(1, self.number), present_ms=60_000, ttl_ms=600_000,
            consumer_ttl_ms=300_000, **where,
        )  # fmt: skip
        while not isinstance(await client.present(grant), LendingDone):
            self.engine.answer()
            await asyncio.sleep(0.005)

    async def wanted_back(self) -> None:
        """As soon as some of the pages are read; done when they are back."""
        while await self.counter("far_blocks_out_peer") < self.before + 4:
            self.engine.answer()
            await asyncio.sleep(0.005)
        order = ReclaimOrder(
            reclaim_id=f"r{self.number}", offer_id=f"o{self.number}", keep_bytes=0, deadline_ms=600_000
        )
        await self.engine.client.present(order)
        while self.leased():
            self.engine.answer()
            await asyncio.sleep(0.005)

    def leased(self) -> int:
        return self.pool_counts().get("leased", 0)

    def pool_counts(self) -> dict[str, int]:
        raise NotImplementedError


@pytest.fixture(scope="module", params=POLICIES)
def found(request):
    folder = Path(tempfile.mkdtemp(prefix="quire-"))
    limits = {"capacity-bytes": NUM_PAGES * PAGE_BYTES, "dram-bytes": DRAM_PAGES * PAGE_BYTES}
    patience = dict.fromkeys(("offer-patience-ms", "copy-timeout-ms", "out-timeout-ms"), 60_000)
    pool = MempoolProcess(folder, **limits, **patience, **{"dram-for-host": "true"})
    try:
        worker = {**WORKER, **POLICIES[request.param]}
        yield asyncio.run(asyncio.wait_for(run(pool, folder, worker), LIMIT_S)) | {"policy": request.param}
    finally:
        pool.stop()
        shutil.rmtree(folder)


async def run(pool: MempoolProcess, folder: Path, worker: dict) -> dict:
    asked, out, log = folder / "cases.json", folder / "out.json", folder / "log"
    asked.write_text(json.dumps(cases()))
    lender = Lender(pool)
    lender.pool_counts = pool.counts
    lender.engine.client.start()
    assert await lender.engine.client.wait_connected(30_000)
    words = [
        sys.executable,
        "-m",
        "tests.support.far_run",
        MODEL,
        pool.socket,
        asked,
        out,
        json.dumps(worker),
    ]
    pipe = asyncio.subprocess.PIPE
    with log.open("w") as errors:
        process = await asyncio.create_subprocess_exec(
            *map(str, words), cwd=ROOT, stdin=pipe, stdout=pipe, stderr=errors
        )
    try:
        while (line := await process.stdout.readline()) != b"ready\n":
            assert line, log.read_text()[-6_000:]
        await lender.lend()
        process.stdin.write(b"go\n")
        lending = asyncio.create_task(lend_again_and_again(lender))
        assert await process.wait() == 0, log.read_text()[-6_000:]
        lending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await lending
    finally:
        if process.returncode is None:
            process.kill()
    until(lambda: not any("far" in name for name in pool.status()["attachments"]), "the engine has left")
    found = {**json.loads(out.read_text()), "status": pool.settled()}
    await lender.engine.close()
    print(found["counts"], lender.number, found["status"]["pages_by_state"])
    return found


async def lend_again_and_again(lender: Lender) -> None:
    while True:
        await lender.wanted_back()
        await lender.lend()


@pytest.mark.parametrize("when", ["alone", "crowd"])
def test_every_answer_is_stock_vllms(found, when):
    for name, answer in found[when].items():
        assert answer == [choice["token_ids"] for choice in found["stock"][name]["choices"]], name


def test_blocks_were_read_outside_the_engines_memory_there_and_here(found):
    assert found["counts"]["blocks_out"] > 2 * NUM_PAGES
    assert found["counts"]["blocks_out_peer"] > 0


def test_in_fair_slices_requests_took_turns_and_nothing_was_computed_twice(found):
    if found["policy"] == "cfs":
        assert found["fair"]["times_resumed"] > 0, found["fair"]
        assert found["fair"].get("recomputed_tokens", 0) == 0, found["fair"]


def test_no_block_was_lost_and_nobody_was_killed_while_the_lender_took_its_pages_back(found):
    assert found["counts"].get("blocks_lost", 0) == 0
    assert found["status"]["counters"].get("far_engines_killed", 0) == 0


def test_every_page_pin_and_lease_came_back(found):
    status = found["status"]
    assert found["leases"] == 0
    assert (status["num_pinned"], status["num_leases"], status["num_handoffs"]) == (0, 0, 0)
    assert {name for name, count in status["pages_by_state"].items() if count} <= {
        "free",
        "sealed",
        "leased",
        "granted",
    }
    assert status["counters"].get("far_maps_failed", 0) == 0
