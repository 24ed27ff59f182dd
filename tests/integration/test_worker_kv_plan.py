"""Fetch or recompute at the worker: what it asks its mempool for, and what the receipt says of the answer."""

import asyncio
import json
import time

import msgspec
import pytest

from shared.engine.worker_config import WorkerSettings
from shared.engine.worker_links import MeasuredLinks
from shared.engine.worker_pages import Brought, PromptPages
from shared.kv.block_hash import chain_seed, pack_tokens
from shared.testing.mock_engine import MockEngine
from shared.testing.mock_pages import MOCK_BLOCK_BYTES
from shared.wire.requests import Finished, KvPlan
from tests.integration.test_worker_front import FakePages, running


@pytest.fixture
def model_dir(tmp_path):
    config = {"vocab_size": 1000, "eos_token_id": 2, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("plan", "wait_ms", "source", "own"),
    [
        (None, 0, "", False),
        (KvPlan(reach="own", source="p1", tokens=8, path="peer", recompute=True), 0, "", True),
        (KvPlan(reach="host", source="p1", tokens=8, path="peer"), 1_000, "", False),
        (KvPlan(reach="host", source="p1", tokens=8, path="remote", recompute=True), 0, "", False),
        (KvPlan(reach="remote", source="p1", path="remote", source_mempool="tcp://x"), 1_000, "tcp://x", False),
    ],
)  # fmt: skip
async def test_pages_come_from_as_far_as_the_scheduler_says(model_dir, plan, wait_ms, source, own):
    pages = FakePages()
    async with running(model_dir, pages) as (_, gateway):
        gateway.generate("c", list(range(3, 15)), kv=plan)
        assert isinstance(await gateway.end_of("c"), Finished)
        assert [call[1:] for call in pages.calls] == [("", wait_ms)]
        assert (pages.sources, pages.own_space_only) == ([source], own)


async def test_the_receipt_says_where_pages_were_brought_from(model_dir):
    pages = FakePages()
    pages.brought = {"blocks_peer": 1, "blocks_remote": 1}
    async with running(model_dir, pages) as (_, gateway):
        gateway.generate("c", list(range(3, 16)))
        receipt = (await gateway.end_of("c")).receipt
        assert receipt.fetch_path == "peer+remote"
        assert receipt.bytes_fetched == 2 * MOCK_BLOCK_BYTES


def test_tokens_from_pages_are_counted_once_the_farthest_first():
    brought = Brought(blocks_peer=4, blocks_dram=2, blocks_remote=1, block_tokens=32)
    assert brought.tokens(1_000) == (128, 64, 32)
    assert brought.tokens(70) == (0, 38, 32)  # the engine had the rest of them in its own cache
    assert brought.path == "peer+dram+remote"


class SlowPages(FakePages):
    """Takes 50 ms."""

    async def acquire(self, hashes, **options):
        await asyncio.sleep(0.05)
        return await super().acquire(hashes, **options)


def patient(model_dir: str) -> WorkerSettings:
    """Of a worker that takes no busy machine for a mempool that does not answer."""
    return WorkerSettings(
        engine="mock", model_dir=model_dir, model_name="m", block_tokens=4, acquire_timeout_ms=60_000
    )


async def test_rates_of_what_came_by_one_path_are_measured_and_told(model_dir):
    pages = SlowPages()
    settings = patient(model_dir)
    layout = msgspec.structs.replace(MockEngine(settings).description, block_bytes=4 << 20)
    prompt_pages = PromptPages(pages, layout, settings)
    prompt_pages._links = MeasuredLinks(lambda: 0.0)  # nothing fades
    seed = chain_seed("f", "")
    assert prompt_pages.links == {}
    for brought in (
        {},
        {"blocks_peer": 1, "blocks_dram": 1},
    ):  # nothing, and nobody knows which path took how long
        pages.brought = brought
        await prompt_pages.for_prompt(seed, pack_tokens(range(13)), "")
    assert prompt_pages.links == {}
    pages.brought = {"blocks_remote": 3}
    await prompt_pages.for_prompt(seed, pack_tokens(range(13)), "")
    assert prompt_pages.links == {}, "a path was opened in it"
    begun_s = time.perf_counter()
    await prompt_pages.for_prompt(seed, pack_tokens(range(13)), "")
    took_ms = (time.perf_counter() - begun_s) * 1e3
    assert list(prompt_pages.links) == ["remote"]
    mb = 12 * 1.048576
    assert mb / took_ms < prompt_pages.links["remote"].gb_per_s < mb / 48  # in 50 ms, 2 of them latency


async def test_within_a_host_a_rate_is_the_copys_and_not_that_of_who_waits_for_a_prompt(model_dir):
    pages = SlowPages()
    settings = patient(model_dir)
    layout = msgspec.structs.replace(MockEngine(settings).description, block_bytes=4 << 20)
    prompt_pages = PromptPages(pages, layout, settings)
    seed = chain_seed("f", "")
    pages.brought = {"blocks_peer": 3}  # all of it before the call
    await prompt_pages.for_prompt(seed, pack_tokens(range(13)), "")
    assert prompt_pages.links == {}
    pages.brought = {"blocks_peer": 3, "blocks_timed": 1, "timed_us": 100}  # the others ahead
    await prompt_pages.for_prompt(seed, pack_tokens(range(13)), "")
    assert prompt_pages.links["peer"].gb_per_s == pytest.approx((4 << 20) / 100e3)
