"""Times of the fused kernel and of its rivals on the GPUs of one host: a process a GPU, one group of `--world`.

    python -m shared.kernels.allreduce_rmsnorm.bench_allreduce_rmsnorm --world 4 --json FILE [--budget-s 240]

loadtest/bench_fused_norm.py runs it for each group size and makes the result file. us of a call is the median over
replays of a graph of calls, of each replay the slowest rank's; every rank starts a replay behind a barrier.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from shared.kernels.allreduce_rmsnorm.arenas import torch_arena
from shared.kernels.allreduce_rmsnorm.calibrate import calibrate
from shared.kernels.allreduce_rmsnorm.fused import CudaFused, FusedSettings
from shared.kernels.allreduce_rmsnorm.plan import ELEMENT_BYTES, Algorithm, make_plan
from shared.kernels.allreduce_rmsnorm.rivals import EPS, QUIET, Place, Rival, all_rivals
from shared.kernels.allreduce_rmsnorm.shapes import Engine
from shared.kernels.allreduce_rmsnorm.timing import Call, Clock

HIDDEN = 8192
TOKENS = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SWEEP_TOKENS = (512, 4096, 16384)
PUSH_SWEEP_TOKENS = (1, 8, 32)
BUDGETS = (2, 4, 8, 16, 32)
ONE_SHOT_MOST_TOKENS = 512
BUDGETS_FROM_BYTES = 8 << 20


class Bench:
    """One rank's part."""

    def __init__(
        self, options: argparse.Namespace, device: torch.device, cpu_group: dist.ProcessGroup
    ) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device, self.options = device, options
        self.until = time.monotonic() + options.budget_s
        self.clock = Clock(device)
        most = max(options.tokens)
        settings = FusedSettings(HIDDEN, most)
        self.fused = CudaFused(settings, torch_arena(settings.layout().num_bytes, device), self.rank, device)
        made = torch.Generator(device=device).manual_seed(self.rank)
        rows = torch.randn(most, HIDDEN, generator=made, device=device, dtype=torch.bfloat16)
        self.fused.input(most).copy_(rows)
        residual = torch.randn(most, HIDDEN, generator=made, device=device, dtype=torch.bfloat16)
        weight = torch.full(
            (HIDDEN,), 1 / self.world, dtype=torch.bfloat16, device=device
        )  # sums stay finite
        self.place = Place(self.fused, rows, residual, weight)
        self.rivals, self.notes = all_rivals(self.place, cpu_group, with_flashinfer=options.flashinfer)
        self.fused.use(calibrate(self.fused))
        self.samples: list[dict[str, Any]] = []

    def over(self) -> bool:
        """Whether the budget is spent, as rank 0 sees it."""
        word = torch.tensor([int(time.monotonic() > self.until)], device=self.device)
        dist.broadcast(word, 0)
        return bool(word.item())

    def keep(self, who: str, num_tokens: int, num_sms: int, times: list[float]) -> float:
        """One sample; its median."""
        us = statistics.median(times)
        self.samples.append(
            {"world": self.world, "who": who, "tokens": num_tokens, "bytes": num_tokens * HIDDEN * ELEMENT_BYTES,
             "sms": num_sms, "us": times}
        )  # fmt: skip
        return us

    def ours(self, num_tokens: int, algorithm: Algorithm, engine: Engine, num_sms: int) -> Call:
        """A call of the fused kernel in a given way."""
        plan = make_plan(algorithm, num_tokens, self.world, self.rank)
        rows, residual = self.fused.input(num_tokens), self.place.residual[:num_tokens]
        return lambda: self.fused.run_as(
            plan, engine, rows, residual, self.place.weight, EPS, num_sms=num_sms
        )

    def run(self) -> None:
        """Every size; rivals and the fused kernel take turns, so that a machine's moods hit both."""
        say(f"norm: {self.notes}; rivals: {[one.name for one in self.rivals]}")
        for num_tokens in self.options.tokens:
            if self.over():
                say(f"the budget is spent before {num_tokens} tokens")
                break
            num_bytes = num_tokens * HIDDEN * ELEMENT_BYTES
            line = [self._rival(one, num_tokens) for one in [*self.rivals] if num_bytes <= one.most_bytes]
            ways = [(Algorithm.TWO_SHOT, Engine.PLAIN), (Algorithm.TWO_SHOT, Engine.BULK)]
            if num_tokens <= ONE_SHOT_MOST_TOKENS:
                ways.insert(0, (Algorithm.ONE_SHOT, Engine.PLAIN))
            if num_tokens <= self.fused.push_tokens:
                ways.insert(0, (Algorithm.ONE_SHOT, Engine.PUSH))
            for algorithm, engine in ways:
                budgets = (*BUDGETS, 0) if num_bytes >= BUDGETS_FROM_BYTES else (0,)
                figures = []
                for num_sms in budgets:
                    times = self.clock.measure(self.ours(num_tokens, algorithm, engine, num_sms))
                    figures.append(f"{self.keep(f'{algorithm}/{engine}', num_tokens, num_sms, times):.1f}")
                line.append(f"{algorithm}/{engine} {' '.join(figures)}")
            times = self.clock.measure(
                lambda n=num_tokens: self.fused.run(
                    self.fused.input(n), self.place.residual[:n], self.place.weight, EPS
                )
            )
            line.append(f"run() {self.keep('ours', num_tokens, 0, times):.1f}")
            self.fused.check()
            say(f"{num_tokens:>6} tokens, us: " + "; ".join(line))
            self.write()

    def sweep(self) -> None:
        """The same call of kernels that are cut up otherwise."""
        plain = self.fused.shape
        for num_tokens in (1, 16, 64, 256):
            row = []
            for relaxed in (False, True):
                self.fused.shape = replace(plain, relaxed_arrival=relaxed)
                for way in ((Algorithm.ONE_SHOT, Engine.PLAIN), (Algorithm.TWO_SHOT, Engine.BULK)):
                    us = statistics.median(self.clock.measure(self.ours(num_tokens, *way, 0)))
                    row.append(f"{way[0]} relaxed={relaxed} {us:.1f}")
            say(f"sweep {num_tokens} tokens: {'; '.join(row)}")
        self._sweep_pushes()
        variants: list[tuple[Engine, dict[str, int]]] = [
            *((Engine.BULK, {"segment_vectors": width, "max_stages": 64}) for width in (64, 128, 256, 512)),
            *((Engine.BULK, {"segment_vectors": 256, "max_stages": stages}) for stages in (2, 3, 4, 6)),
            *((Engine.PLAIN, {"in_flight": loads}) for loads in (8, 16, 24)),
        ]
        for num_tokens in SWEEP_TOKENS:
            for engine, cut in variants:
                if self.over():
                    return
                self.fused.shape = replace(plain, **cut)
                if engine is Engine.BULK and self.fused.shape.stages < 2:
                    continue
                calls = {
                    sms: self.ours(num_tokens, Algorithm.TWO_SHOT, engine, sms)
                    for sms in (2, 4, 8, 16, 32, 0)
                }
                figures = {sms: statistics.median(self.clock.measure(call)) for sms, call in calls.items()}
                text = " ".join(f"{sms or 'all'}:{us:.1f}" for sms, us in figures.items())
                say(f"sweep {num_tokens} tokens {engine} {cut} stages {self.fused.shape.stages}: {text}")
        self.fused.shape = plain

    def _sweep_pushes(self) -> None:
        plain = self.fused.shape
        for num_tokens in PUSH_SWEEP_TOKENS:
            row = []
            for threads in (256, 512, 1024):
                self.fused.shape = replace(plain, most_push_threads=threads)
                call = self.ours(num_tokens, Algorithm.ONE_SHOT, Engine.PUSH, 0)
                row.append(f"{threads} threads {statistics.median(self.clock.measure(call)):.1f}")
            say(f"sweep {num_tokens} tokens pushed: {'; '.join(row)}")
        self.fused.shape = plain

    def write(self) -> None:
        """What there is so far: a later size may not come to its end."""
        if self.rank == 0:
            found = {
                "samples": self.samples,
                "notes": self.notes,
                "gpu": torch.cuda.get_device_name(self.device),
                "torch": torch.__version__,
            }
            new = self.options.json.with_suffix(".new")
            new.write_text(json.dumps(found))
            new.replace(self.options.json)

    def _rival(self, rival: Rival, num_tokens: int) -> str:
        """Its time. One that refuses a size, as it does on every rank, is not asked again."""
        try:
            times = self.clock.measure(lambda: rival.call(num_tokens), rival.capture)
        except RuntimeError as error:
            self.notes[rival.name] = f"from {num_tokens} tokens on: {str(error).splitlines()[0]}"
            self.rivals.remove(rival)
            return f"{rival.name} refused"
        self.place.rows.clamp_(-8, 8)
        return f"{rival.name} {self.keep(rival.name, num_tokens, 0, times):.1f}"


def say(text: str) -> None:
    """Once a group."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def rank_main(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One process a GPU."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=options.world, device_id=device
    )
    cpu_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    assert isinstance(cpu_group, dist.ProcessGroup)
    bench = Bench(options, device, cpu_group)
    if options.sweep:
        bench.sweep()
    else:
        bench.run()
    bench.fused.close()
    dist.destroy_process_group()


def main(argv: Sequence[str]) -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=240.0)
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS))
    parser.add_argument("--sweep", action="store_true", help="no rivals: other ways to cut the kernel up")
    parser.add_argument("--flashinfer", action="store_true", help="its kernels are compiled first: minutes")
    options = parser.parse_args(argv)
    if torch.cuda.device_count() < options.world:
        print(f"not measured: {torch.cuda.device_count()} GPUs, {options.world} are needed")
        return 2
    os.environ.update(QUIET)  # noqa: TID251  for NCCL and torch in the processes that are started
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, args=(options, folder), nprocs=options.world)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
