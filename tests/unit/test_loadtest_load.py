"""The gateway benchmarks' open loop: a time to the first token begins when its request was due."""

import asyncio
import random
import time

import pytest

from loadtest.http_client import Reply
from loadtest.load import open_loop

LATE_S = 0.03
EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n'


class LateClient:
    """Sends so late, and is answered at once."""

    async def post(self, request):
        await asyncio.sleep(LATE_S)
        reply = Reply(time.perf_counter(), status=200)
        reply.pieces.append((reply.started, EVENT))
        return reply

    def complain(self, text):
        raise AssertionError(text)


async def test_what_the_client_is_late_by_is_part_of_a_time_to_the_first_token():
    ttft_ms, failed = await open_loop(LateClient(), [b""] * 5, 500.0, random.Random(1), max_lag_ms=60_000.0)
    assert failed == 0
    assert min(ttft_ms) >= LATE_S * 1e3


async def test_a_client_that_is_late_measures_itself_and_says_so():
    with pytest.raises(RuntimeError, match=r"one request in a hundred went out \d+ ms late"):
        await open_loop(LateClient(), [b""] * 5, 500.0, random.Random(1), max_lag_ms=10.0)
