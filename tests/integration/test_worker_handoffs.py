"""A worker's hand-offs: whose pages wait for decode, and whose for nobody."""

import asyncio

import pytest

from shared.wire.requests import SamplingSpec
from tests.integration.test_worker_front import FakePages, model_dir, running, until
from tests.integration.test_worker_mempool import disaggregated, pool, sides

__all__ = ["model_dir", "pool"]  # fixtures


@pytest.mark.parametrize("end", ["one token asked for", "first token stops", "deadline", "gateway gone"])
async def test_no_pages_are_held_for_a_hand_off_that_nobody_will_claim(model_dir, end):
    """They would stay in prefill's space until the hand-off's time is over, in the way of prompts that wait."""
    pages = FakePages()
    asked = []
    async with running(model_dir, pages, mock_prefill_tokens_per_s=1e6 if "token" in end else 1e2) as (
        rig,
        gateway,
    ):
        generate = rig.engine.generate

        def listening(request):
            asked.append(request.handoff_id)
            return generate(request)

        rig.engine.generate = listening
        prompt = list(range(3, 103))
        stop = [rig.vocabulary.tokens(prompt, 1)[0]] if end == "first token stops" else []
        spec = SamplingSpec(
            max_tokens=1 if end == "one token asked for" else 9, temperature=0.0, stop_token_ids=stop
        )
        deadline = {"deadline_ms": 50} if end == "deadline" else {}
        gateway.generate("p", prompt, stage="prefill", sampling=spec, **deadline)
        await until(lambda: asked)
        if end == "gateway gone":
            rig.front.close()
        else:
            assert getattr(await gateway.end_of("p"), "handoff", None) is None
        if end == "one token asked for":
            assert asked == [None], "the engine makes nothing ready"
            assert pages.dropped == []
        else:
            await until(lambda: pages.dropped)
            assert (asked, pages.dropped) == (["h-p"], ["h-p"])


async def test_a_hand_off_that_was_told_keeps_its_pages(model_dir):
    pages = FakePages()
    async with running(model_dir, pages) as (_, gateway):
        gateway.generate("p", list(range(3, 103)), stage="prefill")
        assert (await gateway.end_of("p")).handoff is not None
        gateway.generate("q", list(range(3, 103)), stage="prefill", max_tokens=1)
        await gateway.end_of("q")
        assert pages.dropped == []


async def test_a_running_mempool_pins_nothing_behind_prompts_that_their_first_token_ends(model_dir, pool):
    async with sides(model_dir, pool[1], handoff_ttl_ms=100_000) as (made, prefill, decode):
        vocabulary = made[0].engine.vocabulary
        for number in range(8):
            prompt = list(range(3 + number, 203 + number))
            stop = vocabulary.tokens(prompt, 1)
            stops = SamplingSpec(max_tokens=9, temperature=0.0, stop_token_ids=stop)
            prefill.generate(f"one-{number}", prompt, stage="prefill", max_tokens=1)
            prefill.generate(f"stop-{number}", prompt, stage="prefill", sampling=stops)
            assert (await prefill.end_of(f"one-{number}")).handoff is None
            assert (await prefill.end_of(f"stop-{number}")).handoff is None
        await disaggregated(prefill, decode, "whole", list(range(400, 500)))

        async def status():
            return await made[0].client.status(timeout_ms=30_000)

        async with asyncio.timeout(50):  # of the 100 s for which a hand-off waits
            while (now := await status()).num_handoffs or now.num_pinned:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.01)
        assert not now.counters.get("handoffs_expired")
