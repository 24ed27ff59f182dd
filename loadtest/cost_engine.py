"""One engine of bench_cost_model.py in a process of its own: profiles as at a start, then points off their grid.

    python -m loadtest.cost_engine MODEL_DIR OUT.json [--device cpu|cuda] [--mempool-socket S] [--tp N] ...

Every round is a profile and then all points off its grid, so that a disturbance of the machine hits one round of many
points and not all rounds of one.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from shared.costmodel.observation import Observation, Point


def off_grid(options: argparse.Namespace) -> list[Point]:
    """Lengths, cached ratios and batches that no profile has. The same for the same seed."""
    rng, points = random.Random(options.seed), []
    block, longest = options.block_tokens, options.longest
    for size in (
        longest // 6,
        longest // 3,
        longest * 4 // 5,
    ):  # for eq 2: the same prompt with half of it cached
        points += [Point(((size, 0),)), Point(((size, size // 2 // block * block),))]
    for number in range(options.points):
        if number % 2 == 0:
            size = int(20 * (longest / 20) ** rng.random())
            share = rng.choice([0.0, 0.0, 0.3, 0.6, 0.85])
            cached = int(size * share) // block * block
            points.append(Point(((size, cached),), output_tokens=rng.choice([1, 8])))
        else:
            count = rng.randrange(2, 13)
            sizes = tuple((rng.randrange(30, longest // 8), 0) for _ in range(count))
            points.append(Point(sizes, output_tokens=rng.choice([1, 10]), behind=True))
    return points


def row(part: str, seen: Observation, **more: Any) -> dict[str, Any]:
    """A sample."""
    found = {k: v for k, v in asdict(seen).items() if v}
    return {
        "part": part,
        **more,
        **found,
        "ms": round(seen.ms, 4),
        "waited_ratio": round(seen.waited_ratio, 3),
    }


async def measure(engine: Any, settings: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All samples of this engine."""
    from shared.engine.calibration import budget_ms, frame_of
    from shared.engine.profile_run import Profiler
    from shared.kv.model_files import vocab_size

    await engine.start()
    vocabulary, frame = vocab_size(options.model_dir), frame_of(engine, settings)
    samples: list[dict[str, Any]] = [
        {"part": "frame", "frame": msgspec.to_builtins(frame), "graph_tokens": engine.graph_tokens}
    ]
    budget = options.budget_ms or budget_ms(frame)
    points = off_grid(options)
    begin = time.perf_counter()
    for number in range(options.rounds):
        if time.perf_counter() - begin > options.limit_s:
            print(f"round {number}: no time left", flush=True)
            break
        profiler = Profiler(engine, vocabulary, seed=options.seed + number)
        seen = await profiler.run_plan(budget)
        samples += [row("grid", one, profile=number) for one in seen]
        print(f"{time.perf_counter() - begin:.0f} s: profile of {len(seen)} observations", flush=True)
        for place, point in enumerate(points):
            samples += [row("off", one, point=place, round=number) for one in await profiler.run(point)]
        await profiler.clear()
    await engine.close()
    return samples


def parsed(argv: list[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--mempool-socket", default="")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--block-tokens", type=int, default=32)
    parser.add_argument("--kv-cache-bytes", type=int, default=256 << 20)
    parser.add_argument("--batched-tokens", type=int, default=2048)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--longest", type=int, default=4000)
    parser.add_argument("--points", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=90.0)
    parser.add_argument("--budget-ms", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=11)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Measure and write OUT."""
    options = parsed(argv)
    from shared.engine.factory import make_engine
    from shared.engine.worker_config import WorkerSettings

    settings = WorkerSettings(
        instance="bench", role="colocated", model_dir=options.model_dir, model_name="bench", device=options.device,
        dtype=options.dtype, load_format=options.load_format, mempool_socket=options.mempool_socket,
        block_tokens=options.block_tokens, kv_cache_bytes=options.kv_cache_bytes, tensor_parallel_size=options.tp,
        max_num_batched_tokens=options.batched_tokens, max_model_len=options.max_model_len,
    )  # fmt: skip
    begin = time.perf_counter()
    engine = make_engine(settings)
    print(f"engine made in {time.perf_counter() - begin:.0f} s", flush=True)
    samples = asyncio.run(measure(engine, settings, options))
    options.out.write_text(json.dumps(samples))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
