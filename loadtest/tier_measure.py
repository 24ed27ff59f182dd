"""What the measurements of one engine with two tiers behind it share: requests, plain copies, options, the result file.

bench_context_reload and bench_long_prompt: a peer GPU's memory and host memory in turn, one engine, over HTTP.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, write_result

CEILING_S = 150.0

Measure = Callable[[argparse.Namespace, Path], Samples]


def streamed(client: httpx.Client, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Events of one completion as they come; it is sent when the first is asked for, and encoded before this returns.

    Raises: RuntimeError with the server's words.
    """
    return _events(client, msgspec.json.encode(body))


def _events(client: httpx.Client, raw: bytes) -> Iterator[dict[str, Any]]:
    headers = {"content-type": "application/json"}
    with client.stream("POST", "/v1/completions", content=raw, headers=headers) as response:
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            yield event


def add(samples: list[dict[str, Any]], sample: dict[str, Any]) -> None:
    """Keep it and say it."""
    samples.append(sample)
    print(f"  {json.dumps(sample)}", flush=True)


def ceilings(device: str, num_bytes: int) -> list[dict[str, Any]]:
    """Of plain copies of so many bytes from either tier, by a process of its own."""
    words = [sys.executable, "-m", "loadtest.plain_copies", device, str(num_bytes)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=CEILING_S, check=False)
    if done.returncode:
        raise RuntimeError(f"plain copies failed:\n{done.stderr[-2000:]}")
    return [{"kind": "ceiling", **row} for row in json.loads(done.stdout)]


def say_since(what: str, begin_s: float) -> None:
    """How long it took, by time.monotonic()."""
    print(f"{what} after {time.monotonic() - begin_s:.0f} s", flush=True)


def parser_of(description: str | None, counts: Sequence[str], quick: str) -> argparse.ArgumentParser:
    """Options that both have, and an integer for each of `counts`, None where it is not given."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--quick", action="store_true", help=f"{quick}; writes no result file")
    parser.add_argument("--model-dir", default="", help="a real model instead of the 8B shape")
    for name in counts:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=None)
    parser.add_argument("--set", action="append", default=[], help="cluster setting, e.g. dtype=bfloat16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="")
    return parser


def fill_in(options: argparse.Namespace, defaults: Mapping[str, int]) -> None:
    """The device's defaults for what was not given."""
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def run(
    name: str,
    claim: str,
    module: str,
    argv: Sequence[str],
    options: argparse.Namespace,
    measure: Measure,
    metrics_from_samples: Callable[[Samples], Metrics],
) -> int:
    """Measure in a folder that goes afterwards, say the metrics, write the result file unless it was a quick one."""
    with tempfile.TemporaryDirectory(prefix=f"quire-{name}-") as folder:
        samples = measure(options, Path(folder))
    metrics = metrics_from_samples(samples)
    for key, value in sorted(metrics.items()):
        print(f"{key:36} {value:12.3f}")
    if options.quick:
        return 0
    settings = {key: value for key, value in vars(options).items() if key not in ("out", "commit", "quick")}
    settings = {"shape": options.model_dir or "8B", "eager": options.device == "cuda", **settings}
    path = write_result(
        name, claim=claim, command=f"python -m {module} " + " ".join(argv), settings=settings,
        metrics=metrics, samples=samples, folder=options.out, commit=options.commit,
    )  # fmt: skip
    print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return 0
