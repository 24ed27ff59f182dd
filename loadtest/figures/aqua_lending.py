"""AQUA, Figures 3, 10 and 11: models that have memory to spare, what lending costs them; and how soon it is back."""

from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.figures.sheet import ACCENT, INK, PALE, SECOND, Result, Sheet, grouped_bars
from loadtest.producer_cost import bound_s

GB, GIB = 1e9, 1 << 30
NAMES = {
    "engine": "LLM, 8B",
    "diffusion": "diffusion, SD-XL",
    "audio": "audio, AudioGen",
    "tp4": "LLM, 70B, TP 4",
}
MODES = {"budget": "lending, with the budget", "full": "lending, budget off"}
MODELS = ("audio", "diffusion")


def _rows(result: Result, kind: str, **wanted: str) -> list[dict[str, Any]]:
    rows = [row for row in result["samples"] if row["kind"] == kind]
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def free_memory(result: Result) -> Figure | str:
    """Figure 3 (and 7a): throughput, and the memory that is left, by batch."""
    found = [(name, row["rows"]) for name in MODELS for row in _rows(result, "sweep", producer=name)[:1]]
    if not found:
        return "h200x2-producer-cost has no batches of the models"
    figure, many = plt.subplots(1, len(found), figsize=(4.5 * len(found), 3.2), squeeze=False)
    for axes, (name, rows) in zip(many[0], found, strict=True):
        sizes = [row["batch"] for row in rows]
        axes.plot(sizes, [row["items_per_s"] for row in rows], "o-", color=ACCENT, label="throughput")
        unit = _rows(result, "sweep", producer=name)[0]["unit"]
        axes.set(xscale="log", xlabel="batch", ylabel=f"{unit}/s", ylim=(0, None), title=NAMES[name])
        axes.set_xticks(sizes, [str(size) for size in sizes])
        right = axes.twinx()
        free = [(row["total_bytes"] - row["used_bytes"]) / GB for row in rows]
        right.plot(sizes, free, "s--", color=SECOND, label="free memory")
        right.set(ylabel="GB free", ylim=(0, None))
    figure.legend(loc="upper right", ncols=2)
    return figure


def _tpot(axes: Axes, result: Result, producer: str) -> None:
    """Mean TPOT, without lending and with it, by mode."""
    modes = [mode for mode in MODES if _rows(result, "round", producer=producer, mode=mode)]
    values = {
        arm: [
            _middle(
                [row[arm]["tpot_mean_ms"] for row in _rows(result, "round", producer=producer, mode=mode)]
            )
            for mode in modes
        ]
        for arm in ("off", "on")
    }
    series = {"not lending": values["off"], "lending": values["on"]}
    grouped_bars(
        axes, ["with the budget" if mode == "budget" else "budget off" for mode in modes], series, "{:.2f}"
    )
    axes.set(ylabel="mean TPOT, ms", title=NAMES[producer])


def cost(result: Result) -> Figure | str:
    """Figure 10: (a) throughput beside that without a consumer, (b) TPOT of the engine."""
    producers = [name for name in ("audio", "diffusion", "engine") if _rows(result, "round", producer=name)]
    if not producers:
        return "h200x2-producer-cost has no rounds"
    with_engine = "engine" in producers
    figure, many = plt.subplots(1, 1 + with_engine, figsize=(6 + 4 * with_engine, 3.2), squeeze=False)
    series: dict[str, list[float | None]] = {"not lending": [1.0] * len(producers)}
    for mode, label in MODES.items():
        series[label] = []
        for name in producers:
            rows = _rows(result, "round", producer=name, mode=mode)
            rates = [
                row["on"]["items"] / row["on"]["seconds"] / (row["off"]["items"] / row["off"]["seconds"])
                for row in rows
            ]
            series[label].append(_middle(rates) if rates else None)
    left = many[0][0]
    grouped_bars(left, [NAMES[name] for name in producers], series, "{:.3f}")
    left.axhline(0.95, color=INK, linestyle=":", linewidth=1)
    left.set(ylabel="throughput, of that without lending", ylim=(0, 1.25))
    if with_engine:
        _tpot(many[0][1], result, "engine")
    return figure


def cost_of_four(result: Result) -> Figure | str:
    """Figure 11a."""
    if not _rows(result, "round", producer="tp4"):
        return "no engine of four GPUs was measured, h200x2-producer-cost has no rounds of one: it needs five H200s"
    figure, axes = plt.subplots(figsize=(5, 3.2))
    _tpot(axes, result, "tp4")
    return figure


def reclaims(result: Result) -> Figure | str:
    """How many bytes are still lent, by the time since they were wanted back; the bound of each."""
    rows = _rows(result, "reclaim")
    if not rows:
        return "h200x2-producer-cost has no reclaims"
    figure, axes = plt.subplots(figsize=(6, 3.2))
    for number, row in enumerate(rows):
        most = max((left for _, left in row["course"]), default=0) or 1
        at_ms = [0.0, *(at for at, _ in row["course"]), 1e3 * row["seconds"]]
        left = [1.0, *(count / most for _, count in row["course"]), 0.0]
        axes.step(at_ms, [row["bytes"] / GIB * share for share in left], where="post", color=ACCENT)
        label = "bound: bytes over the copies' rate, and a step" if not number else None
        axes.axvline(1e3 * bound_s(row), color=PALE, linestyle="--", linewidth=1, label=label)
    axes.set(xlabel="ms since the producer wanted its memory back", ylabel="GiB still lent", xlim=(0, None))
    axes.legend()
    return figure


NEEDS = ("h200x2-producer-cost",)
SHEETS = (
    Sheet(
        "aqua-03",
        "AQUA Figure 3: models that compute at their best have memory to spare",
        ours="a diffusion UNet of SD-XL's shape and a transformer of AudioGen's, random weights, one H200; free is "
        "what PyTorch's allocator did not take, of all of the GPU's memory.",
        paper="throughput of audio and image models on an A100 levels off with tens of GB free.",
        differs="GPU; the text encoders and the autoencoder are left out; PyTorch's own attention.",
        needs=NEEDS,
        draw=free_memory,
    ),
    Sheet(
        "aqua-10",
        "AQUA Figure 10: what lending costs",
        ours="the lender on one H200, on the other a consumer that moves blocks into its pages and back through the "
        "mempool without pause; medians over rounds with and without, in turn.",
        paper="less than 5% of throughput for audio, none for images; 4.5 ms of TPOT of two 8B models.",
        differs="the paper's consumers are the engines of its other experiments, which do not copy all the time; ours "
        "does, once with a budget of the lender's and once without.",
        needs=NEEDS,
        draw=cost,
    ),
    Sheet(
        "aqua-11",
        "AQUA Figure 11: what lending costs an engine of four GPUs",
        ours="70B shape on four H200s, a space lent on each, one consumer on a fifth.",
        paper="5% of TPOT of a 70B model on four GPUs.",
        differs="one consumer that copies all the time in place of four that read long prompts.",
        needs=NEEDS,
        draw=cost_of_four,
    ),
    Sheet(
        "aqua-reclaim",
        "AQUA 6: memory is back when it is needed",
        ours="8 GiB of a consumer's bytes in an engine's pages, wanted back while it serves: copied to host memory by "
        "the mempool, then the engine's again. Counted by another process every 2 ms.",
        paper="no figure of its own; consumers look every few iterations whether their lender wants memory back.",
        differs="here nobody waits for the consumer: the mempool copies.",
        needs=NEEDS,
        draw=reclaims,
    ),
)
