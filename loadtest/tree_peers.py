"""Other routers that look for cached prefixes, and what they add to a request on its way to an engine."""

import asyncio
import gc
import importlib.metadata
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from loadtest.http_client import Client
from loadtest.load import WORDS
from loadtest.processes import Fleet, free_port
from loadtest.registry import ROOT
from loadtest.systems import System, Unavailable

PEERS = ROOT / ".quire" / "bench" / "peers"  # a folder for each: see bench_prompt_tree.py
NUM_ENGINES = 8
CONCURRENCY = 16
PROMPT_BYTES = 16 << 10  # about 4,096 tokens of English: 256 blocks of 16
QUESTION_BYTES = 384  # about 6 blocks
ROUTERS = ("vllm_router", "sglang_router", "smg")
POLICIES = ("round_robin", "cache_aware")


def start_engines(fleet: Fleet) -> list[str]:
    """URLs of NUM_ENGINES engines that answer at once."""
    ports = [free_port() for _ in range(NUM_ENGINES)]
    command = [sys.executable, "-m", "loadtest.trivial_upstream", "--ports", ",".join(map(str, ports))]
    fleet.start("engines", command, ready_url=f"http://127.0.0.1:{ports[-1]}/health")
    return [f"http://127.0.0.1:{port}" for port in ports]


def start_router(fleet: Fleet, kind: str, policy: str, engines: Sequence[str]) -> System:
    """Its defaults, apart from the policy. Raises: Unavailable, StartFailed."""
    port, metrics_port = free_port(), free_port()
    env: dict[str, str] = {}
    if kind == "vllm_router":
        program = Path(sys.executable).with_name("vllm-router")
        command = [str(program)]
        if not program.exists():
            raise Unavailable("vllm-router is not installed (extra `loadtest`)")
    else:
        folder = PEERS / kind
        if not folder.exists():
            raise Unavailable(f"{kind} is not in {folder.relative_to(ROOT)}")
        env["PYTHONPATH"] = str(folder)
        words = ["sglang_router.launch_router"] if kind == "sglang_router" else ["smg", "launch"]
        command = [sys.executable, "-m", *words]
    command += [
        *("--host", "127.0.0.1", "--port", str(port), "--policy", policy, "--log-level", "error"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--worker-urls", *engines),
    ]
    name = f"{kind}-{policy}"
    fleet.start(name, command, ready_url=f"http://127.0.0.1:{port}/health", env=env, timeout_s=90)
    return System(kind, f"http://127.0.0.1:{port}", "mock", name)


def versions() -> dict[str, str]:
    """Of the routers that are here."""
    out = {}
    for kind in ROUTERS:
        package, folders = kind.replace("_", "-"), [str(PEERS / kind)]
        for found in importlib.metadata.distributions(
            name=package, path=folders if kind != "vllm_router" else sys.path
        ):
            out[kind] = found.version
    return out


def requests_about_documents(client: Client, rng: random.Random, num_docs: int, count: int) -> list[bytes]:
    """Completions: one of the documents, then a question of its own."""

    def text(size: int) -> str:
        words = []
        while size > 0:
            words.append(rng.choice(WORDS))
            size -= len(words[-1]) + 1
        return " ".join(words)

    docs = [text(PROMPT_BYTES - QUESTION_BYTES) for _ in range(num_docs)]
    return [
        client.request_bytes(
            "/v1/completions",
            {
                "model": "mock",
                "prompt": f"{rng.choice(docs)} {text(QUESTION_BYTES)}",
                "max_tokens": 1,
                "temperature": 0,
            },
        )
        for _ in range(count)
    ]


async def closed_rate(
    system: System, rng: random.Random, num_docs: int, *, seconds: float
) -> tuple[float, int]:
    """Requests per second with CONCURRENCY users that never wait, and failures."""
    client = Client(system.base_url)
    requests = requests_about_documents(client, rng, num_docs, 2_000)
    end = time.perf_counter() + seconds
    count = failed = 0

    async def user() -> None:
        nonlocal count, failed
        while time.perf_counter() < end:
            count += 1
            is_ok = await _timed(client, requests[count % len(requests)]) is not None
            failed += not is_ok

    begin = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(CONCURRENCY)))
    client.close()
    return count / (time.perf_counter() - begin), failed


async def through(
    system: System | Sequence[str], rng: random.Random, num_docs: int, *, rate_per_s: float, seconds: float
) -> tuple[list[float], int]:
    """Open-loop Poisson load: (whole time of each request in ms, failures). A list of URLs: directly, in turn."""
    urls = [system.base_url] if isinstance(system, System) else list(system)
    clients = [Client(url) for url in urls]
    requests = requests_about_documents(clients[0], rng, num_docs, 2_000)
    for request in requests[:200]:  # to warm up
        for client in clients[:1]:
            await client.post(request)
    loop = asyncio.get_running_loop()
    tasks = []
    gc.collect()
    gc.disable()
    try:
        due = loop.time()
        for number in range(int(rate_per_s * seconds)):
            due += rng.expovariate(rate_per_s)
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            client = clients[number % len(clients)]
            tasks.append(asyncio.create_task(_timed(client, requests[number % len(requests)])))
        times = await asyncio.gather(*tasks)
    finally:
        gc.enable()
    for client in clients:
        client.close()
    good = [time_ms for time_ms in times if time_ms is not None]
    return good, len(times) - len(good)


async def _timed(client: Client, request: bytes) -> float | None:
    begin = time.perf_counter()
    try:
        reply = await client.post(request)
    except (OSError, TimeoutError) as error:
        client.complain(repr(error))
        return None
    if not reply.ok:
        client.complain(f"status {reply.status}: {reply.body[-300:]!r}")
        return None
    return round((time.perf_counter() - begin) * 1e3, 3)
