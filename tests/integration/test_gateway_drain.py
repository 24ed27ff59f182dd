"""A gateway told to end: what is under way finishes, or ends with an error, and it says how much that is."""

import asyncio
import signal

import pytest

from tests.integration.gateway_process_rig import (
    CHAT,
    answer_in_two,
    children_of,
    ids,
    neighbours,
    process,
    streamed,
)
from tests.integration.gateway_rig import answer_tokens, until


async def says_in_flight(client, count):
    """Whoever stops it waits by this."""
    async with asyncio.timeout(30):
        while (await client.get("/ready")).json().get("in_flight") != count:  # noqa: ASYNC110  of another process
            await asyncio.sleep(0.02)


async def test_sigterm_finishes_what_runs_refuses_the_rest_and_exits_0(model_dir):
    async with neighbours() as (coordinator, scheduler, worker):
        first, *rest = ids(model_dir, " the quick brown fox jumps")
        may_end = asyncio.Event()

        worker.script = answer_in_two(first, rest, may_end)
        async with process(model_dir, coordinator, scheduler) as (child, client):
            task = asyncio.create_task(client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
            await until(lambda: worker.generated)
            child.send_signal(signal.SIGTERM)
            await says_in_flight(client, 1)
            assert (await client.get("/ready")).status_code == 503
            refused = await client.post("/v1/chat/completions", json=CHAT)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            may_end.set()
            reply = await task
            assert reply.text.endswith("data: [DONE]\n\n")
            assert "error" not in reply.text
            assert await asyncio.wait_for(child.wait(), 30) == 0


@pytest.mark.parametrize("is_told_twice", [False, True])
async def test_the_drain_deadline_or_a_second_signal_ends_streams_with_an_error_and_exits_0(
    model_dir, is_told_twice
):
    async with neighbours() as (coordinator, scheduler, worker):
        worker.script = answer_tokens(ids(model_dir, " the quick brown fox" * 50), gap_s=0.1)
        flags = {"drain_deadline_ms": 300_000 if is_told_twice else 300}
        async with process(model_dir, coordinator, scheduler, **flags) as (child, client):

            async def tell():
                child.send_signal(signal.SIGTERM)
                if is_told_twice:
                    await says_in_flight(client, 1)
                    child.send_signal(signal.SIGTERM)

            text = await streamed(client, tell)
            assert '"code":"draining"' in text
            assert text.endswith("data: [DONE]\n\n")
            assert await asyncio.wait_for(child.wait(), 30) == 0
            await asyncio.wait_for(worker.abort_seen.wait(), 30)


async def test_of_two_processes_that_drain_each_says_what_is_under_way_at_both(model_dir):
    async with neighbours() as (coordinator, scheduler, worker):
        worker.script = answer_tokens(ids(model_dir, " the quick brown fox" * 50), gap_s=0.1)
        async with process(model_dir, coordinator, scheduler, processes=2) as (child, client):
            await children_of(child.pid, 2)
            streams = [client.post("/v1/chat/completions", json={**CHAT, "stream": True}) for _ in range(8)]
            tasks = [asyncio.create_task(each) for each in streams]
            await until(lambda: len(worker.generated) == 8)
            child.send_signal(signal.SIGTERM)
            await says_in_flight(client, 8)
            child.send_signal(signal.SIGTERM)
            for reply in await asyncio.gather(*tasks):
                assert reply.text.endswith("data: [DONE]\n\n")
            assert await asyncio.wait_for(child.wait(), 30) == 0
