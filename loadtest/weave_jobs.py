"""Runs the engines of bench_weave.py, each in a process, and keeps what they found, so that a run cut short goes on.

The file of `--keep` is written after each job; a run that finds it measures only what it lacks. It belongs to one
commit, GPU and set of sizes: another's is refused, not mixed in.
"""

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from loadtest.registry import ROOT

START_S = 25.0  # an engine that has less time left is not begun
GRACE_S = 10.0  # for the forking process to say that an engine took too long
IMPORT_LIMIT_S = {"cuda": 120.0, "cpu": 600.0}
NO_FLASHINFER = (
    "vLLM's own fusion of all-reduce and norm is FlashInfer's kernel, which is not installed where this ran: it is "
    "compiled at its first use, for minutes, with packages that are not in the bundle"
)


@dataclass(frozen=True, slots=True)
class Job:
    """One engine, or ("ffn") the products of one rank."""

    engine: str
    shape: str
    ranks: int
    layers: int

    @property
    def name(self) -> str:
        """In the file of what is kept."""
        return f"{self.engine} {self.shape}:{self.ranks}:{self.layers}"

    def about(self) -> dict[str, Any]:
        """Fields of its samples."""
        return {"engine": self.engine, "shape": self.shape, "ranks": self.ranks, "layers": self.layers}


class Kept:
    """Samples, and which jobs are done. Args: path: None keeps them in memory only; head: what they belong to."""

    def __init__(self, path: Path | None, head: dict[str, Any]) -> None:
        """Raises: ValueError when the file is another measurement's."""
        self._path, self._head = path, head
        self.done: list[str] = []
        self.samples: list[dict[str, Any]] = []
        if path is not None and path.is_file():
            found = json.loads(path.read_text())
            if found["head"] != json.loads(json.dumps(head)):
                raise ValueError(f"{path} is of another measurement: {found['head']}, not {head}")
            self.done, self.samples = found["done"], found["samples"]

    def add(self, job: Job, samples: list[dict[str, Any]], *, is_done: bool) -> None:
        """Of a job; what was there of it is forgotten."""
        self.samples = [one for one in self.samples if one["job"] != job.name]
        self.samples += [{**sample, "job": job.name} for sample in samples]
        if is_done:
            self.done.append(job.name)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps({"head": self._head, "done": self.done, "samples": self.samples}))
            part.replace(self._path)

    def plain(self) -> list[dict[str, Any]]:
        """For the result file."""
        return [{key: value for key, value in one.items() if key != "job"} for one in self.samples]


class ForkServer:
    """weave_fork.py, which imports vLLM once, and begins to when this is made."""

    def __init__(self, device: str, log: Path) -> None:
        self._log: IO[bytes] = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loadtest.weave_fork", device],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True,
        )  # fmt: skip
        self._limit_s = IMPORT_LIMIT_S[device]
        self._cannot: str | None = None

    def cannot(self) -> str:
        """Why each engine has to be a process of its own; "": it need not. Waits for the import."""
        if self._cannot is not None:
            return self._cannot
        first = self._hear(self._limit_s)
        print(f"vLLM imported: {first}", flush=True)
        why: str = first.get("cannot", "") if first else "it did not start"
        self._cannot = why
        return why

    def run(self, words: list[str], log: Path, limit_s: float) -> str:
        """Why the engine came to no good end; "": it did."""
        assert self._process.stdin is not None
        job = {"words": words, "log": str(log), "limit_s": limit_s}
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            why = self._cannot = f"it is gone: {error}"
            return why
        answer = self._hear(limit_s + GRACE_S)
        if answer is None:
            why = self._cannot = "it does not answer"
            return why
        return _why(answer["status"], answer["s"])

    def close(self) -> None:
        """Nothing is left."""
        _end_group(self._process)
        self._log.close()

    def _hear(self, limit_s: float) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
        line = self._process.stdout.readline() if ready else b""
        return json.loads(line) if line else None


def _why(status: int | None, seconds: float) -> str:
    if status is None:
        return f"took more than {seconds:.0f} s"
    return f"exit status {status}" if status else ""


@contextlib.contextmanager
def runner(device: str, folder: Path, *, may_fork: bool) -> Iterator["Runner"]:
    """For the engines of a measurement; nothing of them is left behind."""
    server = ForkServer(device, folder / "fork.log") if may_fork else None
    try:
        yield Runner(folder, server)
    finally:
        if server is not None:
            server.close()


@dataclass(slots=True)
class Runner:
    """Of engines, forked where that is possible."""

    folder: Path
    server: ForkServer | None

    def prepare(self, job: Job) -> None:
        """Wait for what its engine is forked from; products need none of it, and run meanwhile."""
        if job.engine != "ffn" and self.server is not None:
            self.server.cannot()

    def run(
        self, job: Job, module: str, words: list[str], limit_s: float
    ) -> tuple[list[dict[str, Any]], bool]:
        """Samples of a job, and whether it came to its end; a failure is a sample, too."""
        stem = job.name.replace(" ", "-").replace(":", "-")
        out, log = self.folder / f"{stem}.json", self.folder / f"{stem}.log"
        out.unlink(missing_ok=True)
        begin = time.monotonic()
        words = [str(out) if word == "OUT" else word for word in words]
        is_engine = module == "loadtest.weave_engine"
        if is_engine and self.server is not None and not self.server.cannot():
            why = self.server.run(words, log, limit_s)
        else:
            why = _run_alone([sys.executable, "-m", module, *words], log, limit_s)
        found = json.loads(out.read_text()) if out.is_file() else {"samples": [], "is_whole": False}
        samples = [{**job.about(), **sample} for sample in found["samples"]]
        print(f"{job.name}: {time.monotonic() - begin:.0f} s, {len(samples)} samples {why}", flush=True)
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        if not found["is_whole"]:
            wrong = [line for line in lines if "Error" in line or "error:" in line]
            print(*wrong[-8:], *lines[-12:], sep="\n", flush=True)
        else:
            print(*(line for line in lines if line.startswith("  ")), sep="\n", flush=True)
        if not samples:
            return [{"kind": "failed", **job.about(), "why": why or "no result"}], False
        return samples, bool(found["is_whole"])


def _run_alone(command: list[str], log: Path, limit_s: float) -> str:
    begin = time.monotonic()
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return _why(process.wait(limit_s), 0)
        except subprocess.TimeoutExpired:
            return _why(None, time.monotonic() - begin)
        finally:
            _end_group(process)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Its ranks, too, which are of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(20)


def impossible(job: Job, num_gpus: int, device: str) -> str:
    """Why a job need not be begun here; "": it can."""
    if job.engine == "ffn":
        return ""
    if device == "cuda" and job.ranks > num_gpus:
        return f"{job.ranks} GPUs are needed, {num_gpus} are here"
    if job.engine == "stock-fused" and find_spec("flashinfer") is None:
        return NO_FLASHINFER
    return ""


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """The most important first."""
    jobs: list[Job] = []
    for shape, ranks, layers in options.groups:
        if "ffn" in options.parts:
            jobs.append(Job("ffn", shape, ranks, layers))
        if options.parts & {"steps", "serving"}:
            jobs += [Job(engine, shape, ranks, layers) for engine in options.engines]
    return jobs
