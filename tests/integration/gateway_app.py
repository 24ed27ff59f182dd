"""A real gateway application on a free port, in the test's loop, with scripted neighbours."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from services.gateway.config import GatewaySettings
from services.gateway.deps import Gateway
from services.gateway.server import make_server
from tests.integration.gateway_rig import (
    MODEL,
    FakeCoordinator,
    FakeScheduler,
    FakeWorker,
    answer_tokens,
    colocate,
    free_listener,
    until,
)
from tests.support import patience


@dataclass
class Rig:
    """Everything around one gateway."""

    gateway: Gateway
    base_url: str
    coordinator: FakeCoordinator
    scheduler: FakeScheduler
    workers: list[FakeWorker]
    client: httpx.AsyncClient
    extra: dict = field(default_factory=dict)

    @property
    def a(self) -> FakeWorker:
        return self.workers[0]

    @property
    def b(self) -> FakeWorker:
        return self.workers[1]

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return self.gateway.text.tokenizer.encode(text, add_special_tokens=False).ids

    def say(self, text: str, **options) -> None:
        """Both workers answer every request with this text."""
        for worker in self.workers:
            worker.script = answer_tokens(self.ids(text), **options)


@asynccontextmanager
async def running(model_dir: Path, **changes):
    """A ready Rig; requests are colocated on the first worker unless the scheduler is told otherwise."""
    coordinator, scheduler = FakeCoordinator(), FakeScheduler()
    workers = [FakeWorker("w-a", "prefill"), FakeWorker("w-b", "decode")]
    await coordinator.start()
    await scheduler.start()
    for worker in workers:
        await worker.start()
    coordinator.views = [worker.view for worker in workers]
    scheduler.decide = colocate(*workers)
    settings = GatewaySettings(
        **{
            "model_dir": str(model_dir), "model_name": MODEL, "redis_url": "",
            "coordinator_url": coordinator.url, "scheduler": scheduler.server.address,
            "membership_interval_ms": 100, "resume_deadline_ms": 60_000, **patience.LIMITS_MS["gateway"], **changes,
        }
    )  # fmt: skip
    gateway = Gateway(settings)
    server = make_server(gateway)
    listener = free_listener()
    await gateway.start()
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started and gateway.readiness()[0] and len(gateway.cluster.workers_up) == 2)
    base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=base_url, timeout=30.0, trust_env=False) as client:
        yield Rig(gateway, base_url, coordinator, scheduler, workers, client)
    server.should_exit = True
    await task
    await gateway.stop()
    for each in (scheduler, coordinator, *workers):
        await each.stop()
