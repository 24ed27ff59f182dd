"""Tables of vLLM pull request 38460: swap copies handed to the driver in one call."""

from statistics import median

from matplotlib.figure import Figure

from loadtest.figures.sheet import Result, Sheet, table
from loadtest.swap_rig import SHAPES

PR_BANDWIDTH = {"LLaMA-3.1-8B": (44.0, 47.0), "Qwen2.5-7B": (34.2, 40.7), "Mistral-7B": (45.1, 48.6)}
PR_SERVING = {
    "Qwen2.5-7B": (6.0, 7.1, 6077.0, 117.0),
    "LLaMA-3.1-8B": (6.7, 6.7, 100.7, 105.7),
    "Mistral-7B": (6.7, 6.6, 91.4, 82.5),
}
WAYS = ("device_to_host", "host_to_device")


def shapes(result: Result) -> Figure:
    """The handler-level table: seven shapes, both directions."""
    us = {
        (row["set"], row["direction"], row["case"]): median(row["wall_us"])
        for row in result["samples"]
        if row["section"] == "shapes"
    }

    def cell(name: str, case: str) -> str:
        values = [us.get((name, way, case)) for way in WAYS]
        return " / ".join("-" if value is None else f"{value:,.0f}" for value in values)

    rows = [
        [
            f"{shape.name}, {shape.blocks} blocks",
            f"{shape.tensors} x {shape.block_bytes >> 10} KiB",
            f"{shape.pr_baseline_us:,}",
            f"{shape.pr_batched_us:,}",
            *(cell(shape.name, case) for case in ("loop", "auto", "vllm", "pages")),
        ]
        for shape in SHAPES
    ]
    head = ["us", "tensors", "PR loop", "PR batch", "loop", "ours", "vLLM 0.26", "as pages"]
    return table(rows, head, 11)


def serving(result: Result) -> Figure:
    """Bandwidth, requests per second and TTFT of a server that offloads, ours beside the stock connector."""
    metrics = result["metrics"]
    rows = []
    for load in sorted({row["load"] for row in result["samples"] if "load" in row}):
        for what, form in (
            ("load_gb_per_s", "{:.1f}"), ("store_gb_per_s", "{:.1f}"), ("requests_per_s", "{:.2f}"),
            ("ttft_p50_ms", "{:.0f}"), ("ttft_p99_ms", "{:.0f}"), ("tpot_p50_ms", "{:.2f}"), ("tpot_p99_ms", "{:.2f}"),
        ):  # fmt: skip
            pair = [metrics.get(f"{engine}_{load}_{what}") for engine in ("stock", "quire")]
            if any(value is not None for value in pair):
                rows.append([load, what, *("-" if value is None else form.format(value) for value in pair)])
    rows += [
        [f"PR: {name}", "GB/s", f"{before:.1f} (loop)", f"{after:.1f} (batch)"]
        for name, (before, after) in PR_BANDWIDTH.items()
    ]
    for name, (before, after, late, later) in PR_SERVING.items():
        rows.append([f"PR: {name}", "requests/s", f"{before:.1f} (loop)", f"{after:.1f} (batch)"])
        rows.append([f"PR: {name}", "p99 TTFT, ms", f"{late:,.1f} (loop)", f"{later:.1f} (batch)"])
    return table(rows, ["load", "what", "OffloadingConnector", "with our copies"], 9)


SHEETS = (
    Sheet(
        "pr38460-handler",
        "vLLM PR 38460, handler-level table: seven shapes",
        ours="device to host / host to device, wall time from the call to the end of the copy, medians, "
        "planning and "
        "checking included. `ours`: copy_pages on the same discrete tensors; `as pages`: the same blocks "
        "as whole pages.",
        paper="8 x H100, vLLM 0.18, its handler, loop before and batch after.",
        differs="one H200, PCIe 5; vLLM 0.26 reads small blocks to the device by a Triton kernel, which beats any "
        "batch of copies there; `ours` takes a kernel of its own, in both directions.",
        needs=("h200-swap",),
        draw=shapes,
    ),
    Sheet(
        "pr38460-serving",
        "vLLM PR 38460, serving tables: bandwidth, requests/s, TTFT",
        ours="vLLM 0.26 with its OffloadingConnector, and the same with its swap copies made by "
        "copy_pages; 8B shape, "
        "random weights, one H200; the bandwidth is of CUDA events around each transfer, as in the pull "
        "request.",
        paper="vLLM 0.18's loop against its batch; real models, 8 threads for 45 s, H100.",
        differs="vLLM 0.26 batches already, so that the stock side here is the pull request's better side.",
        needs=("h200-offload",),
        draw=serving,
        reason="no result file h200-offload yet: it needs an H200, `make measure NAME=h200-offload`.",
    ),
)
