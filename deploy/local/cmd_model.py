"""`quire model show`: what each instance knows of its own speed, and of the links by which KV comes to it."""

import json
import sys
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from deploy.local.instances import instances
from deploy.local.terminal import EXIT_CODES, FAILED, OK, out
from shared.costmodel.model import CostModel
from shared.wire.cost import CostCoefficients

UNITS = {
    "matmul_ms_per_gflop": "matmuls, ms per GFLOP",
    "memory_ms_per_gb": "weights and activations, ms per GB",
    "attention_ms_per_gflop": "prefix attention, ms per GFLOP",
    "attention_square_ms_per_gflop": "more among new tokens, ms per GFLOP",
    "kv_read_ms_per_gb": "decode's reading of KV, ms per GB",
    "step_overhead_ms": "per step, ms",
    "chunk_ms": "per prompt in a step, ms",
    "decode_request_ms": "per decoding request in a step, ms",
    "token_ms": "per prompt token computed, ms",
    "request_ms": "per request outside of steps, ms",
    "graph_tokens": "tokens of the largest step that a CUDA graph holds",
    "launch_ms": "a step without a graph at least, ms",
    "idle_launch_ms": "a prompt of an idle engine, from graphs, at least, ms",
    "prompt_token_ms": "per prompt token, cached or not, ms",
    "all_reduce_ms": "per all-reduce, ms",
    "all_reduce_ms_per_gb": "all-reduces, ms per GB",
    "stage_hop_ms": "per pipeline stage, ms",
}
LENGTHS = (128, 1024, 8192)  # whose predicted times are shown
LINKS = {"peer": "from another space", "dram": "from host memory", "remote": "from another host"}

app = typer.Typer(help="The cost model of each instance.", no_args_is_help=True)


@app.command(epilog=EXIT_CODES)
def show(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
) -> None:
    """Show coefficients, their errors and corrections, and measured links, per instance.

    By these a prefix is fetched or computed again. Exit code 1: an instance has no model.
    """
    found = instances()
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        _show(found)
    sys.exit(OK if found and all(cost.get("coefficients") for cost in found.values()) else FAILED)


def _show(found: dict[str, dict[str, Any]]) -> None:
    known = {name: cost for name, cost in found.items() if cost.get("coefficients")}
    for name in found.keys() - known.keys():
        out.print(f"{name}: no cost model; its log says why (`quire logs {name}`)", style="yellow")
    if not known:
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for name in known:
        table.add_column(name, justify="right")
    for label, values in _rows(known):
        table.add_row(label, *values)
    out.print(table)


def _rows(known: dict[str, dict[str, Any]]) -> list[tuple[str, list[str]]]:
    coefficients = [cost["coefficients"] for cost in known.values()]
    rows = [
        ("device", [c.get("device", "") for c in coefficients]),
        ("ranks", [f"tp {c.get('tp', 1)}, pp {c.get('pp', 1)}" for c in coefficients]),
    ]
    for key, label in UNITS.items():
        values = [c.get(key, 0.0) for c in coefficients]
        if any(values):
            rows.append((label, [f"{value:.4g}" if value else "-" for value in values]))
    rows += [
        ("measured points", [str(c.get("num_samples", 0)) for c in coefficients]),
        ("error there, median", [f"{c.get('median_error_ratio', 0.0):.1%}" for c in coefficients]),
        ("error there, p90", [f"{c.get('p90_error_ratio', 0.0):.1%}" for c in coefficients]),
    ]
    for kind in ("prefill", "decode"):
        seen = [cost["corrections"][kind] for cost in known.values()]
        rows += [
            (f"{kind} correction", [f"{s['factor']:.2f} ({s['num_observed']} seen)" for s in seen]),
            (f"{kind} error now", [f"{s['error_ratio']:.1%}" if s["num_observed"] else "-" for s in seen]),
        ]
    for path, label in LINKS.items():
        rows.append((f"KV {label}", [_link(cost.get("links", {}).get(path)) for cost in known.values()]))
    for length in LENGTHS:
        rows.append(
            (f"prefill of {length} tokens, ms", [_predicted(cost, length) for cost in known.values()])
        )
    return rows


def _link(link: dict[str, Any] | None) -> str:
    """What fetching is counted with. None: there is no mempool, or the worker is an older one."""
    if link is None:
        return "-"
    seen = f"{link['num_measured']} seen"
    if not link["num_measured"] and not link["num_given_up"]:
        seen = "assumed"
    elif link["num_given_up"]:
        seen += f", {link['num_given_up']} given up"
    return f"{link['gb_per_s']:.3g} GB/s, {link['latency_ms']:.1f} ms ({seen})"


def _predicted(cost: dict[str, Any], num_tokens: int) -> str:
    model = CostModel(msgspec.convert(cost["coefficients"], CostCoefficients))
    return f"{model.prefill_ms(num_tokens) * cost['corrections']['prefill']['factor']:.1f}"
