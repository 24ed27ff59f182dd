"""What lending costs the producer while a consumer uses the lent memory with full traffic (AQUA Figures 10, 11).

    make measure NAME=h200x2-producer-cost ARGS="--producer engine --keep cost.jsonl"     a piece; also diffusion, audio
    python -m loadtest.bench_producer_cost --producer diffusion --device cpu --quick      small, writes no result file

A coordinator, a mempool, a producer on GPU 1 and a consumer on GPU 0 (producers/), all real processes. In rounds, with
and without lending taken in turn: `off`: nothing is lent; `on`: pages are lent, borrowed through the market, and
batches go out and come back through the mempool without pause, every byte compared at the end; then all is taken back.
`full`: the budget is off; else the mempool holds copies to --budget-gb-per-s of each lender. Producers: a vLLM engine
of 8B shape with random weights, which lends pages of its KV pool under a closed loop of requests; SD-XL's UNet; an
audio transformer; `tp4`: an engine of 70B shape on four GPUs, needs five.
`throughput_ratio`: the worst of the producers', median over rounds of on over off, with the budget (of one that was
measured without it alone, without). The models' throughput and memory by batch are AQUA's Figure 3.
Behind the engine's last round, must-show 3: it takes 8 GiB back that hold a consumer's bytes, under load.
`reclaim_ms`: from the call to the moment at which no page is lent any more, all of them in the engine's stock again;
the bound is bytes over the rate of the same copies alone (lent pages to host memory, as many at once), and a step.
--keep FILE has what is finished: pieces may be different calls, and one that broke off goes on there. The result file
is written by the call after which the engine is measured in both modes, the others in one.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtest import producer_cost
from loadtest.bench_pages import LLAMA_8B, model_folder
from loadtest.child_commands import Child
from loadtest.lending_rig import Rig, RigSettings, child, running
from loadtest.producer_cost import MAIN, MODES
from loadtest.progress import Progress
from loadtest.registry import RESULTS, ROOT
from loadtest.results import write_result

NAME = "h200x2-producer-cost"
CLAIM = (
    "Lending GPU memory to a consumer that moves blocks there and back as fast as its lender's budget allows costs the "
    "lender at most 5% of its throughput, whether it is an LLM, a diffusion or an audio model; 8 GiB are back under "
    "load within their bytes over the copies' rate, and one step."
)
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
}  # fmt: skip
GIB, MIB = 1 << 30, 1 << 20
SETTLE_S = 0.3  # of traffic, before a window begins
CEILING_S = 1.0
SWEEP_STEPS = 2
MAX_COPIES, STEADY = 12, 1.1  # before a rate is believed
STEP_S = 1.0  # of load, in which a step is measured

metrics_from_samples = producer_cost.metrics_from_samples


@dataclass(frozen=True, slots=True)
class Plan:
    """One producer on one device. `batch_pages`: of a copy; `words`: its process, without sockets."""

    words: tuple[str, ...]
    lend_bytes: int
    page_bytes: int
    batch_pages: int
    window_s: float
    rounds: int
    gpus: tuple[int, ...] = ()
    reclaims: int = 0
    sweep: tuple[int, ...] = ()  # batches, in SWEEP_STEPS of its items
    dram_bytes: int = 0
    capacity_bytes: int = 0


def plan_of(producer: str, device: str, *, quick: bool) -> Plan:
    """What is measured. Quick: one short round of each mode."""
    if device == "cuda":
        gpu = Plan((), 8 * GIB, 8 * MIB, 64, 2.5, 3, (1,), dram_bytes=9 * GIB)
        engine = ("loadtest.producers.lending_engine", "{model}", "--device", "cuda")
        model = ("loadtest.producers.lending_model", "--device", "cuda")
        made = {
            "engine": replace(gpu, words=engine, reclaims=3),
            "diffusion": replace(
                gpu, words=(*model, "--model", "sdxl", "--batch", "2", "--steps", "5"), sweep=(1, 2, 4, 8, 16)
            ),
            "audio": replace(
                gpu,
                words=(*model, "--model", "audiogen", "--batch", "16", "--steps", "50"),
                sweep=(1, 4, 16, 64, 128),
            ),
            "tp4": replace(gpu, words=(*engine, "--ranks", "4", "--lenders", "4"), gpus=(1, 2, 3, 4)),
        }[producer]
    else:
        small = Plan((), 8 * MIB, 64 << 10, 16, 1.5, 3, dram_bytes=8 * MIB, capacity_bytes=8 * MIB)
        engine = (
            "loadtest.producers.lending_engine", "{model}", "--device", "cpu", "--requests", "4",
            "--prompt-tokens", "32", "--output-tokens", "32", "--block-tokens", "32", "--max-model-len", "256",
            "--settle-s", "1", "--kv-cache-bytes", str(40 * MIB),
        )  # fmt: skip
        model = ("loadtest.producers.lending_model", "--device", "cpu", "--batch", "1")
        paged = replace(
            small,
            words=engine,
            page_bytes=192 << 10,
            lend_bytes=12 * MIB,
            capacity_bytes=48 * MIB,
            dram_bytes=12 * MIB,
        )
        made = {
            "engine": replace(paged, reclaims=2),
            "diffusion": replace(small, words=(*model, "--model", "tiny-unet"), sweep=(1, 2)),
            "audio": replace(small, words=(*model, "--model", "tiny-audio"), sweep=(1, 2)),
            "tp4": replace(small, words=(*engine, "--lenders", "2")),
        }[producer]
    return replace(made, rounds=1, reclaims=min(1, made.reclaims), window_s=1.0) if quick else made


class Piece:
    """One producer in one mode, with all of its processes. Use within running()."""

    def __init__(
        self, name: str, mode: str, plan: Plan, rig: Rig, producer: Child, progress: Progress
    ) -> None:
        self._name, self._mode, self._plan = name, mode, plan
        self._consumer, self._producer, self._progress = rig.consumer, producer, progress
        self._unit, self._space = "", -1
        self._began_s = time.monotonic()

    def open(self) -> None:
        """The producer first: its pages say how large the consumer's are."""
        plan = self._plan
        found = self._producer.ask(
            "open", most_bytes=plan.lend_bytes, page_bytes=plan.page_bytes, timeout_s=240
        )
        self._unit, self._space = found["unit"], found.get("space", -1)
        self._say("the producer runs")
        self._consumer.ask("open", page_bytes=found["page_bytes"], batch_pages=plan.batch_pages)
        self._say("the consumer runs")
        if self._mode == "full" and not self._progress.has(kind="ceiling", producer=self._name):
            self._lend()
            moved = self._moved(lambda: time.sleep(CEILING_S))[1]
            self._take_back()
            self._add({"kind": "ceiling", "bytes": moved[0], "seconds": moved[1]})
        if plan.sweep and self._mode == "full" and not self._progress.has(kind="sweep", producer=self._name):
            rows = self._producer.ask("sweep", batches=plan.sweep, num_steps=SWEEP_STEPS)["rows"]
            self._add({"kind": "sweep", "unit": self._unit, "rows": rows})
        self._producer.ask("load")

    def _say(self, what: str) -> None:
        print(f"  {time.monotonic() - self._began_s:6.1f} s  {what}", flush=True)

    def _add(self, sample: dict[str, Any]) -> None:
        self._say(f"{sample['kind']} {sample.get('round', '')}")
        self._progress.add({"producer": self._name, "mode": self._mode, **sample})

    def _lend(self) -> int:
        self._producer.ask("lend", num_bytes=self._plan.lend_bytes)
        return self._consumer.ask("borrow", num_bytes=self._plan.lend_bytes)["lent_bytes"]

    def _moved(self, act: Any) -> tuple[Any, tuple[int, float]]:
        """What `act` returns, and bytes that moved meanwhile in how many seconds."""
        self._consumer.ask("start")
        time.sleep(SETTLE_S)
        before = self._consumer.ask("mark")
        found = act()
        after = self._consumer.ask("mark")
        self._consumer.ask("stop")
        return found, (after["bytes"] - before["bytes"], after["at_s"] - before["at_s"])

    def _take_back(self) -> dict[str, Any]:
        self._consumer.ask("give_back")
        return self._producer.ask("reclaim")

    def _window(self) -> dict[str, Any]:
        return self._producer.ask("window", seconds=self._plan.window_s)

    def round(self, number: int) -> None:
        """Both arms; which comes first changes, so that what drifts cancels."""
        found: dict[str, Any] = {"kind": "round", "round": number, "unit": self._unit}
        for arm in ("off", "on") if number % 2 == 0 else ("on", "off"):
            if arm == "off":
                time.sleep(SETTLE_S)
                found["off"] = self._window()
                continue
            found["lent_bytes"] = self._lend()
            found["on"], (found["moved_bytes"], found["moved_s"]) = self._moved(self._window)
            self._take_back()
        self._add(found)

    def reclaim(self, number: int) -> None:
        """Lent pages with live content, taken back under load."""
        lent_bytes = self._lend()
        self._consumer.ask("fill", shift=0)
        copy = self._copied()
        self._consumer.ask("fill", shift=1)  # so that host memory has other bytes than it will have
        step = self._producer.ask("window", seconds=STEP_S)
        self._consumer.say("watch", space=self._space)
        taken = self._producer.ask("reclaim")
        seen = self._consumer.answer(60.0)
        came = self._consumer.ask("came_back")
        self._consumer.ask("give_back")
        began_s = taken["began_s"]
        course = [[round(1e3 * (at_s - began_s), 2), left] for at_s, left in seen["course"] if at_s > began_s]
        self._add(
            {
                "kind": "reclaim", "round": number, "bytes": lent_bytes, "seconds": seen["at_s"] - began_s,
                "copy_bytes": copy["bytes"], "copy_s": copy["seconds"], "step_s": step["tpot_p50_ms"] / 1e3,
                "told_s": came["at_s"] - began_s, "lost": came["lost"], "free": seen["free"], "course": course,
            }
        )  # fmt: skip

    def _copied(self) -> dict[str, Any]:
        """The middle one of three copies into host memory, once it is there and page-locked: when none is much faster
        than the others."""
        copies: list[dict[str, Any]] = []
        while True:
            copies.append(self._consumer.ask("to_dram"))
            last = sorted(copies[-3:], key=lambda copy: copy["seconds"])
            settled = len(copies) > 2 and last[-1]["seconds"] < STEADY * last[0]["seconds"]
            if settled or len(copies) == MAX_COPIES:
                return last[len(last) // 2]

    def run(self) -> None:
        """What is not finished yet."""
        self.open()
        for number in range(self._plan.rounds):
            if not self._progress.has(kind="round", producer=self._name, mode=self._mode, round=number):
                self.round(number)
        for number in range(self._plan.reclaims if self._mode == "full" else 0):
            if not self._progress.has(kind="reclaim", producer=self._name, round=number):
                self.reclaim(number)


def is_finished(name: str, mode: str, plan: Plan, progress: Progress) -> bool:
    """Whether nothing is left to do."""
    rounds = all(
        progress.has(kind="round", producer=name, mode=mode, round=number) for number in range(plan.rounds)
    )
    reclaims = range(plan.reclaims if mode == "full" else 0)
    return rounds and all(progress.has(kind="reclaim", producer=name, round=number) for number in reclaims)


def measure(options: argparse.Namespace, mode: str, progress: Progress) -> None:
    """One piece. Raises: ChildFailed, StartFailed."""
    name, plan = options.producer, plan_of(options.producer, options.device, quick=options.quick)
    if is_finished(name, mode, plan, progress):
        print(f"{name}, {mode}: finished before", flush=True)
        return
    begin_s = time.monotonic()
    settings = RigSettings(
        device=options.device, dram_bytes=plan.dram_bytes, capacity_bytes=plan.capacity_bytes,
        budget_bytes_per_s=0 if mode == "full" else int(options.budget_gb_per_s * 1e9),
        pin_host=options.device == "cuda" and plan.reclaims > 0 and mode == "full",
    )  # fmt: skip
    with running(settings) as rig, ExitStack() as stack:
        model = model_of(name, options, rig.folder)
        words = [str(model) if word == "{model}" else word for word in plan.words]
        words += ["--socket", str(rig.socket), "--coordinator-url", rig.coordinator_url]
        gpus = plan.gpus if options.device == "cuda" else ()
        producer = child("producer", words, rig.folder, stack, gpus)
        try:
            Piece(name, mode, plan, rig, producer, progress).run()
        finally:
            log = rig.folder / "logs" / "mempool.log"
            bad = [
                line[:300]
                for line in log.read_text().splitlines()
                if "failed" in line or '"level":"error"' in line
            ]
            print("\n".join(bad[-8:]), end="\n" if bad else "", flush=True)
    print(f"{name}, {mode}: {time.monotonic() - begin_s:.0f} s", flush=True)


def model_of(name: str, options: argparse.Namespace, folder: Path) -> Path:
    """Of the engine's model: the demo's on a CPU, else a shape without weights."""
    if options.device == "cpu":
        return ROOT / "deploy" / "models" / "quire-demo"
    made = model_folder(folder / "model")
    if name == "tp4":
        (made / "config.json").write_text(json.dumps(LLAMA_70B))
    return made


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--producer", choices=(*MAIN, "tp4"), default="engine")
    parser.add_argument(
        "--modes", default="full,budget", help="full, budget, or both with a comma between them"
    )
    parser.add_argument("--budget-gb-per-s", type=float, default=0.0, help="0: 100 on GPUs, 0.1 on a CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="one short round; writes no result file")
    parser.add_argument("--keep", type=Path, help="file of finished rounds; a later call goes on there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    if unknown := set(options.modes.split(",")) - set(MODES):
        parser.error(f"--modes: {', '.join(sorted(unknown))}: neither full nor budget")
    options.budget_gb_per_s = options.budget_gb_per_s or (100.0 if options.device == "cuda" else 0.1)
    return options


def main(argv: Sequence[str]) -> int:
    """Measure; write the result file when all producers are measured."""
    options = parse(argv)
    progress = Progress(options.keep, said)
    for mode in options.modes.split(","):
        measure(options, mode, progress)
    left = missing(options, progress)
    if not options.quick and options.device == "cuda" and not left:
        path = write_result(
            NAME, claim=CLAIM, command=shlex.join(["python", "-m", "loadtest.bench_producer_cost", *argv]),
            settings={"budget_gb_per_s": options.budget_gb_per_s, "lend_bytes": 8 * GIB, "model": LLAMA_8B},
            metrics=metrics_from_samples(progress.samples), samples=progress.samples, folder=options.out,
            commit=options.commit,
        )  # fmt: skip
        print(f"wrote {path.name}")
    else:
        print(f"not measured yet: {', '.join(left)}" if left else "no result file: quick, or on a CPU")
    for key, value in producer_cost.metrics_so_far(progress.samples).items():
        print(f"{key:44} {value:12.4f}")
    return 0


def missing(options: argparse.Namespace, progress: Progress) -> list[str]:
    """What the result file cannot do without: the engine in both modes, the others in one."""
    out: list[str] = []
    for name in MAIN:
        plan = plan_of(name, options.device, quick=options.quick)
        lacks = [mode for mode in MODES if not is_finished(name, mode, plan, progress)]
        if lacks and (name == "engine" or len(lacks) == len(MODES)):
            out += [f"{name} ({mode})" for mode in lacks]
    return out


def said(sample: dict[str, Any]) -> str:
    """A line for a sample."""
    name = f"{sample['producer']}, {sample['mode']}"
    if sample["kind"] == "ceiling":
        return f"{name}: {sample['bytes'] / sample['seconds'] / 1e9:.2f} GB/s alone"
    if sample["kind"] == "sweep":
        best = max(sample["rows"], key=lambda row: row["items_per_s"])
        return f"{name}: {best['items_per_s']:.2f} {sample['unit']}/s in batches of {best['batch']}"
    if sample["kind"] == "reclaim":
        took_ms, bound_ms = 1e3 * sample["seconds"], 1e3 * producer_cost.bound_s(sample)
        return f"{name}: {sample['bytes'] / GIB:.3f} GiB back in {took_ms:.1f} ms, bound {bound_ms:.1f} ms"
    rates = [sample[arm]["items"] / sample[arm]["seconds"] for arm in ("off", "on")]
    moved = sample["moved_bytes"] / sample["moved_s"] / 1e9
    return f"{name}: {rates[0]:.3f} {sample['unit']}/s, lending {rates[1]:.3f} at {moved:.2f} GB/s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
