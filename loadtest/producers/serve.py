"""Serve batches of a producer's model and lend what is spare: python -m loadtest.producers.serve --model sdxl ...

    --rate 0: a batch is always waiting; else so many jobs a second. SIGUSR1: --burst-jobs more, now.
    --lend-bytes N with --instance, --socket and --coordinator-url: N bytes of the device are lent while load is steady.

Prints a JSON line a second, and one with `"summary": true` at the end (--seconds, SIGTERM or SIGINT); logs on stderr.
"""

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from loadtest.producers.models import KINDS, build
from loadtest.results import quantile
from shared.aqua.lender import Lender, LenderSettings
from shared.aqua.lends_when_idle import LendsWhenIdle
from shared.aqua.local_memory import mempool_device
from shared.errors import ClusterError
from shared.lending.rules import LendingRules
from shared.observe import log

IDLE_S = 0.002  # between two looks at an empty queue
LINE_S = 1.0
END_MS = 5_000  # at the end, for a mempool or coordinator that does not answer
END_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log = log.get_logger("producers.serve")


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
    parser.add_argument("--instance", default="", help="name of this lender, unlike any other's on this host")
    parser.add_argument("--socket", default="", help="of the host's mempool")
    parser.add_argument("--coordinator-url", default="")
    parser.add_argument("--coordinator-key", default="")
    parser.add_argument("--lend-bytes", type=int, default=0)
    parser.add_argument("--page-bytes", type=int, default=8 << 20)
    parser.add_argument("--steady-ms", type=int, default=2_000)
    parser.add_argument("--hold-ms", type=int, default=10_000)
    parser.add_argument("--deadline-ms", type=int, default=2_000)
    args = parser.parse_args(argv)
    if wrong := what_is_wrong(args):
        parser.error(wrong)
    return args


def what_is_wrong(args: argparse.Namespace) -> str:
    """With the command line, in words; "": nothing."""
    if args.batch < 1:
        return f"--batch {args.batch}: at least 1"
    if not 0 <= args.rate < math.inf:
        return f"--rate {args.rate}: jobs a second, or 0 for a batch that always waits"
    if not args.seconds > 0:
        return f"--seconds {args.seconds}: more than 0"
    for name in ("burst_jobs", "lend_bytes", "steady_ms", "hold_ms", "deadline_ms"):
        if (value := getattr(args, name)) < 0:
            return f"--{name.replace('_', '-')} {value}: at least 0"
    if args.lend_bytes:
        missing = [name for name in ("instance", "socket", "coordinator_url") if not getattr(args, name)]
        if missing:
            return "--lend-bytes needs " + " and ".join("--" + name.replace("_", "-") for name in missing)
        if not 1 <= args.page_bytes <= args.lend_bytes:
            return f"--page-bytes {args.page_bytes}: 1 to --lend-bytes, as whole pages are lent"
    return _wrong_device(args.device)


def _wrong_device(name: str) -> str:
    """What is wrong with it, in words; "": this process can compute there."""
    try:
        device = torch.device(name or "cpu")
    except RuntimeError:
        return f"--device {name}: cpu, cuda or cuda:1"
    if device.type not in ("cpu", "cuda"):
        return f"--device {name}: cpu, cuda or cuda:1"
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        return f"--device {name}: PyTorch sees {torch.cuda.device_count()} GPUs here"
    return ""


def lender_of(args: argparse.Namespace, device: torch.device) -> Lender:
    """Of this process's device."""
    return Lender(
        LenderSettings(
            socket=args.socket, instance=args.instance, device=mempool_device(device, args.instance),
            most_bytes=args.lend_bytes, coordinator_url=args.coordinator_url,
            coordinator_key=args.coordinator_key, page_bytes=args.page_bytes,
        )
    )  # fmt: skip


def lends_when_idle(args: argparse.Namespace, lender: Lender) -> LendsWhenIdle:
    """By the command line's rules."""
    rules = LendingRules(
        threshold_bytes=args.page_bytes - 1, reserve_share=0.0, steady_ms=args.steady_ms,
        window_ms=args.steady_ms, peak_ms=args.steady_ms, hold_ms=args.hold_ms,
        queue_limit=2 * args.batch, reclaim_deadline_ms=args.deadline_ms,
        silent_ms=600_000,  # a batch may take long
    )  # fmt: skip
    return LendsWhenIdle(lender, args.lend_bytes, rules)


def take_back(lender: Lender, idle: LendsWhenIdle) -> None:
    """All of it; where mempool or coordinator do not answer, END_MS for each: the mempool has it back when this process
    has ended."""
    lender.end_soon(END_MS)
    idle.close()
    try:
        lender.close()
    except ClusterError as error:
        _log.warning("not_taken_back", error=error.message)


def main(argv: Sequence[str]) -> int:
    """Serve. Exit status 0, or 1 where mempool or coordinator refuse: stderr says what."""
    args = options(argv)
    log.setup("producer", args.instance or "producer")
    try:
        serve(args)
    except ClusterError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


def serve(args: argparse.Namespace) -> None:
    """Until the end. Raises: ClusterError without a mempool to lend to."""
    model = build(args.model, args.device)
    device = next(model.parameters()).device
    kind = KINDS[args.model]

    def work(count: int) -> None:
        kind.run(model, count)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work(args.batch)  # what the first call makes is no part of the figures
    queue = Queue(args.rate, args.batch)
    lender = lender_of(args, device) if args.lend_bytes else None
    idle = lends_when_idle(args, lender) if lender is not None else None
    loop = Loop(work, queue, idle, lambda line: print(json.dumps(line), flush=True))
    for number in END_SIGNALS:
        signal.signal(number, loop.stop)
    signal.signal(signal.SIGUSR1, lambda *_: queue.burst(args.burst_jobs))
    try:
        loop.run(args.seconds)
    finally:
        for number in END_SIGNALS:  # a second one ends it, whoever is waited for
            signal.signal(number, signal.SIG_DFL)
        print(json.dumps(summary(loop.served, idle.reclaims if idle is not None else [])), flush=True)
        if lender is not None and idle is not None:
            take_back(lender, idle)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
