"""Does a killed consumer still write lent GPU pages behind the moment in which its death is seen? On one GPU.

    python -m loadtest.bench_killed [--rounds 8] [--gib 1] [--engine] [--keep FILE] [--budget-s 900]
                                    [--out FOLDER] [--commit HEAD]      writes loadtest/results/h200-killed.json

A mempool uses pages again when the pidfd of the process that maps them is readable, after it has killed that process
where a deadline has passed. Here the lender (this process) makes pages, and a writer (vmm_children.py) imports, maps
and writes them without end: with one endless kernel that fills the GPU (endless.cu), or with copies that the driver has
queued. A round kills (SIGKILL through the pidfd) four writers: each kind running, and stopped (SIGSTOP) 50 ms earlier.

How words are looked at: the lender fills all pages with a word of its own, waits, and counts the others. Before the
kill this has to find the writer's words (`wrote_before`); where it does not, the round is an error. Directly behind the
death, with 200 ms of waiting, it must find none (`late_words_count`). What a dead writer wrote before that fill ended,
`fill_max_ms` behind its death, would not be seen. `..._dead_ms`: from the signal until the pidfd is readable.
`..._freed_ms`: from the signal until the GPU's free memory is what it was before the writer came, looked at for those
200 ms; `unfreed_count`: it was not by then. `stopped_wrote_on_count`: of `stopped_rounds_count` stopped writers, those
whose words still changed while they stood still.
`--engine`: the core of a vLLM engine in a mempool's pages (8B shape, random weights) is killed while it decodes.
`engine_held_bytes` are free when its death is seen, `engine_later_bytes` more a second later (the front's among them),
`engine_heirs_count`: processes below the core that had the GPU open too.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loadtest.bench_pages import LLAMA_8B, model_folder
from loadtest.killed_engine import ENGINE_FLAGS, ENGINE_ROUNDS, ENGINE_S, engine_round
from loadtest.killed_rig import Lender, kill, ms, stop
from loadtest.processes import StartFailed
from loadtest.progress import Progress
from loadtest.registry import RESULTS
from loadtest.results import Metrics, Samples, quantile, write_result
from loadtest.vmm_link import Child, lend
from shared.errors import ClusterError
from shared.vmm.cuda_driver import CudaVmmDriver
from shared.vmm.errors import VmmUnavailable

NAME = "h200-killed"
CLAIM = (
    "When a consumer that writes lent pages on the GPU is killed, running or stopped, nothing of it writes behind the "
    "moment in which its death is seen."
)
KINDS = ("kernel", "copies")
KILL_S = 30.0  # none is begun with less time left
PATIENCE_S = 10.0  # until a writer's words are seen
CHECK_S = 0.02  # between a fill and reading it back, while the writer lives
BEFORE_KILL_S = 0.05
BEHIND_DEATH_S = 0.2
SLACK_BYTES = 64 << 20  # of free memory that others may take meanwhile
FAILURES = (ClusterError, StartFailed, RuntimeError, OSError, ValueError, subprocess.SubprocessError)


def metrics_from_samples(samples: Samples) -> Metrics:
    """See the module. Medians and maxima over rounds. Raises: ValueError for a writer that nobody saw write."""
    killed = [s for s in samples if s["kind"] in KINDS]
    if not all(s["wrote_before"] for s in killed):
        raise ValueError("a round in which the writer was not seen to write proves nothing")
    stopped = [s for s in killed if s["stopped"]]
    out: Metrics = {
        "rounds_count": len(killed),
        "late_words_count": sum(s["late_words"] for s in killed),
        "looked_at_bytes": sum(s["looked_at_bytes"] for s in killed),
        "stopped_rounds_count": len(stopped),
        "stopped_wrote_on_count": sum(s["wrote_on"] for s in stopped),
        "unfreed_count": sum(s["freed_ms"] is None for s in killed),
    }
    if killed:
        out["fill_max_ms"] = max(s["filled_ms"] for s in killed)
    for kind in (*KINDS, "engine"):
        mine = [s for s in samples if s["kind"] == kind]
        if mine:
            out[f"{kind}_dead_ms"] = quantile([s["dead_ms"] for s in mine], 0.5)
            out[f"{kind}_dead_max_ms"] = max(s["dead_ms"] for s in mine)
        freed = [s["freed_ms"] for s in mine if s.get("freed_ms") is not None]
        if freed:
            out[f"{kind}_freed_ms"] = quantile(freed, 0.5)
    engines = [s for s in samples if s["kind"] == "engine"]
    if engines:
        out["engine_held_bytes"] = quantile([s["held_bytes"] for s in engines], 0.5)
        out["engine_later_bytes"] = quantile([s["later_bytes"] for s in engines], 0.5)
        out["engine_heirs_count"] = max(s["heirs"] for s in engines)
        out["engine_rounds_count"] = len(engines)
    return out


def kill_round(lender: Lender, kind: str, stopped: bool) -> dict[str, Any]:
    """One writer, killed; its sample. It is gone whatever happens. Raises: FAILURES."""
    free = lender.free_bytes()
    writer = Child("writer", dies_with_us=True)
    try:
        lend(writer, lender.pages)
        lender.begin(writer, kind)
        found = lender.overwritten_words(CHECK_S, PATIENCE_S)
        if not found:
            raise RuntimeError("the writer's words were not seen")
        pidfd = os.pidfd_open(writer.pid)
        try:
            if stopped:
                stop(pidfd)
            wrote_on = lender.changes(BEFORE_KILL_S)
            if not (wrote_on or stopped):
                raise RuntimeError("the writer's words did not change any more before the kill")
            begin_s, dead_s = kill(pidfd)
        finally:
            os.close(pidfd)
        lender.fill()
        filled_s = time.monotonic()
        freed_s = _wait(lender, free - SLACK_BYTES, filled_s + BEHIND_DEATH_S)
        late, first = lender.strange_words()
    finally:
        writer.kill()
    return {
        "kind": kind, "stopped": stopped, "wrote_before": True, "wrote_before_words": found, "wrote_on": wrote_on,
        "dead_ms": ms(dead_s - begin_s), "filled_ms": ms(filled_s - dead_s),
        "freed_ms": None if freed_s is None else ms(freed_s - begin_s),
        "late_words": late, "late_first": first, "looked_at_bytes": lender.size_bytes,
    }  # fmt: skip


def _wait(lender: Lender, wanted_bytes: int, end_s: float) -> float | None:
    """Until end_s; when so much was free."""
    freed_s = None
    while (now_s := time.monotonic()) < end_s:
        if freed_s is None and lender.free_bytes() >= wanted_bytes:
            freed_s = time.monotonic()
        time.sleep(min(0.001, end_s - now_s))
    return freed_s


def missing(options: argparse.Namespace, samples: Samples) -> list[dict[str, Any]]:
    """What is not measured yet, as the beginnings of samples."""
    wanted: list[dict[str, Any]] = [
        {"kind": kind, "stopped": stopped, "round": number}
        for number in range(options.rounds)
        for kind in KINDS
        for stopped in (False, True)
    ]
    if options.engine:
        wanted += [{"kind": "engine", "round": number} for number in range(ENGINE_ROUNDS)]
    return [key for key in wanted if not any(key.items() <= s.items() for s in _flat(samples))]


def _flat(samples: Samples) -> list[dict[str, Any]]:
    return [{name: s[name] for name in ("kind", "stopped", "round") if name in s} for s in samples]


def measure(options: argparse.Namespace, todo: Sequence[dict[str, Any]], progress: Progress) -> None:
    """All that is to do, as far as time goes. A round that fails says so. Raises: VmmError without a GPU."""
    driver = CudaVmmDriver(0)
    writers = [key for key in todo if key["kind"] in KINDS]
    if writers:
        lender = Lender(driver, options.gib)
        try:
            for key in writers:
                if _may_begin(key, options.end_s - KILL_S):
                    _try(key, progress, lambda key=key: kill_round(lender, key["kind"], key["stopped"]))
        finally:
            lender.close()
    with tempfile.TemporaryDirectory(prefix="quire-killed-", ignore_cleanup_errors=True) as name:
        model: Path | None = None
        for key in todo:
            if key["kind"] == "engine" and _may_begin(key, options.end_s - ENGINE_S):
                model = model or model_folder(Path(name) / "llama-8b-shape")
                at = (key["round"], Path(name), model, driver, options.end_s)
                _try(key, progress, lambda at=at: engine_round(*at))


def _may_begin(key: dict[str, Any], last_s: float) -> bool:
    if time.monotonic() <= last_s:
        return True
    print(f"  {said(key)}: no time left", flush=True)
    return False


def _try(key: dict[str, Any], progress: Progress, work: Callable[[], dict[str, Any]]) -> None:
    try:
        progress.add({**key, **work()})
    except FAILURES as error:
        print(f"  FAILED {said(key)}: {type(error).__name__}: {error}", flush=True)


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8, help="of four writers each")
    parser.add_argument("--gib", type=int, default=1, help="of lent pages")
    parser.add_argument(
        "--engine", action="store_true", help=f"{ENGINE_ROUNDS} engines too, about 2 minutes each"
    )
    parser.add_argument("--keep", type=Path, help="file of what is measured; a later call goes on there")
    parser.add_argument("--budget-s", type=float, default=900.0, help="nothing is begun that may end later")
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    options.end_s = time.monotonic() + options.budget_s
    return options


def main(argv: Sequence[str]) -> int:
    """Measure, and write the result file once every writer was killed.

    Exit status 1: something asked for lacks, or a dead writer wrote; 2: there is no GPU.
    """
    options = parsed(argv)
    progress = Progress(options.keep, said)
    if todo := missing(options, progress.samples):
        try:
            measure(options, todo, progress)
        except VmmUnavailable as error:
            print(f"not measured: {error.message}")
            return 2
        except FAILURES as error:  # the lender's own pages or context
            print(f"FAILED: {type(error).__name__}: {error}", flush=True)
    lacking = missing(options, progress.samples)
    metrics = metrics_from_samples(progress.samples)
    if not any(key["kind"] in KINDS for key in lacking):
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_killed", *argv]),
            settings={"rounds": options.rounds, "gib": options.gib}
            | ({"engine_flags": shlex.join(ENGINE_FLAGS), "model": LLAMA_8B} if options.engine else {}),
            metrics=metrics,
            samples=progress.samples,
            folder=Path(options.out),
            commit=options.commit,
        )
        print(f"wrote {path.name}")
    for key in sorted(metrics):
        print(f"{key:26} {metrics[key]:18.3f}")
    print(f"not measured yet: {', '.join(map(said, lacking))}" if lacking else "all is measured")
    late = metrics["late_words_count"]
    if late:
        print(f"NOT SO: {late:.0f} words were written behind a death")
    return int(bool(lacking) or late > 0)


def said(row: dict[str, Any]) -> str:
    """A sample, or the beginning of one, in a line."""
    name = f"{row['kind']}{' stopped' if row.get('stopped') else ''} {row['round']}"
    told = {key: row[key] for key in row if key not in ("kind", "stopped", "round", "late_first")}
    return f"{name}: {told}" if told else name


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what we started is ended on the way out
    sys.exit(main(sys.argv[1:]))
