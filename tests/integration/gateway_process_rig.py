"""A gateway as a process, between scripted neighbours."""

import asyncio
import contextlib
import sys
from pathlib import Path

import httpx

from shared.free_ports import free_port
from tests.integration.gateway_rig import MODEL, FakeCoordinator, FakeScheduler, FakeWorker, colocate, until
from tests.support import patience

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "the fox"}]}


def ids(model_dir, text):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return tokenizer.encode(text, add_special_tokens=False).ids


@contextlib.asynccontextmanager
async def neighbours():
    coordinator, scheduler, worker = FakeCoordinator(), FakeScheduler(), FakeWorker("w")
    for each in (coordinator, scheduler, worker):
        await each.start()
    coordinator.views = [worker.view]
    scheduler.decide = colocate(worker)
    try:
        yield coordinator, scheduler, worker
    finally:
        for each in (coordinator, scheduler, worker):
            await each.stop()


@contextlib.asynccontextmanager
async def process(model_dir, coordinator, scheduler, *, code="", **flags):
    """A ready gateway process and a client of it. `code`: what runs in the place of its module."""
    address = f"127.0.0.1:{free_port()}"
    words = {
        "listen": address, "model_dir": model_dir, "model_name": MODEL, "redis_url": "",
        "coordinator_url": coordinator.url, "scheduler": scheduler.server.address,
        "membership_interval_ms": 100, **patience.LIMITS_MS["gateway"], **flags,
    }  # fmt: skip
    argv = [word for key, value in words.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    child = await asyncio.create_subprocess_exec(
        sys.executable, *(("-c", code) if code else ("-m", "services.gateway")), *argv,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=f"http://{address}", trust_env=False, limits=limits, timeout=30
    ) as client:
        try:
            await ready(client, child)
            yield child, client
        finally:
            if child.returncode is None:
                child.kill()
            await child.communicate()


async def ready(client, child, seconds=60.0):
    async with asyncio.timeout(seconds):
        while True:
            assert child.returncode is None, (await child.stderr.read()).decode()
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get("/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.05)


async def streamed(client, when_begun) -> str:
    """All that comes of a streamed answer to CHAT. `when_begun`: awaited behind its first part."""
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as reply:
        async for part in reply.aiter_text():
            if not text:
                await when_begun()
            text += part
    return text


def answer_in_two(first: int, rest: list[int], may_end: asyncio.Event):
    """A worker's script: one token, and the others when they may come."""

    async def script(worker, identity, gen, prompt):
        worker.tokens(identity, gen, [first])
        await may_end.wait()
        worker.tokens(identity, gen, rest, finish="stop")
        worker.finished(identity, gen, len(prompt), tokens_computed=len(prompt))

    return script


async def children_of(pid: int, count: int, without: int = 0) -> list[int]:
    def found() -> list[int]:
        return [each for each in children_now(pid) if each != without]

    await until(lambda: len(found()) == count)
    return found()


def children_now(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
