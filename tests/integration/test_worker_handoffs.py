"""A worker's hand-offs: whose pages wait for decode, and whose for nobody."""

import pytest

from shared.wire.requests import SamplingSpec
from tests.integration.test_worker_front import FakePages, model_dir, running, until

__all__ = ["model_dir"]  # a fixture


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
