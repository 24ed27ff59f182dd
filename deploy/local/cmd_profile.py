"""`quire profile`: the highest rate within an SLO, free memory there, what bursts need; or a callable's batches."""

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer
from rich.table import Table

from deploy.local import addresses, config
from deploy.local.terminal import FAILED, OK, connect, err, fail, out, shorten
from shared.errors import SettingsError

if TYPE_CHECKING:
    from loadtest.profiler.core.profile import Profile, Settings
    from loadtest.profiler.core.search import SearchLimits
    from loadtest.profiler.requests import Lengths
    from loadtest.profiler.runner import Runner, Told

WORKERS = ("prefill-", "decode-", "colocated-")
INTERRUPTED = 130  # exit code of what Ctrl-C stopped
SHEET = "data sheet"  # in the words of costs that come from one
BIG = ("runs", "series")  # of the file; `--json` leaves them out

Url = Annotated[str, typer.Option(help="Gateway of a cluster that runs elsewhere. Default: the running one.")]
Status = Annotated[
    list[str] | None, typer.Option(help="With --url: status page of each worker, http://HOST:PORT/status.")
]
Simulate = Annotated[
    str,
    typer.Option(help="Simulate this model: llama-8b, qwen-32b, llama-70b, or a folder with a config.json."),
]
Callable_ = Annotated[
    str, typer.Option("--callable", help="MODULE:FUNCTION that runs one batch: f(batch_size), with PyTorch.")
]
Gpu = Annotated[str, typer.Option(help="Simulated: h200, h100, a100 or l40s.")]
Tp = Annotated[int, typer.Option(help="Simulated: GPUs of one engine. Costs of another TP are scaled.")]
Cost = Annotated[
    str,
    typer.Option(
        help="Simulated: file of `quire model show --json`, or a cost-model result. Default: measured costs, or a data "
        "sheet."
    ),
]
LocalPolicy = Annotated[
    Literal["fcfs", "cfs"],
    typer.Option(
        help="Simulated: with cfs bursts are run in fair slices, too: their TTFT and their swap space."
    ),
]
SwapGbPerS = Annotated[float, typer.Option(help="Simulated, with cfs: to swap space and back.")]
MemoryTokens = Annotated[int, typer.Option(help="Simulated: KV of the engine. Default: what fits.")]
Chunk = Annotated[int, typer.Option(help="Simulated: tokens of a step. A running cluster has its own.")]
TtftMs = Annotated[float, typer.Option(help="Limit of the time to the first token.")]
TbtMs = Annotated[float, typer.Option(help="Limit of the P99 of gaps between tokens.")]
TtftShare = Annotated[float, typer.Option(help="Of the requests that must keep --slo-ttft-ms.")]
Rates = Annotated[str, typer.Option(help="LOW:HIGH, requests/s: where the search begins.")]
MaxRate = Annotated[float, typer.Option(help="No higher rate is tried, requests/s.")]
Step = Annotated[float, typer.Option(help="The rate is found to so many requests/s.")]
Repeats = Annotated[int, typer.Option(help="Runs that decide each side of the knee, odd.")]
Factors = Annotated[str, typer.Option(help="Times the stable rate; the first one's need decides.")]
BurstS = Annotated[float, typer.Option(help="Length of a burst.")]
Threshold = Annotated[int, typer.Option(help="A producer has more than this free.")]
LengthsOf = Annotated[
    str, typer.Option(help="Workload whose lengths are used (`python -m loadtest.drive --list`).")
]
Trace = Annotated[Path | None, typer.Option(help="Lengths of a trace instead: Mooncake JSONL or Azure CSV.")]
Scale = Annotated[float, typer.Option(help="Of all lengths.")]
Context = Annotated[
    int,
    typer.Option(
        help="Longer requests are cut to so many tokens, and to the served model's; 0: to that only."
    ),
]
Seconds = Annotated[float, typer.Option(help="Arrivals of a run, at least.")]
Requests = Annotated[int, typer.Option(help="Requests of a run, at least.")]
MaxBatch = Annotated[int, typer.Option(help="Callable: largest batch.")]
Device = Annotated[str, typer.Option(help="Callable: cpu or cuda. Default: cuda where there is one.")]
MaxLag = Annotated[
    float,
    typer.Option(help="A run whose requests go out later than this, ms at P99, says nothing and ends it."),
]
Seed = Annotated[int, typer.Option(help="Of arrivals and tokens.")]
Out = Annotated[Path, typer.Option("--out", help="The profile, which `quire place` reads.")]
Plots = Annotated[Path | None, typer.Option(help="Folder for plots (AQUA's Figures 4 and 7).")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")]


def profile(
    url: Url = "",
    status: Status = None,
    simulate: Simulate = "",
    callable_: Callable_ = "",
    gpu: Gpu = "h200",
    tp: Tp = 1,
    cost: Cost = "",
    memory_tokens: MemoryTokens = 0,
    local_policy: LocalPolicy = "fcfs",
    swap_gb_per_s: SwapGbPerS = 200.0,
    chunk: Chunk = 512,
    slo_ttft_ms: TtftMs = 1_000.0,
    slo_tbt_ms: TbtMs = 100.0,
    ttft_share: TtftShare = 0.9,
    rates: Rates = "1:10",
    max_rate: MaxRate = 256.0,
    step: Step = 0.5,
    repeats: Repeats = 3,
    burst: Factors = "2,3,5",
    burst_s: BurstS = 60.0,
    threshold_bytes: Threshold = 10_000_000_000,
    lengths: LengthsOf = "sharegpt",
    trace: Trace = None,
    scale: Scale = 1.0,
    context: Context = 8_192,
    seconds: Seconds = 60.0,
    requests: Requests = 150,
    max_batch: MaxBatch = 1_024,
    device: Device = "",
    max_lag_ms: MaxLag = 100.0,
    seed: Seed = 1,
    target: Out = Path("profile.json"),
    plots: Plots = None,
    as_json: AsJson = False,
) -> None:
    """Find the highest rate a model keeps within an SLO, and whether it then lends memory or borrows it in bursts.

    On the running cluster, in the simulator (--simulate), or by batches (--callable). Exit code 1: no rate keeps it.
    """
    # here and not above: `quire up` needs none of it
    from loadtest.profiler.core.profile import Settings, Slo
    from loadtest.profiler.core.search import SearchLimits

    if bool(url or status) + bool(simulate) + bool(callable_) > 1:
        raise SettingsError("give one of --url with --status, --simulate and --callable")
    factors = _numbers("--burst", burst, ",")
    _refuse_endless(
        seconds=seconds, burst_s=burst_s, scale=scale, max_rate=max_rate, step=step, slo_ttft_ms=slo_ttft_ms,
        slo_tbt_ms=slo_tbt_ms, ttft_share=ttft_share, swap_gb_per_s=swap_gb_per_s, max_lag_ms=max_lag_ms,
    )  # fmt: skip
    settings = Settings(
        slo=Slo(ttft_ms=slo_ttft_ms, tbt_ms=slo_tbt_ms, ttft_share=ttft_share),
        threshold_bytes=threshold_bytes, chunk_tokens=chunk, step_per_s=step, bursts=tuple(factors),
        need_factor=factors[0], burst_s=burst_s, seconds=seconds, least_requests=requests, seed=seed,
        lengths=str(trace or lengths),
    )  # fmt: skip
    low, high = _range(rates)
    limits = SearchLimits(step, low, high, max_rate, repeats)
    _refuse_unwritable(target)
    tell = _teller(quiet=as_json)
    if callable_:
        found = _by_batches(callable_, settings, max_batch, device, tell)
    else:
        simulated = _simulated(simulate, gpu, tp, cost, memory_tokens, chunk, local_policy, swap_gb_per_s)
        runner, turns, served = simulated or _live(url, status or [], max_lag_ms, tell)
        asked = _lengths(lengths, trace, seed, scale, _cut_to(context, served, tell))
        found = _search(runner, turns, asked, settings, limits, tell)
    _report(found, target, plots, as_json=as_json)
    sys.exit(OK if found.stable_rate_per_s else FAILED)


# -- what was asked for ----------------------------------------------------------------------------


def _numbers(name: str, text: str, sep: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(sep)]
    except ValueError as error:
        raise SettingsError(f"{name} {text}: expected numbers with '{sep}' between them") from error
    if not all(map(math.isfinite, found)):
        raise SettingsError(f"{name} {text}: want finite numbers")
    return found


def _refuse_endless(**options: float) -> None:
    """What is infinite would not end, and what is no number compares with nothing."""
    for name, value in options.items():
        if not math.isfinite(value):
            raise SettingsError(f"--{name.replace('_', '-')} {value}: want a finite number")


def _range(text: str) -> tuple[float, float]:
    found = _numbers("--rates", text, ":")
    if len(found) != 2:
        raise SettingsError(f"--rates {text}: expected LOW:HIGH, such as 1:10")
    return found[0], found[1]


def _refuse_unwritable(target: Path) -> None:
    """Before minutes are spent."""
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise SettingsError(f"--out {target}: it is a folder, or its folder is not there")


def _lengths(name: str, trace: Path | None, seed: int, scale: float, context: int) -> "Lengths":
    from loadtest.profiler.requests import of_trace, of_workload

    if trace is not None:
        return of_trace(trace, scale=scale, context_tokens=context)
    return of_workload(name, seed=seed, scale=scale, context_tokens=context)


def _cut_to(context: int, served: int, tell: "Told") -> int:
    """The smaller of --context and what the served model takes; 0 is no bound."""
    if not served or 0 < context <= served:
        return context
    tell(f"requests are cut to {served:,} tokens: the served model takes no more")
    return served


def _simulated(
    model: str,
    gpu: str,
    tp: int,
    cost: str,
    memory_tokens: int,
    chunk: int,
    policy: str,
    swap_gb_per_s: float,
) -> "tuple[Runner, Runner | None, int] | None":
    """In order of arrival, and in fair slices where they are asked for, and 0; None: nothing is simulated."""
    from loadtest.profiler.simulated import SimulatedRunner, always_in_turns, machine_of
    from loadtest.simulator.hardware import from_file

    has_turns = policy == "cfs"
    if not model:
        if has_turns:
            raise SettingsError(
                "--local-policy cfs is of simulated engines: give --simulate MODEL, or leave it out"
            )
        return None
    if tp < 1 or chunk < 1 or memory_tokens < 0:
        raise SettingsError("--tp and --chunk are at least 1, --memory-tokens at least 0")
    local = always_in_turns(swap_gb_per_s) if has_turns else None
    if cost:
        tokens = memory_tokens or machine_of(gpu, model, tp, chunk_tokens=chunk).memory_tokens
        machine = from_file(Path(cost), memory_tokens=tokens, tp=tp, gpu=gpu, model=model)
    else:
        machine = machine_of(gpu, model, tp, chunk_tokens=chunk)
        tokens = memory_tokens or machine.memory_tokens
    machine = type(machine)(machine.prices, tokens, machine.calibrated, machine.words)
    runner = SimulatedRunner(machine, model=model, tp=tp, chunk_tokens=chunk)
    if local is None:
        return runner, None, 0
    return runner, SimulatedRunner(machine, model=model, tp=tp, chunk_tokens=chunk, local=local), 0


def _live(url: str, statuses: list[str], max_lag_ms: float, tell: "Told") -> "tuple[Runner, None, int]":
    """With the tokens that the served model takes, 0: it does not say."""
    from loadtest.profiler.live import LiveOptions, LiveRunner

    if bool(url) != bool(statuses):
        raise SettingsError("--url needs --status for each worker, and --status needs --url")
    if not url:
        with connect() as client:
            running = client.call(op="status")
        url = addresses.gateway_of(running)
        probes = [one["probe"] for one in running["services"] if one["name"].startswith(WORKERS)]
        statuses = [probe.removesuffix("/ready") + "/status" for probe in probes]
    for name, one in (("--url", url), *(("--status", status) for status in statuses)):
        addresses.check_url(name, one, "http://127.0.0.1:8000")
    options = LiveOptions(
        url=url.rstrip("/"), statuses=tuple(statuses), bearer=config.api_key(), max_lag_ms=max_lag_ms
    )
    runner = LiveRunner(options, tell=tell)
    return runner, None, runner.context_tokens


# -- what is done ----------------------------------------------------------------------------------


def _teller(*, quiet: bool) -> "Told":
    console = err if quiet else out
    return lambda text: console.print(f"  {text}")


@contextlib.contextmanager
def _nothing_saved_of_a_part() -> Iterator[None]:
    """Half a search is no profile: who stops it is told so."""
    try:
        yield
    except KeyboardInterrupt:
        fail("stopped before the profile was whole: nothing was saved", INTERRUPTED)


@_nothing_saved_of_a_part()
def _search(
    runner: "Runner",
    turns: "Runner | None",
    asked: "Lengths",
    settings: "Settings",
    limits: "SearchLimits",
    tell: "Told",
) -> "Profile":
    from loadtest.profiler.runner import Profiler
    from loadtest.results import machine

    tell(f"{runner.model}: {runner.words}; lengths of {asked.words}")
    settings = msgspec.structs.replace(settings, chunk_tokens=runner.chunk_tokens or settings.chunk_tokens)
    return Profiler(runner, asked, settings, limits, tell=tell, machine=machine(), turns=turns).profile()


@_nothing_saved_of_a_part()
def _by_batches(name: str, settings: "Settings", most: int, device: str, tell: "Told") -> "Profile":
    from loadtest.profiler.batches import profile_callable
    from loadtest.results import machine

    return profile_callable(name, settings, most=most, device=device, tell=tell, machine=machine())


# -- what came of it -------------------------------------------------------------------------------


def _report(found: "Profile", target: Path, plots: Path | None, *, as_json: bool) -> None:
    from loadtest.profiler.core.profile import encode

    drawn: list[Path] = []
    try:
        target.write_bytes(encode(found))
        if plots is not None:
            drawn = _plot(found, plots)
    except OSError as error:
        fail(f"{error.filename} cannot be written: {error.strerror}")
    if as_json:
        brief = {key: value for key, value in msgspec.to_builtins(found).items() if key not in BIG}
        sys.stdout.write(json.dumps(brief, indent=2) + "\n")
        return
    _show(found)
    out.print(f"profile: {shorten(str(target))}" + "".join(f", {shorten(str(one))}" for one in drawn))


def _plot(found: "Profile", folder: Path) -> list[Path]:
    try:
        from loadtest.figures.profile_plots import draw_all
    except ImportError as error:
        fail(f"plots need matplotlib, of the extra `loadtest`: {error}")
    return draw_all(msgspec.to_builtins(found), folder)


def _show(found: "Profile") -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for label, value in _rows(found):
        table.add_row(label, value)
    out.print(table)
    if not found.calibrated:
        whose = "a data sheet's" if SHEET in found.source else "another TP's, scaled"
        out.print(f"The costs are {whose}: `--cost` with `quire model show --json` is better.", style="dim")


def _rows(found: "Profile") -> list[tuple[str, str]]:
    from loadtest.profiler.core.profile import size_text

    unit = "items/s" if found.batches else "requests/s"
    rate = f"{found.stable_rate_per_s:g} {unit}" if found.stable_rate_per_s else "none"
    rows: list[tuple[str, Any]] = [
        ("model", f"{found.model}, {found.source}"),
        ("stable rate", rate + (f" ({found.reason})" if found.reason else "")),
        ("memory of a GPU" if found.batches else "KV memory of a GPU", size_text(found.pool_bytes)),
        ("most in use there", size_text(found.peak_kv_bytes)),
        ("free there", size_text(found.free_bytes)),
        *((f"swap need at {factor}x", size_text(count)) for factor, count in found.swap_bytes.items()),
        *(
            (
                f"in fair slices at {row['factor']:g}x",
                f"{size_text(row['turns_swap_bytes'])} in swap space, TTFT {row['turns_ttft_ms']:.0f} ms, "
                f"not {row['ttft_ms']:.0f}",
            )
            for row in found.bursts
            if row.get("turns_ttft_ms")
        ),
        ("role", _role(found)),
    ]
    return rows


def _role(found: "Profile") -> str:
    from loadtest.profiler.core.profile import size_text

    words = {
        "producer": f"producer: lends {size_text(found.bytes_per_gpu)} a GPU",
        "consumer": f"consumer: needs {size_text(-found.bytes_per_gpu)} of swap space a GPU",
        "neutral": "neutral: lends nothing and needs nothing",
    }
    return words[found.role]
