"""Full batches over HTTP: tokens/s of so many requests at once, Quire beside plain vLLM on one host; then they change
GPUs.

    python -m loadtest.bench_full_batches [--widths 64 256] [--rounds 2] [--clients 2] [--stock-processes 2 4]
        [--device cuda] [--worker KEY=JSON] [--set KEY=VALUE] [--commit HEAD] [--out FOLDER]   -> h200-full-batches.json

Both sides have one GPU each and run at the same time, as a host's speed changes by more than what is to be seen. The
same requests to both: random prompts of 128 tokens, answers of 100 to 300 tokens, an event for each token or the whole
answer at once. Everything was asked once before it is measured. A side has --clients processes that ask: one alone is
busy at some 10,000 events/s. Plain vLLM as in stock_servers.py; Quire as `quire up --topology colocated` starts it.
Quire's gateway has two processes. Plain vLLM has rounds with two HTTP processes, as many, and rounds with four: ratios
are over the number that suits it better, for each point (`least`: of all rounds).

Beside tokens/s the CPU time of each process, in us a token: whichever comes near a core's time bounds a GPU.
--device cpu tries the script with the demo model.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from loadtest.closed_client import Ran
from loadtest.locality_cluster import Arm, LocalityCluster, Start
from loadtest.processes import family, process_cpu_us
from loadtest.progress import Progress
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, quantile, write_result
from loadtest.stock_servers import SERVED_MODEL, StockServers

NAME = "h200-full-batches"
CLAIM = (
    "With 64 and 256 requests at once Quire's gateway and worker pass on as many tokens per second as plain vLLM's "
    "server on the same host at the same time."
)
QUIRE, STOCK = "quire", "stock"
SIDES = (QUIRE, STOCK)
WAYS = ("stream", "whole")
TOKENS = {"cuda": 200, "cpu": 40}  # of an answer, mean
CLUSTER = {"cuda": ("gateway_processes=2",), "cpu": ()}
STOCK_PROCESSES = {"cuda": (2, 4), "cpu": (1,)}  # its builds for CPUs have no command for more
BASE_PORT = 9_000
ROUNDS_OF_WIDTH = 4  # requests: so many times the width
LEAD_S = 1.5  # for the clients' imports
CLIENT_TIMEOUT_S = 300.0


def metrics_from_samples(samples: Samples) -> Metrics:
    """Tokens/s and first tokens of each side, medians over rounds; ours over plain vLLM's of the same round, whose HTTP
    processes are as many as make that least.
    """
    out: Metrics = {}
    for way, width in sorted({(row["way"], row["width"]) for row in samples}):
        rows = [row for row in samples if (row["way"], row["width"]) == (way, width)]
        name, of_all = f"{way}_{width}", list[float]()
        found: list[tuple[float, Samples]] = []
        for processes in sorted({row["stock_processes"] for row in rows}):
            mine = [row for row in rows if row["stock_processes"] == processes]
            if ratios := _ratios(mine):
                out[f"{name}_over_{processes}_processes_ratio"] = statistics.median(ratios)
                found.append((statistics.median(ratios), mine))
                of_all += ratios
        if not found:
            continue
        out[f"{name}_ratio"], best = min(found, key=lambda one: one[0])
        out[f"{name}_least_ratio"] = min(of_all)
        for side in SIDES:
            out |= {f"{name}_{side}_{key}": value for key, value in _of_side(best, side).items()}
    out["failed_requests"] = float(sum(row["failed"] for row in samples))
    return out


def _ratios(rows: Samples) -> list[float]:
    """Our tokens/s over theirs, of each round that has both."""
    out = []
    for number in sorted({row["round"] for row in rows}):
        both = {row["side"]: row["tokens_per_s"] for row in rows if row["round"] == number}
        if set(both) == set(SIDES):
            out.append(both[QUIRE] / both[STOCK])
    return out


def _of_side(rows: Samples, side: str) -> Metrics:
    mine = [row for row in rows if row["side"] == side]
    firsts = [ms for row in mine for ms in row["ttft_ms"]]
    return {
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in mine),
        "cpu_us_per_token": statistics.median(sum(row["cpu_us_per_token"].values()) for row in mine),
        **({"ttft_p50_ms": quantile(firsts, 0.5)} if firsts else {}),
    }


# -- both sides ---------------------------------------------------------------------------------------------


class Sides:
    """Both servers, started at the same time. `urls`, `models`: by side."""

    def __init__(self, options: argparse.Namespace, folder: Path, number: int, stock_processes: int) -> None:
        start = Start(options.device, "vllm", options.model_dir, 0, options.set, options.worker)
        start.model(folder)  # made once, before both ask for it
        is_cuda, gpus = options.device == "cuda", ("0", "1") if number % 2 == 0 else ("1", "0")
        env = {"CUDA_VISIBLE_DEVICES": gpus[0]} if is_cuda else {}
        words = ["--topology", "colocated", "--decode", "1"]
        self._quire = LocalityCluster(
            folder / f"home-{number}", start.flags(folder, words), start.sections(), Arm("any", "cost", {}),
            env=env, base=BASE_PORT,
        )  # fmt: skip
        self._stock = StockServers(
            folder / f"round-{number}",
            start,
            1,
            gpus=gpus[1:] if is_cuda else (),
            api_processes=stock_processes,
        )
        self._stack = ExitStack()
        self._firsts: dict[str, list[int]] = {}
        self.on = dict(zip(SIDES, gpus, strict=True)) if is_cuda else dict.fromkeys(SIDES, "CPU")

    def __enter__(self) -> "Sides":
        """Plain vLLM is started from this thread: its processes end with the one that started them."""
        try:
            with ThreadPoolExecutor(1) as thread:
                ours = thread.submit(self._quire.__enter__)
                try:
                    self._stack.enter_context(self._stock)
                finally:
                    if ours.exception() is None:
                        self._stack.push(self._quire.__exit__)
            ours.result()
            self.urls = {QUIRE: self._quire.url, STOCK: self._stock.urls[0]}
            self.models = {QUIRE: self._quire.model(), STOCK: SERVED_MODEL}
            self._firsts = {QUIRE: list(self._quire.pids().values()), STOCK: [self._stock.pid(0)]}
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def cpu_us(self, side: str) -> dict[str, int]:
        """CPU time so far of its processes, by name; those of one name together."""
        out: dict[str, int] = {}
        for pid in {pid for first in self._firsts[side] for pid in family(first)}:
            name = _name_of(pid)
            out[name] = out.get(name, 0) + process_cpu_us(pid)
        return out


def _words(pid: int) -> list[str]:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it ended while we looked
        return [""]


def _name_of(pid: int) -> str:
    """Of the module that it was started with, or the title that it gave itself."""
    words = _words(pid)
    modules = [after for word, after in pairwise(words) if word == "-m"]
    return modules[0] if modules else words[0].rpartition("/")[2] or "stock server"


# -- one point ----------------------------------------------------------------------------------------------


def ask(
    options: argparse.Namespace, sides: Sides, way: str, width: int, count: int, seed: int
) -> dict[str, list[Ran]]:
    """So many requests of both sides at the same time. Raises: RuntimeError with what a client said."""
    at, parts = time.time() + LEAD_S + (0.5 if options.clients > 2 else 0.0), options.clients
    running: list[tuple[str, subprocess.Popen[str]]] = []
    for side in SIDES:
        for number in range(parts):
            words = [sys.executable, "-m", "loadtest.closed_client", sides.urls[side], sides.models[side]]
            words += ["--count", str(count // parts), "--width", str(width // parts), "--at", str(at)]
            words += ["--tokens", str(TOKENS[options.device]), "--seed", str(seed * 100 + number)]
            words += ["--stream"] if way == "stream" else []
            running.append((side, subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)))
    out: dict[str, list[Ran]] = {side: [] for side in SIDES}
    for side, process in running:
        said, _ = process.communicate(timeout=CLIENT_TIMEOUT_S)
        if not said.strip():
            raise RuntimeError(f"a client of {side} ended with {process.returncode}")
        *complaints, last = said.splitlines()
        for line in complaints:
            print(f"  {side}: {line.strip()}", flush=True)
        out[side].append(Ran(**json.loads(last)))
    return out


def measure(
    options: argparse.Namespace,
    sides: Sides,
    progress: Progress,
    number: int,
    stock_processes: int,
    way: str,
    width: int,
) -> None:
    """One point of both sides."""
    before = {side: sides.cpu_us(side) for side in SIDES}
    ran = ask(options, sides, way, width, ROUNDS_OF_WIDTH * width, 1 + number)
    for side in SIDES:
        parts, after = ran[side], sides.cpu_us(side)
        tokens = sum(part.tokens for part in parts)
        took_s = max(part.end_s for part in parts) - min(part.begin_s for part in parts)
        spent = {name: after[name] - before[side].get(name, 0) for name in after}
        progress.add({
            "round": number, "side": side, "on": sides.on[side], "way": way, "width": width,
            "requests": sum(part.requests for part in parts), "failed": sum(part.failed for part in parts),
            "tokens": tokens, "events": sum(part.num_events for part in parts),
            "seconds": round(took_s, 3), "tokens_per_s": round(tokens / took_s, 1),
            "stock_processes": stock_processes, "cached_tokens": sum(part.cached_tokens for part in parts),
            "cpu_us_per_token": {name: round(us / max(1, tokens), 2) for name, us in spent.items() if us * 1e-6 > 0.05},
            "client_busy_ratio": round(max(part.cpu_s for part in parts) / took_s, 3),
            "ttft_ms": [ms for part in parts for ms in part.ttft_ms],
        })  # fmt: skip


def said(row: Mapping[str, Any]) -> str:
    """A line of a sample."""
    spent = sorted(row["cpu_us_per_token"].items(), key=lambda one: -one[1])
    more = [
        f"{row['seconds']:.1f} s",
        f"{row['failed']} failed",
        f"clients busy {row['client_busy_ratio']:.0%}",
    ]
    if row["ttft_ms"]:
        more.append(f"first tokens {quantile(row['ttft_ms'], 0.5):.0f} ms")
    return (
        f"round {row['round']}, {row['way']} {row['width']}, {row['side']} on {row['on']}"
        + (f" ({row['stock_processes']} HTTP processes): " if row["side"] == STOCK else ": ")
        + f"{row['tokens_per_s']:.0f} tokens/s ({', '.join(more)}); CPU us a token: "
        + ", ".join(f"{name} {us:.1f}" for name, us in spent)
    )


def measure_round(
    options: argparse.Namespace, folder: Path, progress: Progress, number: int, stock_processes: int
) -> None:
    """Start both, ask everything once, then every point."""
    begin_s = time.monotonic()
    with Sides(options, folder, number, stock_processes) as sides:
        for width in options.widths:
            ask(options, sides, "stream", width, width, 0)
        print(f"round {number}: ready and warm after {time.monotonic() - begin_s:.0f} s", flush=True)
        for way in options.ways:
            for width in options.widths:
                print(f"round {number}: {way} {width}", flush=True)
                measure(options, sides, progress, number, stock_processes, way, width)


# -- the command --------------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256], help="requests at once")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--rounds", type=int, default=2, help="of each number of plain vLLM's processes")
    parser.add_argument("--stock-processes", type=int, nargs="+", default=[], help="plain vLLM's, for HTTP")
    parser.add_argument("--clients", type=int, default=2, help="processes that ask, of each side")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument(
        "--model-dir", default="", help="default: 8B shape, random weights; on CPU the demo model"
    )
    parser.add_argument("--set", action="append", default=[], help="cluster setting, KEY=VALUE")
    parser.add_argument("--worker", action="append", default=[], help="worker setting, KEY=JSON")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    options.set = [*CLUSTER[options.device], *options.set]
    options.stock_processes = options.stock_processes or list(STOCK_PROCESSES[options.device])
    return options


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file; exit status 1 when a request failed."""
    options, progress = parse(argv), Progress(None, said)
    with tempfile.TemporaryDirectory(prefix="quire-full-") as folder:
        for number, stock_processes in enumerate(
            count for count in options.stock_processes for _ in range(options.rounds)
        ):
            measure_round(options, Path(folder), progress, number, stock_processes)
    samples = progress.samples
    metrics = metrics_from_samples(samples)
    for key, value in metrics.items():
        print(f"{key:45} {value:10.3f}")
    settings = {
        "device": options.device, "widths": options.widths, "clients": options.clients, "cluster": options.set,
        "stock_processes": options.stock_processes,
        "worker": options.worker, "answer_tokens": TOKENS[options.device],
        "model": options.model_dir or ("8B shape" if options.device == "cuda" else "quire-demo"),
    }  # fmt: skip
    path = write_result(
        NAME, claim=CLAIM, command="python -m loadtest.bench_full_batches " + " ".join(argv), settings=settings,
        metrics=metrics, samples=samples, folder=options.out, commit=options.commit,
    )  # fmt: skip
    print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return 1 if metrics["failed_requests"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
