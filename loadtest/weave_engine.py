"""One engine of bench_weave.py in a process of its own: prefill steps of several lengths, then requests, in its modes.

    python -m loadtest.weave_engine weave|stock|stock-alone|stock-fused MODEL_DIR OUT.json --tp N [--tokens 1024,...]
        [--serve REQUESTS --chunks 1024,... --workloads sharegpt,2048x128]

Prompts are random and new. Modes take turns within a round, in an order that changes from round to round
(shared/weave/turns.py);
the first round of steps warms up and is not kept.
`--budget-s` ends the steps' rounds where they are then, `--serve-budget-s` those of the requests, `--left-s` both. With
`--serve N`: N requests of lengths as in ShareGPT, or all of PROMPTxANSWER tokens, asked at once, in steps of so many
tokens as each of `--chunks` says (workloads but the first one: of FIXED_CHUNK). OUT.json grows as it goes; "is_whole"
comes last: its own budgets ended it, not the time that was left.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtest.weave_metrics import SHAREGPT
from shared.weave.turns import turns

FIXED_CHUNK = 2048  # TokenWeave 4.2.2: vLLM's default for dense models
LEFT_MARGIN_S = 6.0  # for the engine's end

Keep = Callable[[list[dict[str, Any]]], None]


def measure(
    engine: Any, options: argparse.Namespace, vocabulary: int, keep: Keep, until: float
) -> list[dict[str, Any]]:
    """Samples: {kind, mode, tokens, round, ms, woven}."""
    rng = random.Random(11)
    samples: list[dict[str, Any]] = []
    begin = time.perf_counter()
    until = min(until, begin + options.budget_s)
    for number in range(options.rounds + 1):
        for tokens in options.tokens:
            for mode in turns(engine.modes, number):
                if number > 1 and time.perf_counter() > until:
                    return samples
                engine.switch(mode)
                before = engine.woven_steps()
                ms = engine.prefill_ms([rng.randrange(10, vocabulary) for _ in range(tokens)])
                if number and ms:
                    woven = engine.woven_steps() - before
                    samples.append(
                        {
                            "kind": "step",
                            "mode": mode,
                            "tokens": tokens,
                            "round": number,
                            "ms": ms,
                            "woven": woven,
                        }
                    )
        keep(samples)
        print(f"  round {number}: {time.perf_counter() - begin:.1f} s", flush=True)
    return samples


def sharegpt_lengths(
    count: int, seed: int, most_prompt: int = 6144, most_answer: int = 1024
) -> list[tuple[int, int]]:
    """(prompt, answer) tokens, lognormal with the published medians and 90th percentiles of its openchat variant
    (1,730 and 5,696; 415 and 834), cut off at what a request may have.
    """
    rng = random.Random(seed)
    return [
        (
            max(4, min(most_prompt, round(rng.lognormvariate(math.log(1730), 0.93)))),
            max(2, min(most_answer, round(rng.lognormvariate(math.log(415), 0.545)))),
        )
        for _ in range(count)
    ]


def lengths_of(workload: str, options: argparse.Namespace) -> list[tuple[int, int]]:
    """Of its requests. Raises: ValueError."""
    if workload == SHAREGPT:
        return sharegpt_lengths(options.serve, 5, options.most_prompt_tokens, options.most_answer_tokens)
    prompt, answer = (int(count) for count in workload.split("x"))
    return [(prompt, answer)] * options.serve


def longest_request(options: argparse.Namespace) -> int:
    """Tokens of a request or a step."""
    if not options.serve:
        return max([*options.tokens, 1])
    served = [p + a for name in options.workloads for p, a in lengths_of(name, options)]
    return max([*options.tokens, *served, *(chunk for _, chunk in loads(options))])


def loads(options: argparse.Namespace) -> list[tuple[str, int]]:
    """(workload, chunk): the first workload in every chunk, then the others."""
    first, *others = options.workloads
    return [*((first, chunk) for chunk in options.chunks), *((name, FIXED_CHUNK) for name in others)]


def serve(
    engine: Any, options: argparse.Namespace, vocabulary: int, keep: Keep, until: float
) -> list[dict[str, Any]]:
    """Samples: {kind, mode, workload, step_tokens, requests, round, tokens, s, woven}.

    `tokens`: of prompts and answers together.
    """
    rng = random.Random(13)
    modes = ["full", "fuse"] if engine.kind == "weave" else [engine.kind]
    samples: list[dict[str, Any]] = []
    begin = time.perf_counter()
    until = min(until, begin + options.serve_budget_s)

    def prompts(lengths: list[tuple[int, int]]) -> list[list[int]]:
        return [[rng.randrange(10, vocabulary) for _ in range(size)] for size, _ in lengths]

    warm = [(max(1, p // 2), min(a, 8)) for p, a in lengths_of(options.workloads[0], options)[:8]]
    for mode in modes:
        engine.serve_s(prompts(warm), [count for _, count in warm], max(options.chunks), mode == "full")
    for number in range(1, options.serve_rounds + 1):
        for workload, chunk in loads(options):
            lengths = lengths_of(workload, options)
            for mode in turns(modes, number - 1):
                if time.perf_counter() > until:
                    return samples
                before = engine.woven_steps()
                taken_s = engine.serve_s(
                    prompts(lengths), [count for _, count in lengths], chunk, mode == "full"
                )
                about = {
                    "kind": "serving",
                    "mode": mode,
                    "workload": workload,
                    "step_tokens": chunk,
                    "round": number,
                }
                tokens = sum(size + count for size, count in lengths)
                woven = engine.woven_steps() - before
                samples.append(
                    {**about, "requests": options.serve, "tokens": tokens, "s": taken_s, "woven": woven}
                )
                print(f"  {workload} in {chunk}, {mode}: {taken_s:.1f} s", flush=True)
            keep(samples)
    return samples


def parsed(argv: list[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("weave", "stock", "stock-alone", "stock-fused"))
    parser.add_argument("model_dir")
    parser.add_argument("out")
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument(
        "--tokens",
        type=lambda text: [int(n) for n in text.split(",") if n],
        default=[1024, 4096],
        help="'': no steps",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=40)
    parser.add_argument("--sms", type=int, default=0, help="0: as measured at the engine's start")
    parser.add_argument("--serve", type=int, default=0, help="requests at once; 0: none")
    parser.add_argument("--serve-rounds", type=int, default=1)
    parser.add_argument("--serve-budget-s", type=float, default=40)
    parser.add_argument("--chunks", type=lambda text: [int(n) for n in text.split(",")], default=[2048])
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=[SHAREGPT])
    parser.add_argument("--most-prompt-tokens", type=int, default=6144)
    parser.add_argument("--most-answer-tokens", type=int, default=1024)
    parser.add_argument("--left-s", type=float, default=1e6, help="until this process has to end")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Exit status 0; the result is in OUT.json."""
    begin = time.perf_counter()
    options = parsed(argv)
    until = begin + options.left_s - LEFT_MARGIN_S
    from shared.engine.vllm_setup import prepare_environment

    prepare_environment(options.device, 1, in_pages=True)
    from shared.engine.weave_measured import bench_engine

    vocabulary = json.loads(Path(options.model_dir, "config.json").read_text())["vocab_size"]
    engine = bench_engine(
        options.kind, options.model_dir, options.tp, longest_request(options), options.sms, options.device,
        max_seqs=options.serve or 8,
    )  # fmt: skip
    ready_s = round(time.perf_counter() - begin, 1)
    print(f"  ready: {ready_s} s", flush=True)
    found: list[dict[str, Any]] = []

    def keep(samples: list[dict[str, Any]], *, is_whole: bool = False) -> None:
        out = Path(options.out)
        part = out.with_suffix(".part")
        part.write_text(json.dumps({"ready_s": ready_s, "is_whole": is_whole, "samples": [*found, *samples]}))
        part.replace(out)

    if options.tokens:
        found = measure(engine, options, vocabulary, keep, until)
    if options.serve:
        found = [*found, *serve(engine, options, vocabulary, keep, until)]
    keep([], is_whole=time.perf_counter() < until)
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
