"""What the gateway costs: CPU per request and per streamed chunk, added TTFT; beside vllm-router and LiteLLM.

    python -m loadtest.bench_gateway [--quick] [--only quire] [--processes N] [--out FOLDER] [--commit HEAD]

It writes gateway-cpu.json. The gateway has as many processes as it takes by itself on this machine, or --processes.

- CPU per request: closed loop, non-streaming chat requests with a 200-byte message, two output tokens,
  tokenizing and the chat template included; CPU time of the proxy's processes from /proc/<pid>/stat. Quire
  serves each in two stages (prefill and decode worker); the peers forward it.
- CPU per chunk: 64 streams, a token every 50 ms for each, one event and one write per token; only the time in
  which all 64 stream. Quire detokenizes; the peers pass bytes on.
- Added TTFT: open loop (Poisson) at half of the rate that a closed loop of the same streamed requests reaches on
  this machine; peers get that rate too, or half of their own where that is less. The engines behind answer
  at once, so the whole TTFT counts as added; `direct` is the same load without a proxy. `added_ttft_*` is with one
  engine stage behind the gateway, as behind the peers (prompt tree and scheduler included);
  `disaggregated_added_ttft_*` with two stages and the handoff between them.
- Tokenizing apart: the tokenizers library alone on the same prompts.
All processes, the client included, share this machine's cores. Tracing is off.
"""

import argparse
import asyncio
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loadtest import systems
from loadtest.http_client import Client
from loadtest.load import chat, closed_loop, message, open_loop, paced_streams
from loadtest.processes import Fleet, StartFailed
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, quantile, write_result
from loadtest.systems import System, Unavailable
from services.gateway.config import useful_processes
from shared.cpus import usable_cpus

NAME = "gateway-cpu"
CLAIM = (
    "The gateway costs at most 600 us of CPU per request (goal 300), tokenizing included, and at most 40 us "
    "per paced SSE chunk (goal 20), detokenizing included; p99 added TTFT at half load is at most 5 ms."
)
MESSAGE_BYTES = 200
LONG_MESSAGE_BYTES = 16 << 10
CONCURRENCY = 16
NUM_STREAMS = 64
STEP_MS = 50.0
WARM_REQUESTS = 200
PEAK_REQUESTS = 2_000
DEFAULT_RATE_PER_S = 200.0  # of the TTFT series of peers when Quire is not measured with them


# -- from samples to metrics (pure; verify_results.py calls this again) ------------------------------


def metrics_from_samples(samples: Samples) -> Metrics:
    """Medians over repetitions; quantiles over all requests of a series. Quire's own keys have no prefix."""
    out: Metrics = {}
    for system in ("quire", "quire_one_stage", "vllm_router", "litellm", "direct"):
        prefix = "" if system == "quire" else f"{system}_"
        # the two arrangements of Quire: see the module's docstring
        waiting = {"quire": "disaggregated_", "quire_one_stage": ""}.get(system, prefix)
        mine = [sample for sample in samples if sample["system"] == system]
        for series, key in (
            ("closed_loop", "cpu_us_per_request"),
            ("closed_loop_16kb", "cpu_16kb_us_per_request"),
            ("streams", "cpu_us_per_chunk"),
        ):
            runs = [s["cpu_us"] / s["count"] for s in mine if s["series"] == series and "cpu_us" in s]
            if runs:
                out[prefix + key] = quantile(runs, 0.5)
        rates = [s["count"] / s["wall_s"] for s in mine if s["series"] == "closed_loop"]
        if rates:
            out[f"{prefix}closed_loop_requests_per_s"] = quantile(rates, 0.5)
        for sample in mine:
            if sample["series"] == "ttft" and sample["ttft_ms"]:
                out[f"{waiting}added_ttft_p50_ms"] = quantile(sample["ttft_ms"], 0.5)
                out[f"{waiting}added_ttft_p99_ms"] = quantile(sample["ttft_ms"], 0.99)
            elif sample["series"].startswith("tokenize"):
                out[f"{sample['series']}_us_per_request"] = sample["cpu_us"] / sample["count"]
        if mine:
            out[f"{prefix}failed_requests"] = float(sum(sample.get("failed", 0) for sample in mine))
    if "cpu_us_per_request" in out and "tokenize_us_per_request" in out:
        apart = out["cpu_us_per_request"] - out["tokenize_us_per_request"]
        out["cpu_without_tokenizing_us_per_request"] = apart
    return out


# -- series -------------------------------------------------------------------------------------------


class Bench:
    """Collects samples of one run. `scale` shortens everything for a quick look."""

    def __init__(self, fleet: Fleet, scale: float, seed: int) -> None:
        self.fleet = fleet
        self.scale = scale
        self.rng = random.Random(seed)
        self.samples: list[dict[str, Any]] = []

    def add(self, system: System, series: str, **values: Any) -> None:
        self.samples.append({"system": system.name, "series": series, **values})
        shown = {key: value for key, value in values.items() if not isinstance(value, list)}
        print(f"  {system.name:12} {series:18} {shown}", flush=True)

    def cpu(self, system: System) -> int:
        return self.fleet.cpu_us(system.process) if system.process else 0

    def requests(
        self, system: System, client: Client, count: int, num_bytes: int, **more: Any
    ) -> list[bytes]:
        return [chat(system, client, message(self.rng, num_bytes), **more) for _ in range(count)]

    async def requests_closed(
        self, system: System, *, count: int, runs: int, num_bytes: int, series: str
    ) -> None:
        """CPU per whole request."""
        client = Client(system.base_url, bearer=system.bearer)
        count = max(50, int(count * self.scale))
        warm = self.requests(system, client, min(count, WARM_REQUESTS), num_bytes, max_tokens=2, stream=False)
        await closed_loop(client, warm, CONCURRENCY)
        for _ in range(runs):
            requests = self.requests(system, client, count, num_bytes, max_tokens=2, stream=False)
            before = self.cpu(system)
            wall_s, failed = await closed_loop(client, requests, CONCURRENCY)
            used = {"cpu_us": self.cpu(system) - before} if system.process else {}
            self.add(system, series, count=count, wall_s=round(wall_s, 4), failed=failed, **used)
        client.close()

    async def streams(self, system: System, *, seconds: float) -> None:
        """CPU per chunk."""
        client = Client(system.base_url, bearer=system.bearer)
        seconds = max(2.0, seconds * self.scale)
        max_tokens = int((seconds + 6) * 1000 / STEP_MS)
        requests = self.requests(
            system, client, NUM_STREAMS, MESSAGE_BYTES, max_tokens=max_tokens, stream=True
        )
        self.add(
            system, "streams", **await paced_streams(client, requests, seconds, lambda: self.cpu(system))
        )
        client.close()

    async def streamed_rate(self, system: System, client: Client) -> float:
        """Requests per second that a closed loop of streamed requests reaches."""
        count = max(100, int(PEAK_REQUESTS * self.scale))
        peak = self.requests(system, client, count, MESSAGE_BYTES, max_tokens=2, stream=True)
        wall_s, failed = await closed_loop(client, peak, CONCURRENCY)
        self.add(system, "closed_loop_streamed", count=count, wall_s=round(wall_s, 4), failed=failed)
        return count / wall_s

    async def ttft(
        self, system: System, *, rate_per_s: float, seconds: float, find_peak: bool = False
    ) -> None:
        """Added TTFT under open load."""
        client = Client(system.base_url, bearer=system.bearer)
        warm = self.requests(system, client, WARM_REQUESTS, MESSAGE_BYTES, max_tokens=2, stream=True)
        await closed_loop(client, warm, CONCURRENCY)
        if find_peak:
            rate_per_s = min(rate_per_s, await self.streamed_rate(system, client) / 2)
        count = max(100, int(rate_per_s * seconds * self.scale))
        requests = self.requests(system, client, count, MESSAGE_BYTES, max_tokens=2, stream=True)
        ttft_ms, failed = await open_loop(client, requests, rate_per_s, self.rng)
        rate = round(rate_per_s, 1)
        self.add(system, "ttft", rate_per_s=rate, count=count, failed=failed, ttft_ms=ttft_ms)
        client.close()

    def closed_rate(self, system: System) -> float:
        return quantile(
            [
                sample["count"] / sample["wall_s"]
                for sample in self.samples
                if (sample["system"], sample["series"]) == (system.name, "closed_loop")
            ],
            0.5,
        )

    def tokenizing(self, system: System, model_dir: Path) -> None:
        """The tokenizers library alone, in this process."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        for series, num_bytes, count in (
            ("tokenize", MESSAGE_BYTES, 2_000),
            ("tokenize_16kb", LONG_MESSAGE_BYTES, 100),
        ):
            texts = [message(self.rng, num_bytes) for _ in range(count)]
            begin = time.process_time()
            num_tokens = sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
            used = int((time.process_time() - begin) * 1e6)
            self.add(system, series, count=count, cpu_us=used, num_tokens=num_tokens)


async def measure_proxy(
    bench: Bench, fast: System, paced: System, *, weight: float, rate_per_s: float
) -> None:
    """All series of one system. `fast` answers at once, `paced` streams with STEP_MS between tokens."""
    await bench.requests_closed(
        fast, count=int(3_000 * weight), runs=3, num_bytes=MESSAGE_BYTES, series="closed_loop"
    )
    await bench.requests_closed(
        fast, count=int(500 * weight), runs=1, num_bytes=LONG_MESSAGE_BYTES, series="closed_loop_16kb"
    )
    rate = min(bench.closed_rate(fast) / 2, rate_per_s)
    await bench.ttft(fast, rate_per_s=rate, seconds=15, find_peak=fast.name == "quire")
    await bench.streams(paced, seconds=15)


async def run(options: argparse.Namespace, work_dir: Path) -> Bench:
    """Measure everything that was asked for; a peer that cannot run is named and left out."""
    model_dir = Path(options.model_dir)
    only = set(options.only.split(",")) if options.only else {"quire", "direct", "vllm_router", "litellm"}
    with Fleet(work_dir) as fleet:
        bench = Bench(fleet, 0.1 if options.quick else 1.0, options.seed)
        rate = DEFAULT_RATE_PER_S
        if "quire" in only:
            flags = ["--processes", str(options.processes)]
            fast = systems.start_quire(fleet, model_dir, prefix="fast-", step_ms=0, gateway_flags=flags)
            bench.tokenizing(fast, model_dir)
            paced = systems.start_quire(
                fleet, model_dir, prefix="paced-", step_ms=STEP_MS, gateway_flags=flags
            )
            await measure_proxy(bench, fast, paced, weight=1.0, rate_per_s=float("inf"))
            for name in ("gateway", "decode", "prefill", "scheduler", "coordinator", "redis"):
                fleet.stop(f"fast-{name}")
                fleet.stop(f"paced-{name}")
            solo = systems.start_quire(
                fleet, model_dir, prefix="solo-", step_ms=0, gateway_flags=flags, one_stage=True
            )
            await bench.requests_closed(
                solo, count=3_000, runs=3, num_bytes=MESSAGE_BYTES, series="closed_loop"
            )
            await bench.ttft(solo, rate_per_s=bench.closed_rate(solo) / 2, seconds=15, find_peak=True)
            rate = next(
                s["rate_per_s"] for s in bench.samples if (s["system"], s["series"]) == (solo.name, "ttft")
            )
            for name in ("gateway", "decode", "scheduler", "coordinator", "redis"):
                fleet.stop(f"solo-{name}")
        upstream = systems.start_upstream(fleet, name="upstream", step_ms=STEP_MS)
        if "direct" in only:
            await bench.ttft(upstream, rate_per_s=rate, seconds=15)
        if "vllm_router" in only:
            await _peer(bench, lambda: systems.start_vllm_router(fleet, upstream, name="router"), 8.0, rate)
        if "litellm" in only:
            await _peer(
                bench, lambda: systems.start_litellm(fleet, upstream, work_dir, name="litellm"), 0.1, rate
            )
    return bench


async def _peer(bench: Bench, start: Callable[[], System], weight: float, rate_per_s: float) -> None:
    try:
        system = await asyncio.to_thread(start)
    except (Unavailable, StartFailed) as error:
        print(f"  skipped: {error}", flush=True)
        return
    await measure_proxy(bench, system, system, weight=weight, rate_per_s=rate_per_s)
    bench.fleet.stop(system.process)


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file; exit status 1 when a request failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-dir", default=str(ROOT / "deploy" / "models" / "quire-demo"))
    parser.add_argument("--only", default="", help="comma-separated: quire, direct, vllm_router, litellm")
    parser.add_argument("--quick", action="store_true", help="a tenth of the load; writes no result file")
    parser.add_argument("--processes", type=int, default=0, help="of the gateway; 0: as it decides by itself")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--commit", default="", help="of this copy, where there is no repository")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        bench = asyncio.run(run(options, Path(folder)))
    metrics = metrics_from_samples(bench.samples)
    for key in sorted(metrics):
        print(f"{key:42} {metrics[key]:12.2f}")
    if not options.quick and not options.only:
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_gateway", *argv]),
            settings={
                "message_bytes": MESSAGE_BYTES,
                "long_message_bytes": LONG_MESSAGE_BYTES,
                "concurrency": CONCURRENCY,
                "num_streams": NUM_STREAMS,
                "step_ms": STEP_MS,
                "seed": options.seed,
                "gateway_processes": options.processes or useful_processes(usable_cpus()),
                "usable_cpus": usable_cpus(),
                "topology": "1 prefill and 1 decode worker with mock engines, Redis, scheduler, coordinator",
                "versions": systems.versions(),
            },
            metrics=metrics,
            samples=bench.samples,
            folder=Path(options.out),
            commit=options.commit,
        )
        print(f"wrote {path}")
    return 1 if metrics.get("failed_requests") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
