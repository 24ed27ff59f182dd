"""Result files: one JSON file per measurement, written by the script that measured it.

{name, claim, script, command, commit, dirty, date, machine{}, settings{}, metrics{}, samples[]}. Metrics are
what the script's metrics_from_samples makes of the samples, nothing else. Metric keys end in a unit (UNIT).
Where all that is more than MAX_BYTES, the samples lie compressed in samples/NAME.json.xz (`xzcat` shows them) and
the file has their path, `samples_file`, instead; load_result reads both the same.
"""

import json
import lzma
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loadtest.registry import RESULTS, ROOT, script_of
from shared import json_text

UNIT = re.compile(
    r"_(ns|us|ms|s|bytes|mib|gib|tokens|blocks|pages|chunks|requests|count|percent|points|watt|ratio|gb|tflop|tokens)"
    r"(_per_(s|ms|us|request|chunk|token|step|span|page|block|call|core))?\Z"
)

# how a measurement on another machine comes home is no part of it, nor in which folder it kept what was finished
_AWAY = re.compile(r" --(?:out|commit) \S+|(?<= --keep )\S*/|(?<= --resume )\S*/")

MAX_BYTES = 1 << 14  # of a result file with its samples; longer ones are for machines alone
# results of whose times only quantiles are taken: kept in order of size, they take a ninth of the room
SORTED = frozenset({"gateway-cpu", "gateway-peers", "prompt-tree"})
SORTED_FROM = 100  # numbers in a list

Samples = Sequence[Mapping[str, Any]]
Metrics = dict[str, float]


def check_metrics(metrics: Mapping[str, float]) -> list[str]:
    """What is wrong with names or values; [] when nothing is."""
    wrong = [f"metric {key!r} does not end in a unit" for key in metrics if not UNIT.search(key)]
    for key, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            wrong.append(f"metric {key!r} is {value!r}, not a finite number")
    return wrong


def write_result(
    name: str,
    *,
    claim: str,
    command: str,
    settings: Mapping[str, Any],
    metrics: Metrics,
    samples: Samples,
    folder: Path = RESULTS,
    commit: str = "",
) -> Path:
    """Write `folder`/NAME.json, long samples beside it; what was there moves to history/, whole and compressed.

    `commit` names the checkout where there is only a copy of its files, whatever repository they lie in there.
    Raises: ValueError on bad metrics, or where what was there cannot be read; then nothing has changed.
    """
    if wrong := check_metrics(metrics):
        raise ValueError("; ".join(wrong))
    head, dirty = (commit, False) if commit else commit_of(ROOT)
    result = {
        "name": name,
        "claim": claim,
        "script": script_of(name),
        "command": _AWAY.sub("", command),
        "commit": head,
        "dirty": dirty,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": dict(settings),
        "metrics": {key: metrics[key] for key in sorted(metrics)},
    }
    path = folder / f"{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    if path.exists():
        _retire(path)
    _store(path, result, samples)
    return path


def load_result(path: Path) -> dict[str, Any]:
    """A result file with its samples, wherever they lie; another JSON file as it is.

    Raises: OSError without the file; ValueError when it, or the file of its samples, cannot be read.
    """
    try:
        result: dict[str, Any] = json_text.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    if isinstance(result, dict) and "samples_file" in result:
        name = result.pop("samples_file")
        if not isinstance(name, str):
            raise ValueError(f"{path.name} has its samples in {name}, which is no name of a file")
        try:
            result["samples"] = json.loads(lzma.decompress((path.parent / name).read_bytes()))
        except (OSError, lzma.LZMAError, ValueError) as error:
            raise ValueError(
                f"{path.name} has its samples in {name}, which cannot be read: {error}"
            ) from error
    return result


def _store(path: Path, head: Mapping[str, Any], samples: Samples) -> None:
    if path.stem in SORTED:
        samples = [_by_size(sample) for sample in samples]
    text = _dump(head, samples)
    if len(text) > MAX_BYTES:
        name = f"samples/{path.stem}.json.xz"
        (path.parent / name).parent.mkdir(exist_ok=True)
        # xz has neither a date nor a name: the same samples are the same bytes
        (path.parent / name).write_bytes(lzma.compress(f"[\n{_lines(samples)}\n]\n".encode(), preset=9))
        text = json.dumps({**head, "samples_file": name}, indent=2) + "\n"
    path.write_text(text)


def _by_size(value: Any) -> Any:
    """Long lists of numbers, wherever they lie in it."""
    if isinstance(value, Mapping):
        return {key: _by_size(inner) for key, inner in value.items()}
    if not isinstance(value, list) or len(value) < SORTED_FROM:
        return value
    is_numbers = all(isinstance(one, int | float) for one in value)
    return sorted(value) if is_numbers else value


def _dump(head: Mapping[str, Any], samples: Samples) -> str:
    """Readable head, one line per sample."""
    text = json.dumps(head, indent=2)[:-2]
    return f'{text},\n  "samples": [\n{_lines(samples)}\n  ]\n}}\n'


def _lines(samples: Samples) -> str:
    return ",\n".join("    " + json.dumps(sample, separators=(",", ":")) for sample in samples)


def _retire(path: Path) -> None:
    old = load_result(path)
    stamp = re.sub(r"[^0-9T]", "", old["date"].partition("+")[0])
    target = path.parent / "history" / f"{path.stem}-{stamp}-{(old['commit'] or 'nocommit')[:8]}.json.xz"
    target.parent.mkdir(exist_ok=True)
    samples = old.pop("samples")
    target.write_bytes(lzma.compress(_dump(old, samples).encode()))
    path.unlink()
    (path.parent / "samples" / f"{path.name}.xz").unlink(missing_ok=True)


def commit_of(root: Path) -> tuple[str, bool]:
    """(HEAD, whether tracked files differ from it); ("", True) outside a git checkout."""
    head = git(root, "rev-parse", "HEAD")
    if head is None:
        return "", True
    return head, bool(git(root, "status", "--porcelain", "--untracked-files=no"))


def git(root: Path, *args: str) -> str | None:
    """Output of a git command, stripped; None when it fails or git is missing."""
    if shutil.which("git") is None:
        return None
    done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def machine() -> dict[str, Any]:
    """What a reader must know of the machine to read a figure: no names, no addresses."""
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "load_average_1min": round(os.getloadavg()[0], 2),
    }
    gpus = gpu_names()
    if gpus:
        found["gpu"] = gpus
        found["driver"] = _nvidia("driver_version")[0]
    return found


def gpu_names() -> list[str]:
    """Of every GPU here its name, e.g. "NVIDIA H200"; [] without one."""
    return _nvidia("name")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.machine()


def _nvidia(field: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed. Raises: ValueError on no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
