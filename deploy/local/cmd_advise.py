"""`quire advise TRACE`: whether to disaggregate this workload, by simulation."""

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from deploy.local.instances import instances
from deploy.local.terminal import fail, out
from shared.errors import PeerGone, SettingsError

if TYPE_CHECKING:
    from loadtest.simulator.advise import Advice
    from loadtest.simulator.hardware import Machine
    from loadtest.simulator.request import SimRequest

BUDGET_S = 40.0
RUNNING = "running"
SHEET = "data sheet"  # in the words of costs that come from one
CHUNK_TOKENS = 8192  # of a step, where no measurement says otherwise


def advise(
    trace: Annotated[Path, typer.Argument(help="Mooncake JSONL, or CSV of lengths (.csv) as Azure's.")],
    rate: Annotated[
        float, typer.Option(help="Requests/s, Poisson: for a CSV without times, which needs it.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the arrivals that --rate makes.")] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs, or engines of the running cluster.")] = 4,
    gpu: Annotated[
        str,
        typer.Option(
            help="h200, h100, a100 or l40s: measured costs where there are some, else its data sheet's."
        ),
    ] = "h200",
    model: Annotated[
        str, typer.Option(help="llama-8b, qwen-32b, llama-70b, or a folder with a config.json.")
    ] = "llama-8b",
    tp: Annotated[
        int,
        typer.Option(help="GPUs of one engine. Default: as --cost was calibrated, or 1.", show_default=False),
    ] = 0,
    cost: Annotated[
        str,
        typer.Option(
            help="Coefficients: a file of `quire model show --json`, a cost-model result file, or 'running' for the "
            "running cluster's. Default: as measured for --gpu, --model and --tp."
        ),
    ] = "",
    memory_tokens: Annotated[
        int, typer.Option(help="KV of one engine in tokens. Default: as --cost's have, else what fits.")
    ] = 0,
    link_gb_per_s: Annotated[
        float | None, typer.Option(help="Between engines. Default: as --cost's measured it, else 20.")
    ] = None,
    slo_ttft_ms: Annotated[
        float, typer.Option(help="Default: 3 x a long prompt's prefill, at least 2000.")
    ] = 0.0,
    slo_tpot_ms: Annotated[float, typer.Option(help="Default: 2 x a lonely decode step, at least 50.")] = 0.0,
    share: Annotated[float, typer.Option(help="Of the requests that must keep both.")] = 0.9,
    requests: Annotated[
        int, typer.Option(help="At most: the densest stretch, repeated until a rate is sustained.")
    ] = 600,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
) -> None:
    """Simulate a trace on colocated and on divided engines, and say which way sustains more within the SLO."""
    # here and not above: `quire up` needs neither numpy nor the simulator
    from loadtest.simulator.advise import Advisor, Question, default_slo
    from loadtest.simulator.known import setting_of

    if gpus < 1 or min(tp, memory_tokens) < 0 or requests < 10 or not 0 < share <= 1:
        raise SettingsError("at least: --gpus 1, --tp, --memory-tokens 0, --requests 10; --share in (0, 1]")
    if link_gb_per_s is not None and not 0 < link_gb_per_s < math.inf:
        raise SettingsError(f"--link-gb-per-s {link_gb_per_s:g}: want a number above 0")
    for flag, value in (("--slo-ttft-ms", slo_ttft_ms), ("--slo-tpot-ms", slo_tpot_ms), ("--rate", rate)):
        if not 0 <= value < math.inf:
            raise SettingsError(f"{flag} {value:g}: want a number, not negative")
    found = _requests(trace, rate, seed)
    machine = _machine(gpu, model, tp, cost, memory_tokens)
    slo = default_slo(found, machine)
    slo = type(slo)(slo_ttft_ms or slo.ttft_ms, slo_tpot_ms or slo.tpot_ms)
    per_engine = tp or (1 if cost == RUNNING else machine.prices.coefficients.tp)
    begin = time.monotonic()
    setting = setting_of(machine.known, f"from {machine.source}", link_gb_per_s)
    question = Question(
        found, machine, gpus // per_engine, slo, setting=setting, good_share=share, most_requests=requests
    )
    advice = Advisor(question, lambda: time.monotonic() - begin, BUDGET_S).advise()
    if as_json:
        sys.stdout.write(json.dumps(advice.as_json(), indent=2) + "\n")
    else:
        _show(advice)


def _requests(trace: Path, rate_per_s: float, seed: int) -> "list[SimRequest]":
    from loadtest.simulator.request import from_workload
    from loadtest.workloads.stats import BLOCK_TOKENS
    from loadtest.workloads.trace_files import TraceError, read

    try:
        return from_workload(read(trace, rate_per_s=rate_per_s, seed=seed), BLOCK_TOKENS)
    except TraceError as error:
        fail(str(error))
    except UnicodeDecodeError:
        fail(f"{trace} is not text: expected Mooncake's JSON lines, or a CSV of lengths")
    except OSError as error:
        fail(f"{trace} cannot be read: {error.strerror}")


def _machine(gpu: str, model: str, tp: int, cost: str, memory_tokens: int) -> "Machine":
    from loadtest.profiler.simulated import machine_of
    from loadtest.simulator.hardware import from_coefficients, from_file
    from loadtest.simulator.known import GIVEN

    if cost == RUNNING:
        return from_coefficients(_running(), memory_tokens=memory_tokens, source="the running cluster", tp=tp)
    if cost:
        return from_file(Path(cost), memory_tokens=memory_tokens, tp=tp, gpu=gpu, model=model)
    machine = machine_of(gpu, model, tp or 1, chunk_tokens=CHUNK_TOKENS)
    return replace(machine, memory_tokens=memory_tokens, memory_source=GIVEN) if memory_tokens else machine


def _running() -> dict[str, dict[str, Any]]:
    """What its instances say. Raises: PeerGone where none has coefficients."""
    found = instances()
    if not any(one.get("coefficients") for one in found.values()):
        raise PeerGone(
            "no instance of the running cluster has a cost model; its log says why, or give --gpu and --model"
        )
    return found


def _show(advice: "Advice") -> None:
    from loadtest.simulator.advice import rate_text

    out.print(
        f"{advice.simulated_requests} requests at {rate_text(advice.trace_rate_per_s)}/s; "
        f"TTFT {advice.slo_ttft_ms:g} ms and TPOT {advice.slo_tpot_ms:g} ms for {advice.good_share:.0%}",
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in (
        "layout",
        "max requests/s",
        "at the trace's rate: good",
        "TTFT p50",
        "p99",
        "TPOT p99",
        "JCT mean",
        "hits",
    ):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for layout in advice.layouts:
        times = (layout.ttft_p50_ms, layout.ttft_p99_ms, layout.tpot_p99_ms, layout.jct_mean_ms)
        table.add_row(
            layout.name,
            layout.rate_words(),
            *(
                (f"{layout.good_ratio:.1%}", *(f"{ms:.0f} ms" for ms in times), f"{layout.hit_ratio:.1%}")
                if layout.is_simulated
                else ["-"] * 6
            ),
        )
    out.print(table)
    if advice.calibrated:
        out.print(f"calibrated: {advice.costs}")
    else:
        kind = "data sheet" if SHEET in advice.costs else "not calibrated"
        better = "`--cost running` or a file of `quire model show --json` is better"
        out.print(f"{kind}: {advice.costs}; {better}", style="yellow")
    out.print(advice.setting_words())
    out.print(advice.sentence)
    if advice.is_burst:
        out.print(
            f"The stretch is a burst of a trace with {rate_text(advice.whole_rate_per_s)} requests/s: what the bursts "
            "and pauses together want, more --requests say.",
            style="yellow",
        )
    if not advice.within_budget:
        out.print(
            f"The search ended after {BUDGET_S:g} s: give fewer --requests for finer rates.", style="yellow"
        )
