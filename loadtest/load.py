"""Load on one server: closed loop, open loop, and many paced streams. Requests are prepared bytes.

The open loop runs without Python's cyclic garbage collector: a full collection of this process took 13 ms, which the
requests of that moment would have shown as their own.
"""

import asyncio
import gc
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from loadtest.http_client import Client, Reply
from loadtest.precise_timer import poisson
from loadtest.results import quantile
from loadtest.systems import System

MAX_LAG_MS = 50.0  # as the open loop of workloads
CHAT = "/v1/chat/completions"
WORDS = Path(__file__).with_name("prompts.txt").read_text().split()


def message(rng: random.Random, num_bytes: int) -> str:
    """Different words for every request, so that no cache knows the prompt."""
    text = f"{rng.getrandbits(64):x}"
    while len(text) < num_bytes:
        text += " " + rng.choice(WORDS)
    return text[:num_bytes]


def chat(system: System, client: Client, text: str, *, max_tokens: int, stream: bool) -> bytes:
    """A greedy chat request."""
    body = {
        "model": system.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": stream,
    }
    return client.request_bytes(CHAT, body)


async def closed_loop(
    client: Client,
    requests: Sequence[bytes],
    concurrency: int,
    *,
    timeout_s: float = 60.0,
    replies: list[Reply] | None = None,
) -> tuple[float, int]:
    """Send all, `concurrency` at a time: (seconds, failures). Args: replies: gets those that did not fail."""
    queue = list(reversed(requests))
    failed = 0

    async def user() -> None:
        nonlocal failed
        while queue:
            # not in one line with +=, which reads before it waits
            is_ok = await _ok(client, queue.pop(), timeout_s, replies)
            failed += not is_ok

    begin = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(concurrency)))
    return time.perf_counter() - begin, failed


async def _ok(client: Client, request: bytes, timeout_s: float, replies: list[Reply] | None) -> bool:
    try:
        reply = await client.post(request, timeout_s=timeout_s)
    except (OSError, TimeoutError) as error:
        client.complain(repr(error))
        return False
    if not reply.ok:
        client.complain(f"status {reply.status}: {reply.body[-300:]!r}")
    elif replies is not None:
        replies.append(reply)
    return reply.ok


async def open_loop(
    client: Client,
    requests: Sequence[bytes],
    rate_per_s: float,
    rng: random.Random,
    *,
    max_lag_ms: float = MAX_LAG_MS,
) -> tuple[list[float], int]:
    """Poisson arrivals that never wait for answers: (TTFT of each from when it was due in ms, failures).

    Raises: RuntimeError where one request in a hundred went out later than max_lag_ms: the client was measured then.
    """
    due_s: list[float] = []  # of time.monotonic(), which on Linux is perf_counter()'s clock
    tasks: list[asyncio.Task[Reply]] = []
    gc.collect()
    gc.disable()
    try:
        waiting = iter(requests)
        arrivals = poisson(rng, rate_per_s, len(requests))
        async for at_s in arrivals:
            due_s.append(at_s)
            tasks.append(asyncio.create_task(client.post(next(waiting))))
        replies = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        gc.enable()
    good = [
        (at_s, reply)
        for at_s, reply in zip(due_s, replies, strict=True)
        if isinstance(reply, Reply) and reply.ok
    ]
    for reply in replies:
        if not isinstance(reply, Reply):
            client.complain(repr(reply))
        elif not reply.ok:
            client.complain(f"status {reply.status}: {reply.body[-300:]!r}")
    lag_ms = [max(0.0, reply.started - at_s) * 1000 for at_s, reply in good]
    if good and (late_ms := quantile(lag_ms, 0.99)) > max_lag_ms:
        raise RuntimeError(
            f"one request in a hundred went out {late_ms:.0f} ms late or later, {max_lag_ms:g} are allowed"
        )
    ttft_ms = [round(reply.ttft_ms() + lag, 3) for (_, reply), lag in zip(good, lag_ms, strict=True)]
    return ttft_ms, len(replies) - len(good)


async def paced_streams(
    client: Client, requests: Sequence[bytes], seconds: float, cpu_us: Callable[[], int]
) -> dict[str, float]:
    """Chunks and CPU while all requests stream; the requests themselves lie outside the window."""
    replies = [Reply(0.0) for _ in requests]
    tasks = [
        asyncio.create_task(client.post(request, reply=reply))
        for request, reply in zip(requests, replies, strict=True)
    ]
    while not all(reply.num_events > 4 for reply in replies):
        if any(task.done() for task in tasks):
            raise RuntimeError("a stream ended before the window")
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    first, begin, cpu = sum(reply.num_events for reply in replies), time.perf_counter(), cpu_us()
    await asyncio.sleep(seconds)
    count, wall_s = sum(reply.num_events for reply in replies) - first, time.perf_counter() - begin
    used = cpu_us() - cpu
    if any(task.done() for task in tasks):
        raise RuntimeError("a stream ended inside the window: ask for more tokens")
    done = await asyncio.gather(*tasks)
    return {
        "count": count,
        "cpu_us": used,
        "wall_s": round(wall_s, 4),
        "failed": sum(not reply.ok for reply in done),
    }
