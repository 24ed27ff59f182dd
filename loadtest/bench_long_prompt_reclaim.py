"""One prompt longer than memory while its lender's load rises and falls: lent, taken back, lent again (AQUA Figure 12).

    python -m loadtest.bench_long_prompt_reclaim [--out FOLDER] [--commit HEAD]   writes h200x2-long-prompt-reclaim.json
    python -m loadtest.bench_long_prompt_reclaim --device cpu --quick             the demo model; no result file

8B shape, random weights. On GPU 1 a vLLM engine with CUDA graphs and a closed loop of clients: few, many, few. It
reports its load to the mempool as every worker does, which lends its pages while load is steady and takes them back
when the queue grows; this script tells it nothing. On GPU 0 an eager engine with KV memory for --own-tokens decodes one
prompt of --ratio times as much from the first loan to the end; a loan is asked for in its name whenever there is an
offer. Where its far blocks lie is read off the mempool every 10 ms, as is when a reclaim began and when the lender had
all of its pages.
`alone`: the same loads of the lender before it began to report, so that nothing was offered.
A reclaim's bound: its bytes at the rate of plain copies between GPU 0 and page-locked host memory, which are measured
in the same run, and one step of the consumer.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from loadtest import long_prompt_reclaim, tier_measure
from loadtest.bench_pages import model_folder
from loadtest.child_commands import Child
from loadtest.lending_rig import child
from loadtest.reclaim_rig import CONTEXT_BYTES, MarketRig, running
from loadtest.registry import ROOT
from loadtest.tier_measure import add

NAME = "h200x2-long-prompt-reclaim"
CLAIM = (
    "A prompt longer than its engine's memory is decoded 4 times faster while a peer lends; when its queue grows "
    "it has its memory back within bytes over bandwidth and a step, and when it lends again the blocks go back to it."
)
SETTLE_S = 1.0
START_S = 500.0  # machines without a GPU may have much else to do
POLL_S = 0.05

metrics_from_samples = long_prompt_reclaim.metrics_from_samples


class Run:
    """What happens, in order. `samples` grow."""

    def __init__(self, options: argparse.Namespace, rig: MarketRig, producer: Child, consumer: Child) -> None:
        self._options, self._rig = options, rig
        self._producer, self._consumer = producer, consumer
        self._begin_s = time.monotonic()
        self._num_rows = 0
        self.samples: list[dict[str, Any]] = []

    def _say(self, what: str) -> None:
        tier_measure.say_since(what, self._begin_s)

    def go(self) -> None:
        """All of it."""
        options = self._options
        self._producer.ask("open", timeout_s=START_S)
        self._say("the lender runs")
        for phase, clients in (("quiet", options.quiet_clients), ("loaded", options.loaded_clients)):
            window = self._load(phase, clients, options.alone_s)
            add(self.samples, {"kind": "alone", "offered_bytes": self._rig.offered_bytes(), **window})
        self._producer.ask("clients", count=options.quiet_clients)
        self._producer.ask("report")
        self._consumer.ask("open", timeout_s=START_S)
        self._say("the consumer runs")
        self._consumer.ask("watch")
        self._consumer.ask("borrow", num_bytes=options.lent_bytes, timeout_s=START_S)
        self._say("memory is lent")
        began = self._consumer.ask(
            "prompt",
            prompt_tokens=options.prompt_tokens,
            answer_tokens=options.answer_tokens,
            timeout_s=START_S,
        )
        add(self.samples, {"kind": "prompt", "prompt_tokens": options.prompt_tokens, **began})
        add(self.samples, {"kind": "phase", **self._load("quiet", options.quiet_clients, options.phase_s)})
        add(self.samples, {"kind": "phase", **self._load("loaded", options.loaded_clients, options.phase_s)})
        self._producer.ask("clients", count=options.quiet_clients)
        self._until_back()
        self._say("the blocks are back" if self._is_back() else "the blocks did not come back in time")
        add(
            self.samples,
            {"kind": "phase", **self._load("quiet_again", options.quiet_clients, options.phase_s)},
        )
        self._collect()

    def _load(self, phase: str, clients: int, seconds: float) -> dict[str, Any]:
        """The lender's throughput with so many clients; `asked_s`: since when there are so many."""
        asked_s = time.perf_counter()
        self._producer.ask("clients", count=clients)
        time.sleep(SETTLE_S)
        window = self._producer.ask("window", seconds=seconds, timeout_s=seconds + 60)
        return {"phase": phase, "clients": clients, "asked_s": asked_s, **window}

    def _course(self) -> list[list[float]]:
        return self._consumer.ask("seen", after=0)["course"]

    def _is_back(self) -> bool:
        course = self._course()
        is_moved = any(row[long_prompt_reclaim.BACK] for row in course)
        return is_moved and long_prompt_reclaim.state_at(course, float("inf")) == "peer"

    def _until_back(self) -> None:
        end_s = time.monotonic() + self._options.return_s
        while not self._is_back() and time.monotonic() < end_s:
            time.sleep(POLL_S)

    def _collect(self) -> None:
        self.samples.append({"kind": "course", "rows": self._course()})
        rows = self._consumer.ask("tokens_seen")["rows"]
        self.samples.append({"kind": "tokens", "rows": rows})
        print(
            f"  {len(rows)} outputs of the long prompt, {len(self.samples[-2]['rows'])} rows of the course",
            flush=True,
        )


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Samples. Raises: ChildFailed, StartFailed."""
    begin_s = time.monotonic()
    model = ROOT / "deploy" / "models" / "quire-demo"
    if options.device == "cuda":
        model = Path(options.model_dir) if options.model_dir else model_folder(folder / "model-8b")
    with running(options) as rig, ExitStack() as stack:
        cuda = options.device == "cuda"
        engines: list[Child] = []
        for role, gpu, more in (
            ("producer", 1, producer_words(options)),
            ("consumer", 0, consumer_words(options)),
        ):
            words = [
                "loadtest.producers.market_engine",
                str(model),
                "--role",
                role,
                "--device",
                options.device,
            ]
            words += ["--socket", str(rig.socket), "--coordinator-url", rig.coordinator_url, *more]
            engines.append(child(role, words, rig.folder, stack, (gpu,) if cuda else ()))
        run = Run(options, rig, *engines)
        try:
            run.go()
        finally:
            rig.say_errors()
    samples = run.samples
    samples += tier_measure.ceilings(options.device, min(options.far_bytes, 2 << 30))
    tier_measure.say_since("all", begin_s)
    return samples


def producer_words(options: argparse.Namespace) -> list[str]:
    """Of the lender's engine."""
    spare = CONTEXT_BYTES if options.device == "cuda" else 0
    return [
        "--kv-cache-bytes", str(options.lender_bytes + spare), "--block-tokens", str(options.block_tokens),
        "--max-num-seqs", str(options.lender_slots), "--prompt-tokens", str(options.request_tokens),
        "--output-tokens", str(options.request_tokens), "--max-model-len", str(4 * options.request_tokens),
        "--max-num-batched-tokens", str(options.chunk_tokens),
    ]  # fmt: skip


def consumer_words(options: argparse.Namespace) -> list[str]:
    """Of the engine with the long prompt."""
    spare = CONTEXT_BYTES if options.device == "cuda" else 0
    longest = options.prompt_tokens + options.answer_tokens + options.block_tokens
    return [
        "--kv-cache-bytes", str(options.pool_bytes + spare), "--block-tokens", str(options.block_tokens),
        "--max-num-seqs", "2", "--max-model-len", str(longest), "--far-bytes", str(options.far_bytes),
        "--max-num-batched-tokens", str(options.chunk_tokens), "--seed", str(options.seed),
    ]  # fmt: skip


# -- the command ----------------------------------------------------------------------------------------

DEFAULTS: dict[str, dict[str, int]] = {
    "cuda": {
        "own_tokens": 16_384, "answer_tokens": 8_192, "chunk_tokens": 2_048, "block_tokens": 64, "token_bytes": 131_072,
        "lender_tokens": 131_072, "lender_slots": 32, "request_tokens": 128, "quiet_clients": 8, "loaded_clients": 64,
    },
    "cpu": {
        "own_tokens": 3_072, "answer_tokens": 900, "chunk_tokens": 128, "block_tokens": 32, "token_bytes": 6_144,
        "lender_tokens": 3_200, "lender_slots": 4, "request_tokens": 16, "quiet_clients": 2, "loaded_clients": 16,
    },
}  # fmt: skip


RATIOS = {"cuda": 2.0, "cpu": 1.02}  # on a CPU all spaces are of one size, so that the lender's is no larger


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options with the device's defaults filled in, and what follows from them."""
    parser = tier_measure.parser_of(__doc__, list(DEFAULTS["cuda"]), "short phases")
    parser.add_argument(
        "--ratio", type=float, default=0.0, help="of the prompt to the memory; 0: the device's"
    )
    parser.add_argument("--phase-s", type=float, default=8.0)
    parser.add_argument("--alone-s", type=float, default=4.0, help="of each load before anything is lent")
    parser.add_argument(
        "--return-s", type=float, default=0.0, help="most that is waited for; 0: the device's"
    )
    options = parser.parse_args(argv)
    tier_measure.fill_in(options, DEFAULTS[options.device])
    options.ratio = options.ratio or RATIOS[options.device]
    if options.ratio <= 1.0:
        parser.error("--ratio: a prompt that fits has nothing far")
    if options.quick:
        options.phase_s, options.alone_s = min(4.0, options.phase_s), min(2.0, options.alone_s)
    options.eager = "the consumer" if options.device == "cuda" else "both"
    options.return_s = options.return_s or (25.0 if options.device == "cuda" else 60.0)
    options.pool_bytes = (options.own_tokens + 4 * options.block_tokens) * options.token_bytes
    options.prompt_tokens = int(options.ratio * options.own_tokens)
    most = options.prompt_tokens + options.answer_tokens - options.own_tokens // 2
    options.far_bytes = most * options.token_bytes
    options.lender_bytes = options.lender_tokens * options.token_bytes
    beyond = options.prompt_tokens + options.answer_tokens - options.own_tokens
    options.lent_bytes = (beyond + 2 * options.chunk_tokens) * options.token_bytes
    return options


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file."""
    return tier_measure.run(
        NAME, CLAIM, "loadtest.bench_long_prompt_reclaim", argv, parse(argv), measure, metrics_from_samples
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
