"""How long the placer takes for 128 GPUs, and how near its placement is to the best there can be (AQUA 5).

    python -m loadtest.bench_placer [--quick]      writes loadtest/results/placer.json

Twenty random mixes on 16 servers of 8 GPUs of 80 GB, drawn as AQUA 9.3 draws them: a tenth audio, 15% vision, the rest
language models, of its Table 1 with tensor parallelism 1, 2 and 4, until the GPUs are used up. Ten mixes take one
profile for each workload, ten give every instance bytes of its own (half to one and a half of the profile), so that
no two are alike. Each is placed twice, entries in another order, on two cores, within 5 s. The gap is the share of
eq 6 that the answer does not prove necessary. Beside it, of the first mix of either sort: the same eqs 1 to 6 with a
binary for each instance and server, given to HiGHS as they stand for the same time; and for every mix the share of
needed memory that is lent inside servers, by this placement and by one drawn by lot.
"""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

import msgspec
import numpy as np

from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, write_result
from shared.placer.highs import Program, solve_integer
from shared.placer.matching import Shard, match
from shared.placer.place import SIGN, place
from shared.wire.placer import Placement, PlacementQuestion, PlacerModel, PlacerRole, PlacerServer

NAME = "placer"
CLAIM = (
    "On two cores the placer answers for 128 GPUs within 5 s, at most 2% above a proven lower bound of eq 6, on twenty "
    "random mixes with tensor-parallel groups, and equal questions get equal answers."
)
GB = 10**9
SERVERS, GPUS, GPU_BYTES = 16, 8, 80 * GB
MIXES, CORES, LIMIT_S = 20, 2, 5.0
AUDIO_SHARE, VISION_SHARE = 0.10, 0.15
Workload = tuple[str, PlacerRole, int, int]  # model, role, tp, GB of each GPU
AUDIO: list[Workload] = [("audiogen", "producer", 1, 20), ("musicgen", "producer", 1, 15)]
VISION: list[Workload] = [
    ("sd-3", "producer", 1, 30),
    ("sd-xl", "producer", 1, 20),
    ("kandinsky", "producer", 1, 40),
]
LANGUAGE: list[Workload] = [
    ("llama-8b", "producer", 1, 25),
    ("llama-70b", "producer", 4, 15),
    ("llama-70b", "consumer", 2, 20),
    ("yi-34b-200k", "consumer", 2, 15),
    ("opt-30b", "consumer", 1, 10),
]


def mix(seed: int, *, alike: bool, num_servers: int = SERVERS) -> PlacementQuestion:
    """One question. `alike`: instances of a workload have the same profile."""
    rng = Random(seed)
    left = num_servers * GPUS
    models = []
    while left:
        draw = rng.random()
        pool = AUDIO if draw < AUDIO_SHARE else VISION if draw < AUDIO_SHARE + VISION_SHARE else LANGUAGE
        name, role, tp, size = rng.choice(pool)
        if tp > left:
            continue
        left -= tp
        factor = 1.0 if alike else rng.uniform(0.5, 1.5)
        models.append(
            PlacerModel(
                model=f"{name}-{len(models)}", role=role, tp=tp, bytes_per_gpu=round(size * GB * factor)
            )
        )
    server = PlacerServer(name="server", gpus=GPUS, gpu_memory_bytes=GPU_BYTES, count=num_servers)
    return PlacementQuestion(servers=[server], models=models, time_limit_ms=round(1000 * LIMIT_S))


def metrics_from_samples(samples: Samples) -> Metrics:
    """The slowest and the widest gap of all mixes, and their medians; the others are means."""
    placed = [row for row in samples if row["by"] == "placer"]
    direct = [row for row in samples if row["by"] == "direct"]
    gaps = [1 - row["bound_bytes"] / row["objective_bytes"] for row in placed]
    seconds = [max(row["seconds"]) for row in placed]
    return {
        "seconds_128_gpus_s": max(seconds),
        "median_seconds_128_gpus_s": median(seconds),
        "cpu_seconds_128_gpus_s": max(max(row["cpu_seconds"]) for row in placed),
        "optimality_gap_ratio": max(gaps),
        "median_optimality_gap_ratio": median(gaps),
        "proven_optimal_count": float(sum(gap <= 0 for gap in gaps)),
        "mixes_count": float(len(placed)),
        "equal_answers_ratio": mean(float(row["equal"]) for row in placed),
        "lent_ratio": mean(row["lent_bytes"] / row["needed_bytes"] for row in placed),
        "lent_by_lot_ratio": mean(row["lent_by_lot_bytes"] / row["needed_bytes"] for row in placed),
        "direct_optimality_gap_ratio": max(1 - row["bound_bytes"] / row["objective_bytes"] for row in direct),
    }


def shuffled(question: PlacementQuestion, seed: int) -> PlacementQuestion:
    """The same question, its entries in another order."""
    return msgspec.structs.replace(
        question, models=Random(seed).sample(question.models, len(question.models))
    )


def place_twice(question: PlacementQuestion, seed: int, *, alike: bool) -> dict[str, Any]:
    """One sample. Raises: ValueError on a question without a placement."""
    answers, seconds, cpu_seconds = [], [], []
    for asked in (question, shuffled(question, seed)):
        begin, cpu_begin = time.monotonic(), time.process_time()
        answers.append(place(asked, time.monotonic))
        seconds.append(round(time.monotonic() - begin, 4))
        cpu_seconds.append(round(time.process_time() - cpu_begin, 4))
    first = answers[0]
    if not isinstance(first, Placement):
        raise ValueError("; ".join(first.reasons))
    return {
        "by": "placer",
        "seed": seed,
        "alike": alike,
        "instances": len(question.models),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "objective_bytes": first.objective_bytes,
        "bound_bytes": first.bound_bytes,
        "equal": answers[0] == answers[1],
        "timed_out": [answer.timed_out for answer in answers],  # type: ignore[union-attr]
        "needed_bytes": first.needed_bytes,
        "lent_bytes": first.lent_bytes,
        "lent_by_lot_bytes": lent_by_lot(question, seed),
    }


def lent_by_lot(question: PlacementQuestion, seed: int) -> int:
    """Bytes lent where instances go to servers at random, widest first, and pairs form as ever."""
    rng = Random(seed)
    free = [GPUS] * question.servers[0].count
    held: list[dict[str, list[Shard]]] = [{"producer": [], "consumer": []} for _ in free]
    models = sorted(shuffled(question, seed).models, key=lambda model: -model.tp)
    for model in models:
        server = rng.choice([s for s, gpus in enumerate(free) if gpus >= model.tp])
        free[server] -= model.tp
        held[server][model.role] += [Shard(model.model, n, model.bytes_per_gpu) for n in range(model.tp)]
    return sum(
        min(consumer.size_bytes, producer.size_bytes)
        for here in held
        for consumer, producer in match(here["consumer"], here["producer"])
    )


def direct(
    question: PlacementQuestion, seed: int, *, alike: bool, limit_s: float = LIMIT_S
) -> dict[str, Any]:
    """Eqs 1 to 6 as the paper writes them, in GB: a binary x for each instance and server, then the two maxima."""
    models, num_servers = question.models, question.servers[0].count
    tp = np.array([model.tp for model in models], dtype=np.float64)
    signs = tp * [SIGN[model.role] for model in models]
    memory = signs * [model.bytes_per_gpu / GB for model in models]
    num = len(models)
    x = num * num_servers  # columns: x[m, s] at s * num + m, then max memory, then max imbalance
    rows: list[np.ndarray] = []
    low, high = [1.0] * num, [1.0] * num
    for m in range(num):
        row = np.zeros(x + 2)
        row[m:x:num] = 1.0
        rows.append(row)
    for s in range(num_servers):
        for weights, column, bound in ((tp, None, float(GPUS)), (memory, x, 0.0), (signs, x + 1, 0.0)):
            for side in (1.0, -1.0) if column is not None else (1.0,):
                row = np.zeros(x + 2)
                row[s * num : (s + 1) * num] = side * weights
                if column is not None:
                    row[column] = -1.0
                rows.append(row)
                low.append(-np.inf)
                high.append(bound)
    cost = np.zeros(x + 2)
    cost[x], cost[x + 1] = 1.0, GPU_BYTES / GB
    top = np.concatenate((np.ones(x), [GPUS * 1000.0, GPUS]))
    program = Program(cost, top, np.array(rows), np.array(low), np.array(high))
    begin = time.monotonic()
    answer = solve_integer(program, time_limit_s=limit_s, max_nodes=1 << 30, num_integer=x)
    seconds = time.monotonic() - begin
    if answer.values is None:
        raise ValueError("HiGHS found no placement by itself")
    objective = float(cost @ answer.values)
    return {
        "by": "direct",
        "seed": seed,
        "alike": alike,
        "seconds": [round(seconds, 4)],
        "objective_bytes": round(objective * GB),
        "bound_bytes": round(max(answer.bound, 0.0) * GB),
    }


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="4 mixes on 32 GPUs; writes no result file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    num_mixes, num_servers = (4, 4) if options.quick else (MIXES, SERVERS)
    place(mix(0, alike=True, num_servers=1), time.monotonic)  # loads the library
    samples: list[dict[str, Any]] = []
    for seed in range(num_mixes):
        alike = seed < num_mixes // 2
        question = mix(seed, alike=alike, num_servers=num_servers)
        samples.append(place_twice(question, seed, alike=alike))
        if seed in (0, num_mixes // 2):
            samples.append(direct(question, seed, alike=alike))
    metrics = metrics_from_samples(samples)
    if not options.quick:
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_placer", *argv]),
            settings={
                "servers": SERVERS,
                "gpus_per_server": GPUS,
                "gpu_memory_bytes": GPU_BYTES,
                "mixes": MIXES,
                "cores": CORES,
                "time_limit_s": LIMIT_S,
            },
            metrics=metrics,
            samples=samples,
            folder=options.out,
        )
        print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    for key, value in sorted(metrics.items()):
        print(f"{key:34} {value:10.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
