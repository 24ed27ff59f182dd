"""vAttention, Figures 2, 3 and 7 to 15: attention with and without a block table, and what mapping costs."""

from collections.abc import Mapping
from functools import partial
from statistics import mean, median
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.figures.sheet import ACCENT, INK, PALE, Result, Sheet, grouped_bars

NAMES = {
    "plain": "plain memory",
    "paged16": "blocks of 16",
    "paged256": "blocks of 256",
    "cross-layer64": "cross-layer 64",
    "token-major": "slots, token-major",
    "layer-major": "slots, layer-major",
    "paged16-graphs": "blocks of 16, graphs",
}
KERNELS = {"flash3": "FA3", "torch_flash2": "FA2 (torch)", "triton": "Triton (vLLM)"}
Best = dict[tuple[str, int], float]  # (cache and kernel, size) -> the best of its samples


def _label(cache: str, kernel: str) -> str:
    return f"{NAMES.get(cache, cache)}, {KERNELS.get(kernel, kernel)}"


def _kernels(result: Result, kind: str, only: str = "") -> Best:
    """Prefill: TFLOP/s by prompt length; decode: ms of all layers by batch. `only`: one kernel."""
    out: Best = {}
    for row in result["samples"]:
        if row["part"] == "kernel" and row["kind"] == kind:
            cache, _, kernel = row["variant"].partition(".")
            if only in ("", kernel):
                value = row["tflop"] / row["layer_ms"] * 1e3 if kind == "prefill" else row["ms"]
                key = (_label(cache, kernel), row["tokens" if kind == "prefill" else "batch"])
                out[key] = (
                    max(out.get(key, 0), value) if kind == "prefill" else min(out.get(key, value), value)
                )
    return out


def _serving(result: Result, kind: str) -> Best:
    """Prefill: prompt tokens/s by length; decode: tokens/s of the whole batch by batch."""
    out: Best = {}
    for row in result["samples"]:
        if row["part"] == "serving" and row["kind"] == kind:
            size = row["tokens" if kind == "prefill" else "batch"]
            rate = size / row["ttft_ms" if kind == "prefill" else "gap_ms"] * 1e3
            key = (_label(row["engine"], row["kernel"]), size)
            out[key] = max(out.get(key, 0), rate)
    return out


def _bars(axes: Axes, best: Best, size_of: str, form: str = "{:.0f}") -> None:
    sizes = sorted({size for _, size in best})
    names = list(dict.fromkeys(name for name, _ in best))
    series = {name: [best.get((name, size)) for size in sizes] for name in names}
    shown = [f"{size // 1024}K" if size >= 1024 else str(size) for size in sizes]
    grouped_bars(axes, shown, series, form)
    axes.set_xlabel(size_of)


def _one(best: Best, size_of: str, what: str, form: str = "{:.0f}") -> Figure | str:
    if not best:
        return "h200-contiguous.json has no samples for this figure: that part failed or was left out"
    figure, axes = plt.subplots(figsize=(10, 3.2))
    _bars(axes, best, size_of, form)
    axes.set_ylabel(what)
    return figure


def prefill_overhead(result: Result) -> Figure | str:
    """Figure 2: the same kernel with blocks, by prompt length, and its loss to plain memory."""
    best = _kernels(result, "prefill", "flash3")
    plain = {size: value for (name, size), value in best.items() if name.startswith("plain")}
    if not plain:
        return _one(best, "prompt tokens", "TFLOP/s")
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.2))
    _bars(left, best, "prompt tokens")
    left.set_ylabel("TFLOP/s, one layer")
    loss = {
        key: (plain[key[1]] / v - 1) * 100
        for key, v in best.items()
        if key[1] in plain and key[0][:5] != "plain"
    }
    _bars(right, loss, "prompt tokens", "{:+.0f}")
    right.set_ylabel("% slower than plain memory")
    right.axhline(0, color=INK, linewidth=0.8)
    return figure


def decode_blocks(result: Result) -> Figure | str:
    """Figure 3."""
    best = {
        k: v for k, v in _kernels(result, "decode").items() if k[0].startswith(("blocks", "cross", "plain"))
    }
    return _one(best, "batch, 16K tokens each", "ms, all layers", "{:.2f}")


def prefill_serving(result: Result) -> Figure | str:
    """Figure 7."""
    return _one(_serving(result, "prefill"), "prompt tokens", "prompt tokens/s")


def decode_serving(result: Result) -> Figure | str:
    """Figure 8."""
    return _one(_serving(result, "decode"), "batch", "output tokens/s")


def libraries(result: Result) -> Figure | str:
    """Figure 11: what a slot cache gains from another library's kernel, without a change but the call."""
    best = _kernels(result, "prefill")
    keep = {k: v for k, v in best.items() if k[0].startswith(("slots", "blocks of 16"))}
    return _one(keep, "prompt tokens", "TFLOP/s, one layer")


def page_sizes(result: Result) -> Figure | str:
    """Figure 14: the same kernel over pages of 2 MiB, 8 MiB and none."""
    chosen = ("plain memory", "slots, token-major", "slots, layer-major")
    prefill = {k: v for k, v in _kernels(result, "prefill", "flash3").items() if k[0].startswith(chosen)}
    decode = {k: v for k, v in _kernels(result, "decode", "flash3").items() if k[0].startswith(chosen)}
    if not prefill or not decode:
        return _one({**prefill, **decode}, "", "")
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.2))
    _bars(left, prefill, "prompt tokens")
    left.set_ylabel("TFLOP/s, one layer")
    _bars(right, decode, "batch, 16K tokens each", "{:.2f}")
    right.set_ylabel("ms, all layers")
    return figure


def _rows(result: Mapping[str, Any] | None, kind: str, layout: str, way: str) -> list[list[float]]:
    samples = result["samples"] if result else []
    return [row["us"] for row in samples if (row["kind"], row["layout"], row["way"]) == (kind, layout, way)]


def decode_mapping(host: Result, gpu: Result | None) -> Figure:
    """Figure 12: step() of every iteration, of one round."""
    found = [("host pages (thread's CPU time)", host)] + ([("CUDA pages (wall time)", gpu)] if gpu else [])
    figure, grid = plt.subplots(len(found), 2, figsize=(10, 2.6 * len(found)), squeeze=False)
    for row, (what, result) in zip(grid, found, strict=True):
        for axes, layout in zip(row, ("layer-major", "token-major"), strict=True):
            for way, colour in (("on the path", PALE), ("background", ACCENT)):
                rounds = _rows(result, "decode", layout, way)
                axes.plot([us / 1e3 for us in rounds[0]], color=colour, linewidth=0.9, label=way)
            axes.set(title=f"{layout}, {what}", xlabel="decode iteration", ylabel="step(), ms", yscale="log")
            axes.legend()
    return figure


def prefill_mapping(host: Result, gpu: Result | None) -> Figure:
    """Figure 13: mapping before a prompt of 16K tokens can run."""
    found = [("host pages", host)] + ([("CUDA pages", gpu)] if gpu else [])
    figure, row = plt.subplots(1, len(found), figsize=(5 * len(found) + 2, 3), squeeze=False)
    layouts = ("layer-major", "token-major")
    for axes, (what, result) in zip(row[0], found, strict=True):
        series: dict[str, list[float | None]] = {}
        for way in ("fresh", "scattered", "leftover"):
            groups = [_rows(result, "prefill", layout, way) for layout in layouts]
            series[way] = [median(group[0]) / 1e3 if group else None for group in groups]
        names = [f"{layout}, {size}" for layout, size in zip(layouts, ("2 MiB", "8 MiB"), strict=True)]
        grouped_bars(axes, names, series, "{:.2f}")
        axes.set(title=what, ylabel="ms before the prompt runs", yscale="log")
    return figure


def batch_sizes(result: Result) -> Figure:
    """Figure 15."""
    order = {"2048 KiB": 0, "256 KiB": 1, "128 KiB": 2, "64 KiB": 3, "slice": 4, "exact": 5}
    cases = sorted({row["case"] for row in result["samples"]}, key=lambda case: order.get(case, 9))
    mine = {case: [row for row in result["samples"] if row["case"] == case] for case in cases}
    figure, axes = plt.subplots(figsize=(8, 3))
    names = [f"{case}\n{mine[case][0]['page_tokens']} tokens" for case in cases]
    series = {
        "largest batch": [mean(max(row["batch"]) for row in mine[case]) for case in cases],
        "mean batch": [mean(mean(row["batch"]) for row in mine[case]) for case in cases],
    }
    grouped_bars(axes, names, series)
    axes.set_ylabel("requests at once")
    return figure


def offline(result: Result) -> Figure | str:
    """Figure 9: requests per minute, and the prompt tokens of them per second."""
    rows = [row for row in result["samples"] if row["kind"] == "offline" and row["requests"]]
    if not rows:
        return "h200-arxiv-long.json has no samples for this figure: no engine ended a prompt in time"
    figure, row_of = plt.subplots(1, 2, figsize=(10, 3))
    names = [NAMES[row["engine"]] + _late(row) for row in rows]
    rates = [len(row["requests"]) / row["wall_s"] * 60 for row in rows]
    prompts = [sum(each["prompt_tokens"] for each in row["requests"]) / row["wall_s"] / 1e3 for row in rows]
    for axes, values, what in zip(
        row_of, (rates, prompts), ("requests/min", "1,000 prompt tokens/s"), strict=True
    ):
        grouped_bars(axes, [""], {name: [value] for name, value in zip(names, values, strict=True)}, "{:.2f}")
        axes.set_ylabel(what)
    return figure


def online(result: Result) -> Figure | str:
    """Figure 10: share of requests that ended within a time."""
    rows = [row for row in result["samples"] if row["kind"] == "online" and row["requests"]]
    if not rows:
        return "h200-arxiv-long.json has no samples for this figure: no engine ended a request of the stream"
    figure, axes = plt.subplots(figsize=(7, 3))
    for row in rows:
        times = sorted(each["latency_ms"] / 1e3 for each in row["requests"])
        shares = [(number + 1) / row["asked"] for number in range(len(times))]
        axes.step(times, shares, where="post", label=NAMES[row["engine"]] + _late(row))
    axes.set(xlabel="seconds from arrival to the last token", ylabel="share of requests", ylim=(0, 1.02))
    axes.legend()
    return figure


def _late(row: Mapping[str, Any]) -> str:
    """Of a part that was cut short."""
    done = len(row["requests"])
    return "" if done == row["asked"] else f" ({done} of {row['asked']} ended)"


ARXIV = "h200-arxiv-long"
CONTIGUOUS = "h200-contiguous"
NOT_YET = "no result file h200-contiguous yet: it needs an H200, `make measure NAME=h200-contiguous`."
SHAPE = "8B shape, random weights, one H200, FlashAttention-3 unless named"
_contiguous = partial(Sheet, needs=(CONTIGUOUS,), reason=NOT_YET)
SHEETS = (
    _contiguous(
        "vattention-02",
        "vAttention Figure 2: what a block table costs prefill kernels",
        ours=f"one layer's prefill over each cache; {SHAPE}.",
        paper="paged FlashAttention-2 up to 37%, FlashInfer up to 42% slower than without pages (A100).",
        differs="FlashAttention-3 has had its own paged kernel since; FlashInfer is not in the run.",
        draw=prefill_overhead,
    ),
    _contiguous(
        "vattention-03",
        "vAttention Figure 3: decode by block size",
        ours=f"all layers of one decode step; {SHAPE}.",
        paper="vLLM's own paged kernel is up to 1.9 times slower with blocks of 64 and 128 than of 16.",
        differs="that kernel is not in vLLM 0.26 any more; its Triton kernel and FlashAttention-3 are shown.",
        draw=decode_blocks,
    ),
    _contiguous(
        "vattention-07",
        "vAttention Figure 7: prefill throughput of the server",
        ours=f"prompt tokens over time to first token, one prompt at a time, eager; {SHAPE}.",
        paper="vAttention 1.24 to 1.26 times paged FlashAttention-2 at 192K tokens, equal for short prompts.",
        differs="one model shape; up to 128K tokens.",
        draw=prefill_serving,
    ),
    _contiguous(
        "vattention-08",
        "vAttention Figure 8: decode throughput of the server",
        ours=f"tokens/s of the batch, from the median gap between outputs, eager; {SHAPE}.",
        paper="vAttention equals the best paged kernel and is up to 1.99 times vLLM's.",
        differs="vLLM 0.26 uses FlashAttention-3 with blocks; its old kernel is gone.",
        draw=decode_serving,
    ),
    Sheet(
        "vattention-09",
        "vAttention Figure 9: offline throughput, long contexts",
        ours="prompts of 64K to 128K tokens all at once, until the last one ended; 8B shape, random weights, one "
        "H200, eager, FlashAttention-3.",
        paper="427 requests of arXiv-Summarization, 64K to 192K tokens: 1.13 to 1.23 times paged kernels.",
        differs="a handful of requests with lengths of our own, for a minute an engine; FlashAttention-3 has had its "
        "own paged kernel since.",
        needs=(ARXIV,),
        draw=offline,
    ),
    Sheet(
        "vattention-10",
        "vAttention Figure 10: request latency under load",
        ours="22K to 45K tokens, Poisson arrivals, the same for every engine; 8B shape, random weights, one H200, "
        "eager, FlashAttention-3.",
        paper="512 requests of 22K to 45K tokens, Poisson arrivals: median latency up to 42% lower.",
        differs="a stream of under a minute, answers of at most 512 tokens; lengths in the published range, not "
        "the data set's.",
        needs=(ARXIV,),
        draw=online,
    ),
    _contiguous(
        "vattention-11",
        "vAttention Figure 11: another library's kernel by changing the call",
        ours=f"one layer's prefill from slots with unmodified kernels of two libraries, and blocks of 16; {SHAPE}.",
        paper="offline throughput on H100: FlashAttention-3 up to 1.35 times FlashAttention-2, both on "
        "vAttention.",
        differs="the kernels alone instead of a whole offline run.",
        draw=libraries,
    ),
    Sheet(
        "vattention-12",
        "vAttention Figure 12: decode iterations with mapping in the background",
        ours="step() of 32 growing requests, 600 iterations; no model runs. The host's calls are mmap, "
        "about 1 us each; "
        "most of what is left in the background case is Python that plans the calls, so that the host "
        "gains little.",
        paper="Llama-3-8B, batch 32: spikes of 5 to 15 ms when pages are mapped on the path, none in the "
        "background.",
        differs="step() alone instead of the whole iteration; host memory, and CUDA pages of one H200.",
        needs=("slot-mapping",),
        also=("h200-slot-mapping",),
        draw=decode_mapping,
    ),
    Sheet(
        "vattention-13",
        "vAttention Figure 13: what a prompt of 16K tokens waits for",
        ours="the first step() in an empty slot, with pages side by side or scattered, and in a slot "
        "whose last request was "
        "as long (deferred reclamation); no model runs.",
        paper="mapping on the path costs prefill up to 1.15 times with 64 KiB, 1.03 with 2 MiB; deferred: "
        "nothing.",
        differs="mapping alone instead of prefill with it; host memory, and CUDA pages of one H200.",
        needs=("slot-mapping",),
        also=("h200-slot-mapping",),
        draw=prefill_mapping,
    ),
    _contiguous(
        "vattention-14",
        "vAttention Figure 14: page size and the attention kernel",
        ours=f"slots in pages of 8 MiB (token-major) and 2 MiB (layer-major), and plain memory; {SHAPE}.",
        paper="kernels are as fast with pages of 64 KiB as of 2 MiB.",
        differs="64 KiB needs a modified driver; the two layouts differ in strides too.",
        draw=page_sizes,
    ),
    Sheet(
        "vattention-15",
        "vAttention Figure 15: how many requests fit, by page size",
        ours="counted with the table of slots that serves requests: 40 GiB of KV, 8B shape, a queue that "
        "never empties, "
        "log-normal lengths. slice: all layers of a token in one page of 8 MiB, no modified driver.",
        paper="Llama-3-8B: 203 with 2 MiB, 258 with 64 KiB; Yi-6B 187 and 240, Yi-34B 56 and 68.",
        differs="a count instead of a run; OpenChat's lengths are not at hand, ours are a distribution.",
        needs=("slot-batch",),
        draw=batch_sizes,
    ),
)
