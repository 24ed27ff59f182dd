"""MemServe, Figures 9 to 12 and 15: what the mempool's calls cost, the index beside vLLM's, aggregated blocks on the
wire, placing by locality."""

from collections.abc import Sequence
from statistics import fmean, median

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.figures.sheet import ACCENT, INK, PALE, SECOND, Result, Sheet, grouped_bars


def _of_rounds(result: Result, what: str, blocks: int, cached: float | None) -> list[float]:
    return [
        row["us"]
        for row in result["samples"]
        if (row["what"], row["blocks"], row["cached"]) == (what, blocks, cached)
    ]


def calls(result: Result) -> Figure:
    """(a) memory calls by number of blocks, (b) insert and match by cached ratio."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
    sizes = sorted({row["blocks"] for row in result["samples"]})
    for what, colour in (("alloc", ACCENT), ("free", SECOND)):
        left.plot(
            sizes,
            [median(_of_rounds(result, what, size, None)) for size in sizes],
            "o-",
            color=colour,
            label=what,
        )
    left.plot(sizes, [0.8 * size for size in sizes], ":", color=INK, label="paper: 0.8 us a block")
    left.set(
        xscale="log", yscale="log", xlabel="blocks of 16 tokens", ylabel="us a call", title="(a) memory calls"
    )
    left.legend()
    ratios = sorted({row["cached"] for row in result["samples"] if row["cached"] is not None})
    for size, style in ((256, "o-"), (64, "o--")):
        for what, colour in (("insert", ACCENT), ("match", SECOND)):
            us = [median(_of_rounds(result, what, size, ratio)) for ratio in ratios]
            right.plot(ratios, us, style, color=colour, label=f"{what}, {size} blocks")
    whole = [median(_of_rounds(result, "insert_call", 256, ratio)) for ratio in ratios]
    right.plot(ratios, whole, "x-", color=PALE, label="insert, whole call, 256 blocks")
    right.axhline(700, color=INK, linestyle=":", linewidth=1, label="paper: at most 0.7 ms")
    right.set(yscale="log", xlabel="share that is cached", ylabel="us", title="(b) index calls")
    right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _median_us(result: Result, cache: str, steps: Sequence[str], tokens: int, blocks: int) -> float:
    return sum(
        median(
            row["us"]
            for row in result["samples"]
            if (row["cache"], row["step"], row["tokens"], row["blocks"]) == (cache, step, tokens, blocks)
        )
        for step in steps
    )


def _lines(axes: Axes, result: Result, steps: Sequence[str], blocks: int) -> None:
    lengths = sorted({row["tokens"] for row in result["samples"]})
    for cache, name, colour in (("quire", "radix (Quire)", ACCENT), ("vllm", "hash (vLLM 0.26)", PALE)):
        ms = [_median_us(result, cache, steps, tokens, blocks) / 1e3 for tokens in lengths]
        axes.plot(lengths, ms, "o-", color=colour, label=name)
    axes.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="ms")
    axes.set_xticks(lengths, [f"{tokens // 1024}K" for tokens in lengths])
    axes.minorticks_off()
    axes.legend()


def index(result: Result) -> Figure:
    """Check and insert by prompt length, then by how much is cached already."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.2))
    sizes = sorted({row["blocks"] for row in result["samples"]})
    _lines(left, result, ("hash", "match_new"), sizes[-1])
    left.set_title("check: hash and look up, nothing cached")
    _lines(middle, result, ("insert",), sizes[-1])
    middle.set_title("insert")
    shares = {
        name: [
            _median_us(result, "quire", steps, 4096, size) / _median_us(result, "vllm", steps, 4096, size)
            for size in sizes
        ]
        for name, steps in (
            ("check", ("hash", "match_new")),
            ("match, all cached", ("match",)),
            ("insert", ("insert",)),
        )
    }
    grouped_bars(right, [f"{size // 1024}K" for size in sizes], shares, "{:.2f}")
    right.axhline(1, color=INK, linestyle=":", linewidth=1)
    right.set(xlabel="blocks cached before", title="4K tokens: our time over vLLM's")
    return figure


def wire(result: Result) -> Figure:
    """One request's bytes as they lie layer by layer, and aggregated, by every path."""
    rates = {
        (row["section"], row["set"], row["case"]): row["bytes"] / median(row["wall_us"]) / 1e3
        for row in result["samples"]
        if "wall_us" in row
    }

    def best(section: str, name: str, case: str = "") -> float | None:
        found = [
            rate for key, rate in rates.items() if key[:2] == (section, name) and key[2].startswith(case)
        ]
        return max(found, default=None)

    paths = {
        "NCCL, call by call": ("nccl", "per block"),
        "NCCL, grouped": ("nccl", "grouped"),
        "NIXL": ("nixl", ""),
        "imported pages (Quire)": ("pages", ""),
    }
    series = {
        name: [best(section, which, case) for section, case in paths.values()]
        for name, which in (
            ("discrete: 4096 x 32 KiB", "4096 x 32 KiB"),
            ("aggregated: 64 x 2 MiB", "64 x 2 MiB"),
        )
    }
    figure, axes = plt.subplots(figsize=(8, 3.2))
    grouped_bars(axes, list(paths), series)
    ceiling = best("ceiling", "256 MiB")
    if ceiling is not None:
        axes.axhline(ceiling, color=INK, linestyle=":", linewidth=1, label="one plain copy")
    axes.set(ylabel="GB/s, 128 MiB from GPU to GPU")
    axes.legend()
    return figure


MODE_NAMES = {"by-layer": "by layer", "by-request": "by request", "by-request-agg": "by request, aggregated"}


def modes(on_gpus: Result, on_cpu: Result | None) -> Figure:
    """A row for each result: what is exposed by granularity, what decode waits for, job completion by rate."""
    found = [("two H200s", on_gpus), *([("CPU", on_cpu)] if on_cpu is not None else [])]
    figure, rows = plt.subplots(len(found), 3, figsize=(11, 3.0 * len(found)), squeeze=False)
    for (words, result), (left, middle, right) in zip(found, rows, strict=True):
        blocks = min(row["block_tokens"] for row in result["samples"] if row["kind"] == "move")
        _exposed(left, [row for row in result["samples"] if row.get("block_tokens") == blocks])
        left.set_title(f"mover, 8B shape, blocks of {blocks} ({words})")
        _waited(middle, [row for row in result["samples"] if row["kind"] == "prompt"])
        middle.set_title(f"decode waits for pages ({words})")
        _completion(right, [row for row in result["samples"] if row["kind"] == "rate"])
        right.set_title(f"mean job completion time ({words})")
    return figure


def _exposed(axes: Axes, rows: list[Result]) -> None:
    lengths = sorted({row["tokens"] for row in rows})
    for mode, name in MODE_NAMES.items():
        ms = [
            median(row["exposed_ms"] for row in rows if (row["mode"], row["tokens"]) == (mode, tokens))
            for tokens in lengths
        ]
        calls = median(row["parts"] for row in rows if (row["mode"], row["tokens"]) == (mode, lengths[-1]))
        axes.plot(lengths, ms, "o-", label=f"{name}: {calls:.0f} transfers")
    axes.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="ms behind the last layer")
    axes.set_xticks(lengths, [f"{tokens / 1024:g}K" for tokens in lengths])
    axes.minorticks_off()
    axes.legend()


def _waited(axes: Axes, rows: list[Result]) -> None:
    lengths = sorted({row["prompt_tokens"] for row in rows})
    series: dict[str, list[float | None]] = {
        name: [
            median(row["fetch_ms"] for row in rows if (row["mode"], row["prompt_tokens"]) == (mode, tokens))
            for tokens in lengths
        ]
        for mode, name in MODE_NAMES.items()
    }
    grouped_bars(axes, [f"{tokens:,}" for tokens in lengths], series, "{:.1f}")
    axes.set(xlabel="prompt tokens", ylabel="ms")


def _completion(axes: Axes, rows: list[Result]) -> None:
    rates = sorted({row["rate"] for row in rows})
    for mode, name in MODE_NAMES.items():
        mine = {row["rate"]: fmean(row["jct_ms"]) for row in rows if row["mode"] == mode}
        axes.plot(rates, [mine[rate] for rate in rates], "o-", label=name)
    axes.set(xlabel="requests a second (1,024 prompt, 32 answer tokens)", ylabel="ms", ylim=(0, None))
    axes.legend()


ARM_NAMES = {
    "session": "session",
    "least_load": "least load",
    "prompt_tree": "prompt tree",
    "session_fetch": "session, pages pulled",
    "cost": "cost (eq 1 and 2)",
}


def locality(simulated: Result | None, measured: Result | None) -> Figure | str:
    """P99 of TTFT and hits by share ratio and policy; a row for each of the results that there are."""
    found = [
        (words, result)
        for words, result in (("measured", measured), ("simulated", simulated))
        if result is not None and any(row["kind"] == "run" for row in result["samples"])
    ]
    if not found:
        return "no result file locality yet: `make measure NAME=locality`"
    figure, rows = plt.subplots(len(found), 2, figsize=(11, 3.0 * len(found)), squeeze=False)
    for (words, result), (left, right) in zip(found, rows, strict=True):
        runs = [row for row in result["samples"] if row["kind"] == "run"]
        ratios = sorted({row["ratio"] for row in runs})
        arms = [arm for arm in ARM_NAMES if any(row["arm"] == arm for row in runs)]
        for axes, key, scale in ((left, "ttft_p99_ms", 1.0), (right, "hit_ratio", 100.0)):
            series = {
                ARM_NAMES[arm]: [
                    None
                    if (value := result["metrics"].get(f"share{ratio}_{arm}_{key}")) is None
                    else value * scale
                    for ratio in ratios
                ]
                for arm in arms
            }
            grouped_bars(axes, [f"share ratio {ratio}" for ratio in ratios], series)
        left.set(ylabel="ms", title=f"P99 of TTFT, median of the seeds ({words})")
        if (legend := left.get_legend()) is not None:  # the right one's is enough
            legend.remove()
        right.set(ylabel="%", title=f"Prompt tokens that were not computed ({words})", ylim=(0, 118))
    return figure


SHEETS = (
    Sheet(
        "memserve-09",
        "MemServe Figure 9: what the mempool's calls cost",
        ours="the mempool's deciding code in one process, medians of calls and rounds; index alone, and "
        "the whole insert "
        "call with pages checked and sealed. Measured while other programs used the same two cores.",
        paper="about 800 ns a block for memory calls, at most 0.7 ms to insert 4K tokens, flat in the "
        "cached ratio.",
        differs="the paper's library is Python and C++ on its machine; ours is Python, hashes are made by "
        "the client.",
        needs=("mempool-api",),
        draw=calls,
    ),
    Sheet(
        "memserve-10",
        "MemServe Figure 10: radix index beside vLLM's block hashes",
        ours="tokens to hashes, look-up and insert of one prompt, both caches in turn in one process, "
        "medians; other "
        "programs used the same two cores, so ratios mean more than times.",
        paper="prefill time with vLLM 0.4's hash index grows with the prompt, with MemPool's radix index "
        "it does not.",
        differs="the paper adds the model's forward pass, we show the index alone; the peer is vLLM 0.26, "
        "whose prefix "
        "cache was rewritten since.",
        needs=("prefix-index",),
        draw=index,
    ),
    Sheet(
        "memserve-11",
        "MemServe Figure 11: discrete and aggregated blocks on the wire",
        ours="wall time from call to completion, best of 1, 2, 4 lanes for pages; dotted: one plain copy "
        "of 256 MiB.",
        paper="aggregating 2 x layers blocks into one wins by far; one communicator is enough for large "
        "blocks.",
        differs="two H200s instead of the paper's GPUs; NCCL's communicators, threads and buffer sizes "
        "are not varied; "
        "imported pages need no NCCL at all.",
        needs=("h200x2-transfer",),
        draw=wire,
    ),
    Sheet(
        "memserve-12",
        "MemServe Figure 12: by-layer, by-request, by-request-agg",
        ours="left, the mempool's mover between two spaces, behind a clock that computes 32 layers; middle and right, "
        "a cluster of a prefill and a decode worker: prompts one by one, then 1,024 prompt and 32 answer tokens at "
        "several rates.",
        paper="by-layer is best at low load, by-request-agg at high load (1,024 prompt and 32 answer tokens).",
        differs="the paper sends each of a block's 2 x layers pieces by an NCCL call of its own. Ours sends a layer of "
        "all blocks in one transfer, and a by-layer copy that falls behind sends several layers at once: at any load "
        "it has no more transfers than layers. On CPU the engine is a small model.",
        needs=("h200x2-transfer-modes",),
        also=("transfer-modes",),
        draw=modes,
    ),
    Sheet(
        "memserve-15",
        "MemServe Figure 15: placing by session, by load, by prompt tree, by cost",
        ours="3 prefill and 1 decode instance, 80 sessions of questions about 1K-token documents, open loop at 70% of "
        "what `session` can take; equal caches, tokens new to every run. Simulated: costs by an H200's data sheet.",
        paper="prompt-tree scheduling lowers the P99 of TTFT by 59% against intra-session scheduling at share ratio 2.",
        differs="the paper runs Llama2-13B on H800s and does not state its load; `session, pages pulled` and `cost` "
        "bring pages from other instances, which the paper's policies do not.",
        also=("simulated-locality", "locality"),
        draw=locality,
    ),
)
