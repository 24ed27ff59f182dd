"""What the profiler reads of workers' status pages."""

import asyncio
from types import SimpleNamespace

import pytest

from loadtest.profiler import live
from loadtest.profiler.live import LiveOptions, LiveRunner
from shared.engine.interface import EngineLoad
from shared.errors import SettingsError

BLOCK_BYTES = 1_000
URL = "http://worker/status"


def page(**more):
    """Of a decode worker that is lending: 90 of its 100 pages are its, 10 of these are used, and 60 that leases pin."""
    return {
        "role": "decode", "model": "m", "block_tokens": 32, "block_bytes": BLOCK_BYTES, "tensor_parallel": 1,
        "num_kv_blocks": 181, "kv_used_share": 10 / 30, "kv_used_bytes": 70 * BLOCK_BYTES,
        "kv_pool_bytes": 100 * BLOCK_BYTES, "num_running": 1, "num_waiting": 1,
    } | more  # fmt: skip


def runner(monkeypatch, found):
    monkeypatch.setattr(live, "_read", lambda url, *_: {"data": [{"id": "m"}]} if "models" in url else found)
    return LiveRunner(LiveOptions(url="http://gateway", statuses=(URL,)))


def test_a_pool_is_what_the_worker_says_that_its_engine_may_have(monkeypatch):
    assert runner(monkeypatch, page()).pool_bytes == 100 * BLOCK_BYTES


def test_a_worker_that_does_not_say_its_memory_is_named(monkeypatch):
    old = page()
    del old["kv_pool_bytes"]
    with pytest.raises(SettingsError, match=f"{URL}.*kv_pool_bytes"):
        runner(monkeypatch, old)


@pytest.mark.parametrize(
    ("more", "is_full"), [({}, False), ({"kv_used_bytes": 95_000}, True), ({"kv_used_share": 1}, True)]
)
async def test_a_peak_is_the_most_bytes_that_requests_used_prompts_that_leases_pin_too(
    monkeypatch, more, is_full
):
    found = page(**more)
    watch = live._Watch(runner(monkeypatch, found)._holders, sample_ms=1.0)
    reading = asyncio.create_task(watch.run())
    async with asyncio.timeout(60):
        while watch._num_read < 2:  # noqa: ASYNC110  the first, at least, is counted
            await asyncio.sleep(0.005)
    reading.cancel()
    await asyncio.wait([reading])
    assert watch.peaks == [found["kv_used_bytes"]]
    assert bool(watch.full.spans) == is_full


def engine(**more):
    description = SimpleNamespace(block_bytes=BLOCK_BYTES)
    return SimpleNamespace(**{"keeps_leases": True, "num_pages": 100, "description": description} | more)


@pytest.mark.parametrize(
    ("engines", "pool"), [(["engine d: 1 of 99 pages"], 100), (["engine a", "engine b"], 50)]
)
async def test_engines_of_one_space_have_even_parts_of_it(engines, pool):
    module = pytest.importorskip("shared.engine.worker_kv")
    asked = asyncio.Event()

    async def space():
        asked.set()
        return SimpleNamespace(engines=engines)

    kv = module.KvMemory(engine(), SimpleNamespace(space=space))
    kv.open()
    await asked.wait()
    await asyncio.sleep(0)
    load = EngineLoad(kv_used_share=0.1, num_pages_in_use=70)
    said, share = kv.status(load), kv.used_share(load)
    await kv.close()
    assert said == {"kv_used_bytes": 70 * BLOCK_BYTES, "kv_pool_bytes": pool * BLOCK_BYTES}
    assert share == min(1.0, 70 / pool), "what leases pin is used, too"


async def test_an_engine_with_a_cache_of_its_own_uses_a_share_of_it():
    module = pytest.importorskip("shared.engine.worker_kv")
    kv = module.KvMemory(engine(keeps_leases=False), SimpleNamespace())
    kv.open()
    assert kv.status(EngineLoad(kv_used_share=0.25)) == {"kv_used_bytes": 25_000, "kv_pool_bytes": 100_000}
    assert kv.used_share(EngineLoad(kv_used_share=0.25)) == 0.25
    await kv.close()
