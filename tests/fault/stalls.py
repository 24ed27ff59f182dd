"""When this machine did not run: what was heard then was heard late by as much, and nobody was silent.

A virtual machine's cores are lent to others for seconds, one of them or all. A process bound to each core sees it: it
sleeps almost always and goes before all others where it may (root), so that what the cluster itself computes does not
make it late.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterable

WATCH_S = 0.02  # how often everybody looks
CORE_STOOD_S = 0.25  # a pause of a core that anybody may make is shorter

WATCH = """
import os, select, sys, time
core, watch_s, stood_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
os.sched_setaffinity(0, {core})
try:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
except OSError:
    stood_s *= 4  # it waits for its turn like everybody
print("watching", flush=True)
is_over = False
while not is_over:
    began = time.time()
    is_over = bool(select.select([0], [], [], watch_s)[0])
    ended = time.time()
    if ended - began - watch_s > stood_s:
        print(began + watch_s, ended)
"""

Span = tuple[float, float]  # begin, end: seconds since 1970


def overlap_s(spans: Iterable[Span], begin_s: float, end_s: float) -> float:
    """Seconds of [begin_s, end_s) in which any of them was; moments that several cover count once."""
    total_s, reached_s = 0.0, begin_s
    for begin, end in sorted(spans):
        begin, end = max(begin, reached_s), min(end, end_s)
        if begin < end:
            total_s += end - begin
            reached_s = end
    return total_s


class Stalls:
    """`with Stalls() as stalls:`, and watch() on the loop whose events are timed; within() afterwards."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.watchers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "Stalls":
        for core in os.sched_getaffinity(0):
            words = [sys.executable, "-S", "-c", WATCH, *map(str, (core, WATCH_S, CORE_STOOD_S))]
            self.watchers.append(
                subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        for watcher in self.watchers:
            assert watcher.stdout is not None
            assert watcher.stdout.readline() == "watching\n"
        return self

    def __exit__(self, *_: object) -> None:
        for watcher in self.watchers:
            said, _ = watcher.communicate()  # the end of its input ends it
            self.spans += [(float(begin), float(end)) for begin, end in map(str.split, said.splitlines())]

    async def watch(self) -> None:
        """Until cancelled: when this loop did not run."""
        while True:
            began = time.time()
            await asyncio.sleep(WATCH_S)
            ended = time.time()
            if ended - began - WATCH_S > WATCH_S:
                self.spans.append((began + WATCH_S, ended))

    def within(self, begin_s: float, end_s: float) -> float:
        """Seconds of that span."""
        return overlap_s(self.spans, begin_s, end_s)
