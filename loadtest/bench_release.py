"""How fast a mempool's memory is the system's again under pressure, and what engines that map it feel, on one GPU.

    python -m loadtest.bench_release [--quick] [--out FOLDER] [--commit HEAD]   writes results/h200-release.json

8B shape, random weights; mempool and keeper as processes, one vLLM engine in the pool's pages with graphs
(release_engine.py), a fourth process that watches the GPU's free memory (cuMemGetInfo) as anybody may. The pool is
filled with prompts; while requests decode, a client presses for 32 GiB.
`release_gib_per_s`: from the call to the moment at which the watcher sees 99% of what was released, eviction and every
unmap included. `release_step_p99_ratio`: p99 of the engine core's steps from the call to that moment, all rounds
together, over p99 of the steps at the same progress of rounds without a press (contexts grow, and steps with them);
`..._after_...`: of the half second behind it; `..._before_...`: of the second before the call, where nothing differs:
what the comparison cannot see.
"""

import argparse
import json
import os
import select
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from loadtest import release_engine
from loadtest.bench_pages import LLAMA_8B, model_folder
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, quantile, write_result

NAME = "h200-release"
CLAIM = (
    "Under a pressure call the pool's memory is the system's again at 40 GiB/s or more, as another process sees it, "
    "while an engine that maps it decodes with a p99 step of at most 1.02 of the one without it."
)
WATCH_EVERY_S = 0.0002
SEEN_SHARE = 0.99
GIB = 1 << 30


def metrics_from_samples(samples: Samples) -> Metrics:
    """See the module. Rates are medians over rounds, steps of all rounds are taken together."""
    pressed = [s for s in samples if s["is_pressed"]]
    rates = [_rate(s, "released_bytes", "pressed_s", "seen_s") for s in pressed]
    out: Metrics = {
        "release_gib_per_s": quantile(rates, 0.5),
        "release_slowest_gib_per_s": min(rates),
        "release_first_byte_ms": quantile([(s["first_s"] - s["pressed_s"]) * 1e3 for s in pressed], 0.5),
        "release_answer_ms": quantile([(s["answered_s"] - s["pressed_s"]) * 1e3 for s in pressed], 0.5),
        "released_gib": quantile([s["released_bytes"] / GIB for s in pressed], 0.5),
        "regain_gib_per_s": quantile(
            [_rate(s, "regained_bytes", "regain_s", "regained_s") for s in pressed], 0.5
        ),
    }
    for name, key in (
        ("before", "release_before"), ("during", "release"), ("after", "release_after"), ("regain", "regain"),
    ):  # fmt: skip
        both = {
            "pressed": [step for s in pressed for step in s[f"steps_{name}_ms"]],
            "calm": [step for s in samples if not s["is_pressed"] for step in s[f"steps_{name}_ms"]],
        }
        for kind, steps in both.items():
            out[f"{kind}_{name}_steps_count"] = len(steps)
            if steps:
                out[f"{kind}_{name}_step_p50_ms"] = quantile(steps, 0.5)
                out[f"{kind}_{name}_step_p99_ms"] = quantile(steps, 0.99)
                out[f"{kind}_{name}_step_mean_ms"] = fmean(steps)
        if all(both.values()):
            for what in ("p50", "p99", "mean"):
                ratio = out[f"pressed_{name}_step_{what}_ms"] / out[f"calm_{name}_step_{what}_ms"]
                out[f"{key}_step_{what}_ratio"] = ratio
    return out


def _rate(sample: Any, num_bytes: str, begin: str, end: str) -> float:
    return sample[num_bytes] / GIB / max(1e-9, sample[end] - sample[begin])


def watch(device: str, path: Path) -> int:
    """In a process of its own, until its standard input ends: "moment_s free_bytes" whenever that changes."""
    if device == "cpu":

        def free() -> int:
            lines = Path("/proc/meminfo").read_text().splitlines()
            return -(int(next(line.split()[1] for line in lines if line.startswith("Shmem:"))) << 10)
    else:
        from shared.vmm.cuda_driver import CudaVmmDriver

        driver = CudaVmmDriver(0)

        def free() -> int:
            return driver.memory_info()[0]

    last = 0
    with path.open("w", buffering=1) as file:
        while not select.select([0], [], [], 0)[0] or os.read(0, 1):
            now = free()
            if now != last:
                file.write(f"{time.perf_counter():.6f} {now}\n")
                last = now
            time.sleep(WATCH_EVERY_S)
    return 0


def add_seen(lines: Sequence[str], samples: list[dict[str, Any]]) -> None:
    """When the watcher saw the first and the last of what was released, and a thinned course of it."""
    course = [(float(at), int(free)) for at, free in (line.split() for line in lines)]
    for sample in [s for s in samples if s["is_pressed"]]:
        base = [free for at, free in course if at <= sample["pressed_s"]][-1]
        later = [(at, free - base) for at, free in course if sample["pressed_s"] < at <= sample["regain_s"]]
        wanted = SEEN_SHARE * sample["released_bytes"]
        sample["first_s"] = next((at for at, more in later if more > 0), sample["regain_s"])
        sample["seen_s"] = next((at for at, more in later if more >= wanted), sample["regain_s"])
        stride = max(1, len(later) // 100)
        sample["seen"] = [[round((at - sample["pressed_s"]) * 1e3, 3), more] for at, more in later[::stride]]


@contextmanager
def process(words: Sequence[str], log: Path, until: Path, timeout_s: float = 30) -> Iterator[None]:
    """A process of ours, ready when `until` exists; ended behind the block."""
    with log.open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", *words], stdin=subprocess.PIPE, stdout=out, stderr=out, cwd=ROOT
        )
    try:
        deadline = time.monotonic() + timeout_s
        while not until.exists():
            if time.monotonic() > deadline or child.poll() is not None:
                raise RuntimeError(f"{words[0]} did not start: {log.read_text()[-2_000:]}")
            time.sleep(0.02)
        yield
    finally:
        assert child.stdin is not None
        child.stdin.close()
        if words[0] != "loadtest.bench_release":
            child.terminate()
        child.wait(20)


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Samples of all rounds of one engine. Raises: CalledProcessError, RuntimeError."""
    model = Path(options.model_dir) if options.model_dir else model_folder(folder / "llama-8b-shape")
    keeper, pool, seen = folder / "keeper.sock", folder / "pool.sock", folder / "seen"
    out = folder / "engine.json"
    mempool = ["services.mempool", "--socket", str(pool), "--admin-listen", "127.0.0.1:0"]
    mempool += ["--keeper-socket", str(keeper), *shlex.split(options.mempool_flags)]
    engine = [str(model), str(out), "--mempool-socket", str(pool), "--device", options.device]
    engine += ["--rounds", str(options.rounds), *shlex.split(options.engine_flags)]
    with (
        process(["services.mempool.keeper", "--socket", str(keeper)], folder / "keeper.log", keeper),
        process(mempool, folder / "mempool.log", pool),
        process(["loadtest.bench_release", "--watch", options.device, str(seen)], folder / "watch.log", seen),
    ):
        begin = time.monotonic()
        try:
            subprocess.run(
                [sys.executable, "-m", "loadtest.release_engine", *engine],
                cwd=ROOT, check=True, timeout=options.engine_timeout_s,
            )  # fmt: skip
        finally:
            print((folder / "mempool.log").read_text()[-1_500:], flush=True)
        print(f"engine: {time.monotonic() - begin:.0f} s", flush=True)
    found = json.loads(out.read_text())
    add_seen(seen.read_text().splitlines(), found["samples"])
    release_engine.add_steps(out.with_suffix(".steps"), found["samples"], found["requests"])
    return found["samples"]


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file."""
    if argv and argv[0] == "--watch":
        return watch(argv[1], Path(argv[2]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round; writes no result file")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model-dir", default="")
    parser.add_argument("--engine-flags", default="", help="for release_engine, e.g. '--requests 64'")
    parser.add_argument("--mempool-flags", default="")
    parser.add_argument("--engine-timeout-s", type=float, default=300)
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds = 1
    with tempfile.TemporaryDirectory(prefix="quire-release-") as name:
        samples = measure(options, Path(name))
    metrics = metrics_from_samples(samples)
    if not options.quick:
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_release", *argv]),
            settings={"rounds": options.rounds, "engine_flags": options.engine_flags, "model": LLAMA_8B},
            metrics=metrics,
            samples=samples,
            folder=Path(options.out),
            commit=options.commit,
        )
        print(f"wrote {path.name}")
    for key in sorted(metrics):
        print(f"{key:34} {metrics[key]:14.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
