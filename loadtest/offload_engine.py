"""One engine of bench_offload.py in a process of its own, told by lines on its standard input what to run.

    python -m loadtest.offload_engine stock|quire MODEL_DIR OUT.jsonl [--kv-gib N] [--cpu-gib N]

A line in: a phase's name, or "end". A line in OUT.jsonl for each: its sample; the first one is "ready", with facts.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from loadtest.offload_phases import Phases, Sizes

GIB = 1 << 30


async def serve(engine: Any, sizes: Sizes, facts: dict[str, Any], options: argparse.Namespace) -> None:
    """Until "end", or until nobody is at the other end any more."""
    phases = Phases(engine.stream, sizes)
    write(options.out, {"load": "ready", **facts})
    while name := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if name == "end":
            return
        write(options.out, await phases.run(name))


def write(path: Path, sample: dict[str, Any]) -> None:
    """One line, whole."""
    with path.open("a") as file:
        file.write(json.dumps(sample) + "\n")


async def run(options: argparse.Namespace, vocabulary: int) -> None:
    """Make the engine, serve."""
    from shared.engine import measured, measured_offload

    config = measured_offload.transfer_config(
        options.engine,
        int(options.cpu_gib * GIB),
        options.out.with_suffix(".transfers"),
        options.out.parent / "costs",
    )
    engine = measured.StockEngine(
        options.model_dir,
        kv_cache_bytes=int(options.kv_gib * GIB),
        kv_transfer_config=config,
        max_model_len=2 * options.prompt_tokens,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=options.utilization,
    )
    sizes = Sizes(
        pool=options.pool, seconds=options.seconds, prompt_tokens=options.prompt_tokens, vocabulary=vocabulary
    )
    try:
        await serve(engine, sizes, engine.facts(), options)
    finally:
        engine.close()


def main(argv: list[str]) -> int:
    """Exit status 0 after "end"."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=("stock", "quire"))
    parser.add_argument("model_dir")
    parser.add_argument("out", type=Path)
    parser.add_argument("--kv-gib", type=float, default=6)
    parser.add_argument("--cpu-gib", type=float, default=16)
    parser.add_argument("--pool", type=int, default=40)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--utilization", type=float, default=0.35)
    options = parser.parse_args(argv)
    from shared.engine.vllm_setup import prepare_environment

    prepare_environment("cuda", 1, in_pages=True)  # vLLM's own choice of runner
    import shared.engine.measured_offload  # noqa: F401  vLLM takes long to import: now, and then it is our turn

    if sys.stdin.readline().strip() != "start":
        return 1
    vocabulary = json.loads(Path(options.model_dir, "config.json").read_text())["vocab_size"]
    asyncio.run(run(options, vocabulary))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
