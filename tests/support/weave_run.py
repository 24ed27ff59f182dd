"""Two ranks that fuse and weave: `python -m tests.support.weave_run SOCKET OUT`.

vLLM is imported once. Forked from here, one after another: stock vLLM with two ranks, then an engine in the pool's
pages with two ranks and worker.weave = full. The same prompts are asked all at once, so that steps hold several
requests, a prompt's chunk and decodes, and the cut goes through a request; and then one by one. OUT gets {"stock":
answers, "full", "fuse", "off": {"crowd", "alone", "twins": answers, "counters": of the ranks}, "calibrated": twice,
the threshold of each rank}. The twins are one prompt asked twice at once: the second finds the first one's blocks in
the step that computes them, and comes before it in the batch, as all who compute less do in vLLM's second runner.
"""

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

from tests.support.pressure_run import (
    Driver,
    ended,
    forked,
    settings,
)  # first: it prepares vLLM's environment

from shared.engine.preload import preload_architecture  # isort: skip
from shared.engine.vllm_setup import die_with_parent  # isort: skip
from shared.kv.block_hash import chain_seed  # isort: skip
from tests.support.stock_reference import run_cases  # isort: skip

MODEL = Path(__file__).resolve().parents[2] / "deploy" / "models" / "quire-demo"
LENGTHS = (3, 40, 77, 130, 301, 700)  # the last one is computed in chunks
TWINS_TOKENS = 900  # in two chunks: the second request is there before the last one
RANKS = 2
MIN_TOKENS = 8
OPTIONS = {"tensor_parallel_size": RANKS, "max_model_len": 1472, "max_num_batched_tokens": 512}

SHARED_MEMORY, CPU_SUMS = Path("/dev/shm"), "*-cpushm_*"


def cases() -> list[dict[str, Any]]:
    """Greedy."""
    rng = random.Random(7)
    stem = [rng.randrange(3, 4096) for _ in range(max(LENGTHS))]
    greedy = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    return [{"id": f"greedy-{n}", "prompt": [*stem[: n - 1], 5 + n], "params": greedy} for n in LENGTHS]


def twins() -> list[dict[str, Any]]:
    """See the module."""
    rng = random.Random(8)
    prompt = [rng.randrange(3, 4096) for _ in range(TWINS_TOKENS)]
    greedy = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    return [{"id": f"twin-{n}", "prompt": prompt, "params": greedy} for n in range(2)]


def in_order_of_tokens(runner: Any, scheduler_output: Any) -> None:
    """vLLM's GPUModelRunner._may_reorder_batch, in the order of its second runner."""
    batch, counts = runner.input_batch, scheduler_output.num_scheduled_tokens
    for i in range(batch.num_reqs):
        least = min(range(i, batch.num_reqs), key=lambda j: counts[batch.req_ids[j]])
        if least != i:
            batch.swap_states(i, least)


def stock(out: Path) -> None:
    die_with_parent()
    preload_architecture(str(MODEL))
    found = run_cases(str(MODEL), cases() + twins(), distributed_executor_backend="mp", **OPTIONS)
    out.write_text(
        json.dumps({name: [c["token_ids"] for c in one["choices"]] for name, one in found.items()})
    )


def woven(socket: str, out: Path) -> None:
    """The same engine with steps in two parts, then whole and fused, then vLLM's way; neither finds the other's blocks.

    Last, what pays is measured, and then read from what was kept.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    GPUModelRunner._may_reorder_batch = in_order_of_tokens
    changes = {"weave": "full", "weave_min_tokens": MIN_TOKENS, "state_dir": str(out.parent), **OPTIONS}
    driver = Driver(settings(str(MODEL), socket, "woven-0", **changes))
    rpc = driver.engine._llm.collective_rpc

    async def run() -> dict[str, Any]:
        await driver.start()
        asked, found = cases(), {}
        for name, rule in {"full": (1, MIN_TOKENS), "fuse": (1, 0), "off": (0, 0)}.items():
            await rpc("quire_weave_from", args=rule)
            driver.seed = chain_seed("fingerprint", name)  # what one way computed is no other's prefix
            before = await rpc("quire_weave_counters")
            crowd = await driver.crowd(asked)
            twice = await driver.crowd(twins())
            alone = {case["id"]: await driver.answer(case) for case in asked}
            after = await rpc("quire_weave_counters")
            grown = [{k: b[k] - a[k] for k in a} for a, b in zip(before, after, strict=True)]
            found[name] = {"crowd": crowd, "alone": alone, "twins": twice, "counters": grown}
        found["calibrated"] = [await rpc("quire_weave_calibrate") for _ in range(2)]
        await driver.close()
        return found

    out.write_text(json.dumps(asyncio.run(run())))


def main() -> None:
    """See the module's docstring."""
    socket, out = sys.argv[1], Path(sys.argv[2])
    parts = {name: out.with_suffix(f".{name}") for name in ("stock", "woven")}
    strangers = set(SHARED_MEMORY.glob(CPU_SUMS))
    assert ended(forked(lambda: stock(parts["stock"]))) == 0, "stock"
    for path in set(SHARED_MEMORY.glob(CPU_SUMS)) - strangers:  # stock vLLM's CPU build leaves it there
        path.unlink(missing_ok=True)
    assert ended(forked(lambda: woven(socket, parts["woven"]))) == 0, "woven"
    answers = {name: json.loads(part.read_text()) for name, part in parts.items()}
    out.write_text(json.dumps({"stock": answers["stock"], **answers["woven"]}))


if __name__ == "__main__":
    main()
