"""One engine of bench_weave.py in a process of its own: prefill steps of several lengths, in each of its modes.

    python -m loadtest.weave_engine weave|stock|stock-alone|stock-fused MODEL_DIR OUT.json --tp N [--tokens 1024,...]

Prompts are random and new. Modes take turns within a round; the first round warms up and is not kept. `--budget-s` ends
the rounds where they are then.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any


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
    longest = max(options.tokens)
    engine = MeasuredEngine(options.kind, options.model_dir, options.tp, longest, options.sms, options.device)
    ready_s = round(time.perf_counter() - begin, 1)
    print(f"  ready: {ready_s} s", flush=True)
    samples = measure(engine, options, vocabulary)
    Path(options.out).write_text(json.dumps({"ready_s": ready_s, "samples": samples}))
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
