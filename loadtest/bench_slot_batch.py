"""How many requests fit at once, by how many tokens one page holds (vAttention, Figure 15 and Table 8).

    python -m loadtest.bench_slot_batch [--quick]      writes loadtest/results/slot-batch.json

Counted, not timed: the table of request slots that serves real ones (shared/vmm/slots.py) runs a queue of requests
that never empties over 40 GiB of KV, one token a request and step, 8B shape. A request enters when its prompt's pages
are free and 1% of all besides (vLLM's watermark), and the youngest is preempted when a step finds none. Lengths:
log-normal, the prompts' mean 700 tokens and the answers' 415, seeded; vAttention used OpenChat, which is not here.

A page-group holds K or V of one layer, as in vAttention's Table 8; 64 to 256 KiB need its modified driver and are
counted for comparison. "slice": all layers of a token together (its 8.2), 64 tokens in a page of 8 MiB, as the
unmodified driver allows. "exact": no pages at all, one token at a time.
"""

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, write_result
from shared.vmm.geometry import KvShape, layer_major_geometry, token_major_geometry
from shared.vmm.slots import SlotTable

NAME = "slot-batch"
CLAIM = (
    "On a queue that never empties, slots of 2 MiB pages with all layers of a token together hold at least 0.95 of the "
    "requests that would fit without fragmentation; slots of one tensor a layer hold fewer."
)
LLAMA_8B = KvShape(32, 8, 128)
KV_BYTES = 40 << 30
PROMPT_MEAN, ANSWER_MEAN, SIGMA = 700, 415, 0.9
MAX_TOKENS = 8192
MAX_SLOTS = 1024
STEPS, WARM, SEEDS = 1200, 400, 2
WATERMARK_RATIO = 0.01
LAYERED_KIB = (64, 128, 256, 2048)


def page_tokens() -> dict[str, int]:
    """Tokens a page holds, by the case's name."""
    layered = {f"{kib} KiB": layer_major_geometry(LLAMA_8B, kib << 10).block_tokens for kib in LAYERED_KIB}
    return {"exact": 1, **layered, "slice": token_major_geometry(LLAMA_8B).block_tokens}


def metrics_from_samples(samples: Samples) -> Metrics:
    """Mean over seeds of the largest and of the mean batch after warming up; shares of "exact"."""
    out: Metrics = {}
    for case in sorted({row["case"] for row in samples}):
        mine = [row for row in samples if row["case"] == case]
        name = case.replace(" ", "").lower()
        out[f"batch_{name}_max_count"] = mean(max(row["batch"]) for row in mine)
        out[f"batch_{name}_mean_count"] = mean(mean(row["batch"]) for row in mine)
        out[f"block_{name}_tokens"] = float(mine[0]["page_tokens"])
        out[f"preempted_{name}_count"] = mean(row["preempted"] for row in mine)
    for name in [key.split("_")[1] for key in list(out) if key.endswith("_mean_count")]:
        out[f"batch_{name}_of_exact_ratio"] = out[f"batch_{name}_mean_count"] / out["batch_exact_mean_count"]
    return out


def lengths(rng: Random) -> tuple[int, int]:
    """(prompt, answer) of one request, in tokens."""
    prompt, answer = (
        max(1, min(MAX_TOKENS // 2, round(rng.lognormvariate(math.log(average) - SIGMA**2 / 2, SIGMA))))
        for average in (PROMPT_MEAN, ANSWER_MEAN)
    )
    return prompt, answer


class Server:
    """A full queue over one slot table. Requests: slot -> tokens still to come, in the order of their entry."""

    def __init__(self, tokens_a_page: int, rng: Random, kv_bytes: int = KV_BYTES) -> None:
        self.page_tokens = tokens_a_page
        self.rng = rng
        self.table = SlotTable(
            MAX_SLOTS, -(-MAX_TOKENS // tokens_a_page), tokens_a_page,
            reclaim_ratio=0.0, ahead_tokens=0, eager_pages=0,
        )  # fmt: skip
        self.table.grant(range(kv_bytes // (tokens_a_page * LLAMA_8B.token_bytes)))
        self.lens = [0] * MAX_SLOTS
        self.left: dict[int, int] = {}
        self.again: list[tuple[int, int]] = []
        self.next = lengths(rng)
        self.fence = 0
        self.preempted = 0

    def free_pages(self) -> int:
        """Pages that no running request has, not even as what an earlier request left in its slot."""
        return self.table.num_owned - sum(len(self.table.pages_of(slot)) for slot in self.left)

    def admit(self) -> None:
        """Everybody whose prompt fits, in order; those that were preempted come first."""
        free = self.free_pages() - int(WATERMARK_RATIO * self.table.num_owned)
        while True:
            prompt, answer = self.again[-1] if self.again else self.next
            free -= -(-(prompt + 1) // self.page_tokens)
            slot = self.table.alloc_reqid((), prompt) if free >= 0 else None
            if slot is None:
                return
            if self.again:
                self.again.pop()
            else:
                self.next = lengths(self.rng)
            self.lens[slot], self.left[slot] = prompt, answer

    def end(self, slot: int) -> None:
        """The request in this slot leaves; its pages may be reclaimed at once."""
        self.fence += 1
        self.table.free_reqid(slot, self.fence)
        self.table.passed(self.fence)
        self.lens[slot] = 0
        del self.left[slot]

    def step(self) -> int:
        """One token for everybody; requests that ran in it."""
        for slot in self.left:
            self.lens[slot] += 1
        while True:
            answer = self.table.step(self.lens)
            self.table.ack(answer.now_batch + 1)
            if answer.ok:
                break
            if answer.num_returning < answer.num_short:
                youngest = next(reversed(self.left))
                self.again.append((self.lens[youngest] - 1, self.left[youngest]))
                self.preempted += 1
                self.end(youngest)
        running = len(self.left)
        for slot in [slot for slot, left in self.left.items() if left <= 1]:
            self.end(slot)
        for slot in self.left:
            self.left[slot] -= 1
        return running


def run(case: str, tokens_a_page: int, steps: int, warm: int, seed: int) -> dict[str, Any]:
    """One sample: the batch of every step after the warm-up."""
    server = Server(tokens_a_page, Random(seed))
    batch = []
    for number in range(steps):
        server.admit()
        running = server.step()
        if number >= warm:
            batch.append(running)
    server.table.check()
    row = {"case": case, "seed": seed, "page_tokens": tokens_a_page, "preempted": server.preempted}
    return {**row, "batch": batch}


def main(argv: Sequence[str]) -> int:
    """Count and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed, few steps; writes no result file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    steps, warm, seeds = (300, 100, 1) if options.quick else (STEPS, WARM, SEEDS)
    samples = [
        run(case, tokens, steps, warm, seed)
        for case, tokens in page_tokens().items()
        for seed in range(seeds)
    ]
    metrics = metrics_from_samples(samples)
    if not options.quick:
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_slot_batch", *argv]),
            settings={"kv_bytes": KV_BYTES, "steps": steps, "warm": warm, "seeds": seeds, "sigma": SIGMA},
            metrics=metrics,
            samples=samples,
            folder=options.out,
        )
        print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    for key, value in sorted(metrics.items()):
        print(f"{key:34} {value:10.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
