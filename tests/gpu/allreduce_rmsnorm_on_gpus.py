"""The fused all-reduce on GPUs against float64: `python -m tests.gpu.allreduce_rmsnorm_on_gpus`; status 1 when wrong.

    --world N      N processes on N GPUs           --shapes 1000   random shapes       --replays 10000  of a graph
    --pages        with --world: memory by our own descriptors instead of torch's symmetric memory
    --virtual N    N ranks as streams on one GPU   --seed S        printed             --bench          times at the end

Errors are compared with those of an all-reduce in the tensors' type (NCCL's; with --virtual a sum in rank order) and
vLLM's fused_add_rms_norm, written out here with its roundings. Multicast stays off.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from shared.errors import ClusterError
from shared.kernels.allreduce_rmsnorm.fused import FusedSettings
from shared.kernels.allreduce_rmsnorm.plan import Algorithm, make_plan
from tests.gpu.fused_bed import CAPTURE, EPS, WAYS, Bed, fits, say
from tests.gpu.fused_checks import check_peers, check_replays, check_shapes

OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def time_of(bed: Bed, call: Callable[[int], Any], repeats: int = 20, rounds: int = 7) -> float:
    """Median us of a call in a graph of `repeats`."""
    bed.each(call)
    graphs = {}
    for rank in bed.local:
        graphs[rank] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[rank], stream=bed.streams[rank], capture_error_mode=CAPTURE):
            for _ in range(repeats):
                call(rank)
    times = []
    for _ in range(rounds + 2):
        bed.meet()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for rank in bed.local:
            with torch.cuda.stream(bed.streams[rank]):
                if rank == bed.local[0]:
                    begin.record()
                graphs[rank].replay()
                if rank == bed.local[0]:
                    end.record()
        torch.cuda.synchronize(bed.device)
        times.append(begin.elapsed_time(end) * 1000 / repeats)
    return statistics.median(times[2:])


def bench(bed: Bed) -> bool:
    """us of each way by tokens and SMs, hidden 8192; beside it the link's limit and NCCL + norm."""
    hidden = 8192
    most = 8192 if not bed.virtual else 4096
    settings = FusedSettings(hidden, most)
    fused = bed.open(settings, bed.arenas(settings.layout().num_bytes))
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=bed.device)
    held = {rank: torch.randn(most, hidden, device=bed.device).to(torch.bfloat16) for rank in bed.local}
    say(
        bed,
        f"us at hidden 8192, world {bed.world}{' (virtual: no link)' if bed.virtual else ''}; columns: SMs",
    )
    budgets = [one for one in (2, 4, 8, 16, 32) if one <= bed.budget] + [0]
    say(
        bed,
        "tokens way".ljust(34)
        + "".join(f"{one or 'full':>9}" for one in budgets)
        + "  limit@450 | NCCL alone",
    )
    for num_tokens in (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192):
        if num_tokens > most:
            continue
        limit = 2 * (bed.world - 1) / bed.world * num_tokens * hidden * 2 / 450e3
        line = ""
        if not bed.virtual:
            dense = held[bed.local[0]][:num_tokens]
            line = f"{limit:9.1f} | {time_of(bed, lambda _, dense=dense: dist.all_reduce(dense)):9.1f}"
            held[bed.local[0]].normal_()
        for algorithm, engine in WAYS:
            if algorithm is Algorithm.ONE_SHOT and num_tokens > 512:
                continue
            if not fits(fused[bed.local[0]], engine, num_tokens):
                continue
            row = []
            for sms in budgets:

                def call(
                    rank: int, *, a: Any = algorithm, e: Any = engine, n: int = num_tokens, sms: int = sms
                ) -> Any:
                    one = fused[rank]
                    return one.run_as(
                        make_plan(a, n, bed.world, rank),
                        e,
                        one.input(n),
                        held[rank][:n],
                        weight,
                        EPS,
                        num_sms=sms,
                    )

                row.append(time_of(bed, call))
            for one in fused.values():
                one.check()
            say(
                bed,
                f"{num_tokens:>6} {algorithm}/{engine}".ljust(34)
                + "".join(f"{us:9.1f}" for us in row)
                + f"  {line}",
            )
    for one in fused.values():
        one.close()
    return True


def run_all(bed: Bed, options: argparse.Namespace) -> bool:
    """Every check, each with its seconds. Ranks of one process go on after one that breaks; processes end together,
    because a rank that goes on alone would wait for the others at the wrong place."""
    large = 1024 if not bed.virtual else 256
    checks: list[tuple[str, Callable[[], bool]]] = [
        ("shapes", lambda: check_shapes(bed, options.shapes, options.seed))
    ]
    for way in WAYS:
        tokens = 16 if way[0] is Algorithm.ONE_SHOT else large
        replays = partial(check_replays, bed, options.replays, way, tokens, 8192)
        checks.append((f"replays {way[0]}/{way[1]}", replays))
    checks += [(f"peers {way[0]}/{way[1]}", partial(check_peers, bed, way)) for way in WAYS]
    if options.bench:
        checks.append(("bench", lambda: bench(bed)))
    good = True
    for name, check in checks:
        begun = time.monotonic()
        say(bed, f"-- {name} begins")
        try:
            good &= check()
        except (ClusterError, RuntimeError, AssertionError):
            if not bed.virtual:
                raise
            traceback.print_exc()
            good = False
        say(bed, f"-- {name} ends after {time.monotonic() - begun:.1f} s")
    return good


def virtual_main(options: argparse.Namespace) -> int:
    """All ranks here."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    world = options.virtual
    streams = {rank: torch.cuda.Stream(device) for rank in range(world)}
    bed = Bed(world, list(range(world)), device, min(32, sms // world), streams, True)
    return 0 if run_all(bed, options) else 1


def rank_main(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One process a GPU."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=options.world, device_id=device
    )
    bed = Bed(
        options.world,
        [rank],
        device,
        0,
        {rank: torch.cuda.Stream(device)},
        False,
        Path(folder) if options.pages else None,
    )
    bed.budget = torch.cuda.get_device_properties(device).multi_processor_count
    good = run_all(bed, options)
    Path(folder, f"good{rank}").write_text(str(int(good)))
    dist.destroy_process_group()


def main(argv: list[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--virtual", type=int, default=0)
    parser.add_argument("--world", type=int, default=0)
    parser.add_argument("--shapes", type=int, default=60)
    parser.add_argument("--replays", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(30))
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--pages", action="store_true")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("not run: no GPU")
        return 2
    os.environ.update(OFF)
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name(0)} x {torch.cuda.device_count()}, "
        f"seed {options.seed}",
        flush=True,
    )
    if options.virtual:
        return virtual_main(options)
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, args=(options, folder), nprocs=options.world)
        return (
            0 if all(Path(folder, f"good{rank}").read_text() == "1" for rank in range(options.world)) else 1
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
