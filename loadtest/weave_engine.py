"""One engine of bench_weave.py in a process of its own: prefill steps of several lengths, in each of its modes.

    python -m loadtest.weave_engine weave|stock|stock-alone|stock-fused MODEL_DIR OUT.json --tp N [--tokens 1024,...]

Prompts are random and new. Modes take turns within a round; the first round warms up and is not kept. `--budget-s` ends
the rounds where they are then. With `--serve N` instead: N requests of lengths as in ShareGPT, asked at once, in
steps of `--step-tokens`.
"""

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

MOST_PROMPT_TOKENS, MOST_ANSWER_TOKENS = 6144, 1024


def measure(engine: Any, options: argparse.Namespace, vocabulary: int) -> list[dict[str, Any]]:
    """Samples: {mode, tokens, round, ms, woven}."""
    rng = random.Random(11)
    samples: list[dict[str, Any]] = []
    begin = time.perf_counter()
    for number in range(options.rounds + 1):
        for tokens in options.tokens:
            for mode in engine.modes:
                if number > 1 and time.perf_counter() - begin > options.budget_s:
                    return samples
                engine.switch(mode)
                before = engine.woven_steps()
                ms = engine.prefill_ms([rng.randrange(10, vocabulary) for _ in range(tokens)])
                if number and ms:
                    woven = engine.woven_steps() - before
                    samples.append(
                        {"mode": mode, "tokens": tokens, "round": number, "ms": ms, "woven": woven}
                    )
        print(f"  round {number}: {time.perf_counter() - begin:.1f} s", flush=True)
    return samples


def sharegpt_lengths(count: int, seed: int) -> list[tuple[int, int]]:
    """(prompt, answer) tokens, lognormal with the published medians and 90th percentiles of its openchat variant
    (1,730 and 5,696; 415 and 834), cut off at what a request may have.
    """
    rng = random.Random(seed)
    return [
        (
            max(4, min(MOST_PROMPT_TOKENS, round(rng.lognormvariate(math.log(1730), 0.93)))),
            max(2, min(MOST_ANSWER_TOKENS, round(rng.lognormvariate(math.log(415), 0.545)))),
        )
        for _ in range(count)
    ]


def serve(engine: Any, options: argparse.Namespace, vocabulary: int) -> list[dict[str, Any]]:
    """Samples: {mode, step_tokens, requests, round, tokens, s}; `tokens`: of prompts and answers together."""
    lengths = sharegpt_lengths(options.serve, 5)
    rng = random.Random(13)
    modes = ["full", "fuse"] if engine.kind == "weave" else [engine.kind]
    samples: list[dict[str, Any]] = []
    begin = time.perf_counter()
    for number in range(options.rounds + 1):
        for mode in modes:
            if number > 1 and time.perf_counter() - begin > options.budget_s:
                return samples
            prompts = [[rng.randrange(10, vocabulary) for _ in range(size)] for size, _ in lengths]
            taken_s = engine.serve_s(prompts, [count for _, count in lengths], mode == "full")
            if number:
                tokens = sum(size + count for size, count in lengths)
                about = {"step_tokens": options.step_tokens, "requests": options.serve, "tokens": tokens}
                samples.append({"mode": mode, **about, "round": number, "s": taken_s})
        print(f"  round {number}: {time.perf_counter() - begin:.1f} s", flush=True)
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
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget-s", type=float, default=40)
    parser.add_argument("--sms", type=int, default=16)
    parser.add_argument("--serve", type=int, default=0)
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Exit status 0; the result is in OUT.json."""
    options = parsed(argv)
    from shared.engine.vllm_setup import prepare_environment

    prepare_environment(options.device, 1, in_pages=True)
    from shared.engine.weave_measured import MeasuredEngine

    vocabulary = json.loads(Path(options.model_dir, "config.json").read_text())["vocab_size"]
    begin = time.perf_counter()
    longest = MOST_PROMPT_TOKENS + MOST_ANSWER_TOKENS if options.serve else max(options.tokens)
    engine = MeasuredEngine(
        options.kind, options.model_dir, options.tp, longest, options.sms, options.device,
        **({"step_tokens": options.step_tokens, "max_seqs": options.serve} if options.serve else {}),
    )  # fmt: skip
    ready_s = round(time.perf_counter() - begin, 1)
    print(f"  ready: {ready_s} s", flush=True)
    samples = (serve if options.serve else measure)(engine, options, vocabulary)
    Path(options.out).write_text(json.dumps({"ready_s": ready_s, "samples": samples}))
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
