"""Serve batches of a producer's model and lend what is spare: python -m loadtest.producers.serve --model sdxl ...

    --rate 0: a batch is always waiting; else so many jobs a second. SIGUSR1: --burst-jobs more, now.
    --lend-bytes N with --socket and --coordinator-url: N bytes of the device are lent while load is steady.

Prints a JSON line a second, and one with `"summary": true` at the end (--seconds, SIGTERM or SIGINT).
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from loadtest.producers.models import KINDS, build
from loadtest.results import quantile
from shared.aqua.lender import Lender, LenderSettings
from shared.aqua.lends_when_idle import LendsWhenIdle
from shared.aqua.local_memory import mempool_device
from shared.lending.rules import LendingRules

IDLE_S = 0.002  # between two looks at an empty queue
LINE_S = 1.0


@dataclass(slots=True)
class Served:
    """What a run did; the lists have an item for each batch."""

    num_jobs: int = 0
    batch_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)  # since the start
    jobs: list[int] = field(default_factory=list)


class Queue:
    """Jobs that have arrived and not begun. `rate`: a second, evenly; 0: `batch` wait at every moment, and only bursts
    count as arrivals."""

    def __init__(self, rate: float, batch: int) -> None:
        self._rate, self._batch = rate, batch
        self._num_taken = self._num_extra = 0

    def burst(self, count: int) -> None:
        """So many at once."""
        self._num_extra += count

    def num_arrived(self, at_s: float) -> int:
        """Since the start, and a batch more where one always waits."""
        steady = int(self._rate * at_s) if self._rate else self._num_taken + self._batch
        return max(self._num_taken, steady + self._num_extra)

    def num_waiting(self, at_s: float) -> int:
        """Now."""
        return self.num_arrived(at_s) - self._num_taken

    def take(self, at_s: float) -> int:
        """The next batch: as many as wait, at most a batch."""
        count = min(self._batch, self.num_waiting(at_s))
        if not self._rate:
            self._num_extra = max(0, self._num_extra - count)
            return count
        self._num_taken += count
        return count


class Loop:
    """Serves until `seconds` are over or stop()."""

    def __init__(
        self,
        work: Callable[[int], object],
        queue: Queue,
        idle: LendsWhenIdle | None,
        say: Callable[[dict], None],
    ) -> None:
        self._work, self._queue, self._idle, self._say = work, queue, idle, say
        self._stopped = False
        self.served = Served()

    def stop(self, *_: object) -> None:
        """After the batch that runs."""
        self._stopped = True

    def run(self, seconds: float) -> Served:
        """Raises: what the model raises."""
        began_s = line_s = time.perf_counter()
        done_before = 0
        while not self._stopped and (now_s := time.perf_counter()) - began_s < seconds:
            at_s = now_s - began_s
            waiting = self._queue.num_waiting(at_s)
            if self._idle is not None:
                self._idle.report(waiting, self._queue.num_arrived(at_s))
            if count := self._queue.take(at_s):
                self._work(count)
                self._note(count, began_s, now_s)
            else:
                time.sleep(IDLE_S)
            if time.perf_counter() - line_s >= LINE_S:
                rate = (self.served.num_jobs - done_before) / (time.perf_counter() - line_s)
                lent = self._idle.lent_bytes if self._idle is not None else 0
                self._say(
                    {
                        "at_s": round(at_s, 1),
                        "jobs": self.served.num_jobs,
                        "jobs_per_s": round(rate, 3),
                        "waiting": waiting,
                        "lent_bytes": lent,
                    }
                )
                line_s, done_before = time.perf_counter(), self.served.num_jobs
        return self.served

    def _note(self, count: int, began_s: float, batch_began_s: float) -> None:
        now_s = time.perf_counter()
        self.served.num_jobs += count
        self.served.batch_s.append(now_s - batch_began_s)
        self.served.ends_s.append(now_s - began_s)
        self.served.jobs.append(count)


def summary(served: Served, reclaims: Sequence[tuple[str, float]]) -> dict[str, object]:
    """Of a run: throughput over the time until its last batch."""
    end_s = served.ends_s[-1] if served.ends_s else 0.0
    return {
        "summary": True,
        "jobs": served.num_jobs,
        "jobs_per_s": round(served.num_jobs / end_s, 4) if end_s else 0.0,
        "batch_p50_ms": round(1e3 * quantile(served.batch_s, 0.5), 3) if served.batch_s else 0.0,
        "batch_p99_ms": round(1e3 * quantile(served.batch_s, 0.99), 3) if served.batch_s else 0.0,
        "reclaims": [{"reason": reason, "seconds": round(took_s, 4)} for reason, took_s in reclaims],
    }


def options(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(KINDS), required=True)
    parser.add_argument("--device", default="", help="torch's; default: a GPU where there is one")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--burst-jobs", type=int, default=0, help="that SIGUSR1 sends")
    parser.add_argument("--instance", default="producer")
    parser.add_argument("--socket", default="", help="of the host's mempool")
    parser.add_argument("--coordinator-url", default="")
    parser.add_argument("--coordinator-key", default="")
    parser.add_argument("--lend-bytes", type=int, default=0)
    parser.add_argument("--page-bytes", type=int, default=8 << 20)
    parser.add_argument("--steady-ms", type=int, default=2_000)
    parser.add_argument("--hold-ms", type=int, default=10_000)
    parser.add_argument("--deadline-ms", type=int, default=2_000)
    return parser.parse_args(argv)


def lender_of(args: argparse.Namespace, device: torch.device) -> Lender:
    """Of this process's device."""
    return Lender(
        LenderSettings(
            socket=args.socket, instance=args.instance, device=mempool_device(device, args.instance),
            most_bytes=args.lend_bytes, coordinator_url=args.coordinator_url,
            coordinator_key=args.coordinator_key, page_bytes=args.page_bytes,
        )
    )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Serve. Exit status 0."""
    args = options(argv)
    model = build(args.model, args.device)
    device = next(model.parameters()).device
    kind = KINDS[args.model]

    def work(count: int) -> None:
        kind.run(model, count)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work(args.batch)  # what the first call makes is no part of the figures
    queue = Queue(args.rate, args.batch)
    with ExitStack() as stack:
        idle = None
        if args.lend_bytes:
            rules = LendingRules(
                threshold_bytes=args.page_bytes - 1, reserve_share=0.0, steady_ms=args.steady_ms,
                window_ms=args.steady_ms, peak_ms=args.steady_ms, hold_ms=args.hold_ms,
                queue_limit=2 * args.batch, reclaim_deadline_ms=args.deadline_ms,
                silent_ms=600_000,  # a batch may take long
            )  # fmt: skip
            idle = LendsWhenIdle(stack.enter_context(lender_of(args, device)), args.lend_bytes, rules)
            stack.callback(idle.close)
        loop = Loop(work, queue, idle, lambda line: print(json.dumps(line), flush=True))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, loop.stop)
        signal.signal(signal.SIGUSR1, lambda *_: queue.burst(args.burst_jobs))
        loop.run(args.seconds)
    print(json.dumps(summary(loop.served, idle.reclaims if idle is not None else [])), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
