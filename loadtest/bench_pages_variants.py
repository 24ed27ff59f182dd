"""vLLM in the mempool's pages, on one GPU: blocks of 32 tokens, and checksums of every page, beside the defaults.

    python -m loadtest.bench_pages_variants [--quick] [--keep FILE] [--budget-s 520] [--out FOLDER] [--commit HEAD]
                                            writes loadtest/results/h200-vmm-variants.json

8B shape, random weights. Load and engine are those of bench_pages.py (pages_engine.py). Each variant has a mempool and
an engine of its own, and they take turns:

    default         blocks of 64 tokens, checksums of 1 block in 1,000
    block-32        blocks of 32 tokens
    checksums-all   checksums of every sealed page
    default         again

All mempools have the same host memory behind the GPU: one without it maps no page of the GPU, and so sums none.
Ratios are the variant over the default (the mean of its two runs): throughput of cold and of cached prompts, p99 of the
steps in which all requests decode, median time to first output; without `cold` or `cached` in its name, the worse of
the two. `default_repeat_...`: one default over the other, the worse way round: what the noise is.
`pages_summed_count`, `pages_checked_count`, `pages_skipped_count`, `pages_unread_count`: of checksums-all; skipped were
sealed while 4,096 waited for their sums, unread could not be read. `pages_wrong_count`: of all variants, copies too.
`..._leased_ratio`: of the cached prompts, those whose lease came in time (worker.acquire_timeout_ms, 250), which checks
make late; the engine goes on without the others.
Over several calls --keep goes on where the last one stopped. Exit status 1: a variant lacks, a page was wrong, or none
was looked at.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from loadtest.bench_pages import LLAMA_8B, model_folder, said
from loadtest.processes import Fleet, StartFailed, free_port
from loadtest.progress import Progress
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, quantile, write_result

NAME = "h200-vmm-variants"
CLAIM = (
    "What blocks of 32 tokens, and checksums of every sealed page, cost beside the defaults of 64 tokens and 1 block "
    "in 1,000, in one run; every page is what it was when it was sealed."
)


class Variant(NamedTuple):
    """What differs from the default. `metric`: how its metrics begin."""

    metric: str
    engine: tuple[str, ...] = ()
    mempool: tuple[str, ...] = ()


VARIANTS = {
    "default": Variant("default"),
    "block-32": Variant("block_32", engine=("--block-tokens", "32")),
    "checksums-all": Variant("checksums", mempool=("--checksum-rate", "1")),
}
ORDER = "default,block-32,checksums-all,default"
KINDS = ("cold", "cached")
RATIOS = {  # of a figure, and which of two ratios is the worse one
    "throughput": ("tokens_per_s", min),
    "step_p99": ("step_p99_ms", max),
    "ttft": ("ttft_p50_ms", max),
}
WRONG = ("checks_pages_corrupt", "checks_copies_wrong")
ERRORS = ('"level":"error"', '"page_not_summed"', "Traceback")  # in a line of a mempool's log
SUMS_S = 15.0  # for sums that are still due when the engine has ended
GET_TIMEOUT_S = 10.0


# -- metrics --------------------------------------------------------------------------------------------


def metrics_from_samples(samples: Samples) -> Metrics:
    """See the module. Of runs that came to their end; what was not measured has no metric."""
    out: Metrics = {}
    means: dict[str, Metrics] = {}
    for name, variant in VARIANTS.items():
        facts = _facts(samples, name)
        if not facts:
            continue
        means[name] = _means([figures(samples, one) for one in facts])
        out |= {f"{variant.metric}_{key}": value for key, value in means[name].items()}
        asked = sum(num_asked(samples, one) for one in facts)
        if asked:
            out[f"{variant.metric}_leased_ratio"] = sum(map(num_leased, facts)) / asked
        if name != "default" and "default" in means:
            ratios = _ratios(means[name], means["default"])
            out |= {f"{variant.metric}_{key}": value for key, value in ratios.items()}
    return out | _repeat(samples) | _checks(samples)


def _facts(samples: Samples, *names: str) -> list[Mapping[str, Any]]:
    """Of the runs of these variants that came to their end."""
    return [s for s in samples if s["kind"] == "facts" and s["variant"] in (names or VARIANTS)]


def _rows(samples: Samples, facts: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    """Rounds of one run."""
    key = (kind, facts["variant"], facts["run"])
    return [s for s in samples if (s["kind"], s["variant"], s["run"]) == key]


def figures(samples: Samples, facts: Mapping[str, Any]) -> Metrics:
    """Of one run: the median rate of its rounds; steps and first outputs of all rounds together."""
    out: Metrics = {}
    for kind in KINDS:
        mine = _rows(samples, facts, kind)
        steps = [step for s in mine for step in s["steps_ms"]]
        for key, share, values in (
            ("tokens_per_s", 0.5, [s["output_tokens"] / s["wall_s"] for s in mine]),
            ("step_p50_ms", 0.5, steps),
            ("step_p99_ms", 0.99, steps),
            ("ttft_p50_ms", 0.5, [first for s in mine for first in s["ttft_ms"]]),
        ):
            if values:  # a round in which never all decoded at once has no steps
                out[f"{kind}_{key}"] = quantile(values, share)
    return out


def _means(found: Sequence[Metrics]) -> Metrics:
    return {key: fmean(one[key] for one in found) for key in found[0] if all(key in one for one in found)}


def _ratios(mine: Metrics, base: Metrics) -> Metrics:
    out: Metrics = {}
    for name, (figure, worse) in RATIOS.items():
        keys = {kind: f"{kind}_{figure}" for kind in KINDS}
        found = {kind: mine[key] / base[key] for kind, key in keys.items() if key in mine and base.get(key)}
        out |= {f"{kind}_{name}_ratio": ratio for kind, ratio in found.items()}
        if len(found) == len(KINDS):
            out[f"{name}_ratio"] = worse(found.values())
    return out


def _repeat(samples: Samples) -> Metrics:
    found = [figures(samples, one) for one in _facts(samples, "default")]
    if len(found) < 2:
        return {}
    there, back = _ratios(found[-1], found[0]), _ratios(found[0], found[-1])
    out: Metrics = {}
    for name, (_, worse) in RATIOS.items():
        key = f"{name}_ratio"
        if key in there and key in back:
            metric = "default_repeat_ratio" if name == "throughput" else f"default_repeat_{key}"
            out[metric] = worse(there[key], back[key])
    return out


def _checks(samples: Samples) -> Metrics:
    facts, mine = _facts(samples), _facts(samples, "checksums-all")
    out: Metrics = {"pages_wrong_count": sum(map(num_wrong, facts))} if facts else {}
    for what in ("summed", "checked", "skipped") if mine else ():
        out[f"pages_{what}_count"] = sum(one["checks"][f"checks_pages_{what}"] for one in mine)
    if mine:
        out["pages_unread_count"] = sum(one["unread"] for one in mine)
    return out


def num_wrong(facts: Mapping[str, Any]) -> int:
    """Pages and copies of a run that were not what they had been."""
    return sum(facts["checks"][name] for name in WRONG)


def num_asked(samples: Samples, facts: Mapping[str, Any]) -> int:
    """Cached prompts of a run."""
    return sum(len(s["ttft_ms"]) for s in _rows(samples, facts, "cached"))


def num_leased(facts: Mapping[str, Any]) -> int:
    """Those that had a lease."""
    return sum(count for name, count in facts["leased"].items() if name.startswith("cached-"))


# -- measuring ------------------------------------------------------------------------------------------


def run_variant(name: str, number: int, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Samples of one mempool and its engine, and what the mempool counted (`checks`).

    Raises: SubprocessError, StartFailed, OSError, ValueError, KeyError.
    """
    variant, begin = VARIANTS[name], time.monotonic()
    folder, admin = folder / str(number), f"127.0.0.1:{free_port()}"
    with Fleet(folder) as fleet:
        flags = {"socket": folder / "pool.sock", "admin-listen": admin, "dram-bytes": options.dram_bytes}
        mempool = [sys.executable, "-m", "services.mempool", *variant.mempool]
        mempool += [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        fleet.start("mempool", mempool, ready_url=f"http://{admin}/health")
        out = folder / "engine.json"
        engine = [sys.executable, "-m", "loadtest.pages_engine", "pages", str(options.model_dir), str(out)]
        engine += ["--device", options.device, "--mempool-socket", str(flags["socket"])]
        engine += [*shlex.split(options.engine_flags), *variant.engine]
        limit_s = max(1.0, min(options.engine_timeout_s, options.end_s - begin))
        log = folder / "mempool.log"
        try:
            subprocess.run(engine, cwd=ROOT, check=True, timeout=limit_s)
            counted = checks_of(admin)
        finally:
            say_errors(log)
        counted["unread"] = log.read_text(errors="replace").count('"page_not_summed"')
    found = json.loads(out.read_text())
    common = {"variant": name, "run": number}
    samples = [{**common, **sample} for sample in found.pop("samples")]
    took_s = round(time.monotonic() - begin, 1)
    return [*samples, {**common, "kind": "facts", "took_s": took_s, **found, **counted}]


def checks_of(admin: str) -> dict[str, Any]:
    """The mempool's counters of checksums, once no page waits for its sum, and which of its spaces it has mapped.

    Its own status has them alone: what an engine or a client may ask it for does not. Raises: OSError, ValueError,
    KeyError.
    """
    until_s = time.monotonic() + SUMS_S
    while True:
        with urllib.request.urlopen(f"http://{admin}/status", timeout=GET_TIMEOUT_S) as reply:
            status = json.load(reply)
        if not status["checks_waiting"] or time.monotonic() > until_s:
            checks = {key: value for key, value in status["counters"].items() if key.startswith("checks_")}
            mapped = status["copies"].get("spaces", {})
            return {"checks": checks, "checks_waiting": status["checks_waiting"], "mapped": mapped}
        time.sleep(0.2)


def say_errors(log: Path) -> None:
    """The last of a mempool's."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    bad = [line[:300] for line in lines if any(mark in line for mark in ERRORS)]
    if bad:
        print("the mempool's errors:", *bad[-8:], sep="\n", flush=True)


def measure(options: argparse.Namespace, folder: Path, progress: Progress) -> None:
    """The variants in turn, those that are not measured yet. One that fails leaves the others."""
    for number, name in enumerate(options.order):
        if progress.has(kind="facts", variant=name, run=number):
            continue
        if time.monotonic() > options.end_s - options.engine_s:
            print(f"{name} {number}: no time left", flush=True)
            continue
        try:
            rows = run_variant(name, number, folder, options)
        except (subprocess.SubprocessError, StartFailed, OSError, ValueError, KeyError) as error:
            print(f"{name} {number}: {type(error).__name__}: {error}", flush=True)
            continue
        for row in rows:
            progress.add(row)


# -- the command ----------------------------------------------------------------------------------------


def missing(options: argparse.Namespace, samples: Samples) -> list[str]:
    """What is not measured yet."""
    there = {(s["variant"], s["run"]) for s in samples if s["kind"] == "facts"}
    return [f"{name} {number}" for number, name in enumerate(options.order) if (name, number) not in there]


def faults(samples: Samples) -> list[str]:
    """What was wrong with pages, or with looking at them."""
    out: list[str] = []
    for one in _facts(samples):
        name = f"{one['variant']} {one['run']}"
        if num_wrong(one):
            out.append(f"{name}: {num_wrong(one)} pages or copies were wrong")
        looked = min(one["checks"]["checks_pages_summed"], one["checks"]["checks_pages_checked"])
        if one["variant"] == "checksums-all" and not looked:
            out.append(f"{name}: no page was looked at; mapped by the mempool: {one['mapped']}")
    return out


def table(samples: Samples) -> str:
    """A line for each run: output tokens per second, ms, cached prompts with a lease, pages."""
    keys = [f"{kind}_{figure}" for figure, _ in RATIOS.values() for kind in KINDS]
    heads = ["cold tok/s", "cached", "cold p99", "cached", "cold TTFT", "cached"]
    heads += ["block", "leased", "summed", "checked", "wrong"]
    lines = [f"{'':17}" + "".join(f"{head:>11}" for head in heads)]
    for one in _facts(samples):
        found, checks = figures(samples, one), one["checks"]
        cells = [f"{found[key]:.1f}" if key in found else "-" for key in keys]
        cells += [str(one["block_tokens"]), f"{num_leased(one)}/{num_asked(samples, one)}"]
        cells += [
            str(checks["checks_pages_summed"]),
            str(checks["checks_pages_checked"]),
            str(num_wrong(one)),
        ]
        lines.append(f"{one['run']} {one['variant']:15}" + "".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a round of each variant; no result file")
    parser.add_argument("--order", default=ORDER, help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--keep", type=Path, help="file of what is measured; a later call goes on there")
    parser.add_argument("--budget-s", type=float, default=3_000.0, help="no engine begins that may end later")
    parser.add_argument("--engine-s", type=float, default=90.0, help="what an engine may take")
    parser.add_argument("--engine-timeout-s", type=float, default=300.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dram-bytes", type=int, default=8 << 30, help="of host memory, of every mempool")
    parser.add_argument("--model-dir", default="")
    parser.add_argument("--engine-flags", default="", help="for pages_engine, e.g. '--requests 64'")
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    options.order = list(VARIANTS) if options.quick else options.order.split(",")
    if unknown := [name for name in options.order if name not in VARIANTS]:
        parser.error(f"--order: {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    options.end_s = time.monotonic() + options.budget_s
    options.given_model = bool(options.model_dir)
    if options.quick:
        options.engine_flags += " --rounds 1"
    return options


def main(argv: Sequence[str]) -> int:
    """Measure, and write the result file once all variants are there. Exit status: see the module."""
    options = parsed(argv)
    progress = Progress(options.keep, said)
    with tempfile.TemporaryDirectory(prefix="quire-variants-") as name:
        options.model_dir = options.model_dir or model_folder(Path(name) / "llama-8b-shape")
        measure(options, Path(name), progress)
    lacking, wrong = missing(options, progress.samples), faults(progress.samples)
    metrics = metrics_from_samples(progress.samples)
    for key in sorted(key for key in metrics if key.endswith(("_ratio", "_count"))):
        print(f"{key:38} {metrics[key]:16.4f}")
    if not options.quick and not lacking:
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_pages_variants", *argv]),
            settings={
                "order": options.order, "variants": {key: each._asdict() for key, each in VARIANTS.items()},
                "engine_flags": options.engine_flags, "dram_bytes": options.dram_bytes,
                "model": "" if options.given_model else LLAMA_8B,
            },
            metrics=metrics,
            samples=progress.samples,
            folder=Path(options.out),
            commit=options.commit,
        )  # fmt: skip
        print(f"wrote {path.name}")
    print(*wrong, f"not measured yet: {', '.join(lacking)}" if lacking else "all is measured", sep="\n")
    print(table(progress.samples))
    return int(bool(lacking or wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
