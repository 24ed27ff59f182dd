"""AQUA, Figures 4, 7 to 9 and 13: responsiveness in bursts, profiles, reloads, long prompts."""

from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from loadtest.figures import aqua_burst
from loadtest.figures.profile_plots import memory_by_rate, requests_in_order
from loadtest.figures.sheet import ACCENT, INK, PALE, Result, Sheet

GB = 1e9
PAPER_SWAP_GB = {"2": 6.0, "3": 15.0, "5": 40.0}  # Yi-34B, arXiv lengths, A100 (9.4)


def _case(result: Result, name: str) -> dict[str, Any] | None:
    return next((row for row in result["samples"] if row["case"] == name), None)


def stable_and_next(result: Result) -> Figure | str:
    """Figure 4, of the case with measured costs."""
    found = _case(result, "h200")
    return requests_in_order(found) if found else "simulated-profile lacks the case h200"


def profile(result: Result) -> Figure | str:
    """Figure 7b."""
    found = _case(result, "h200")
    return memory_by_rate(found) if found else "simulated-profile lacks the case h200"


def swap_need(result: Result) -> Figure | str:
    """The text of 9.4: swap space for bursts of several factors."""
    found = _case(result, "h200_chunk8192_tight")
    if not found:
        return "simulated-profile lacks the case h200_chunk8192_tight"
    figure, axes = plt.subplots(figsize=(6, 3.2))
    names = [f"{float(factor):g}x" for factor in found["swap_bytes"]]
    ours = [count / GB for count in found["swap_bytes"].values()]
    paper = [PAPER_SWAP_GB.get(factor, 0.0) for factor in found["swap_bytes"]]
    for place, (values, colour, label) in enumerate(
        ((ours, ACCENT, "ours: 8B, ShareGPT's lengths"), (paper, PALE, "paper: 34B, arXiv's lengths"))
    ):
        bars = axes.bar(
            [at - 0.2 + 0.4 * place for at in range(len(names))], values, 0.4, color=colour, label=label
        )
        axes.bar_label(bars, [f"{value:.0f}" for value in values], fontsize=7)
    axes.axhline(found["pool_bytes"] / GB, color=INK, linestyle=":", linewidth=1, label="our KV memory")
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="swap space, GB", xlabel="burst of a minute, times the stable rate")
    axes.legend()
    return figure


OURS_BURST = (
    "8B shape, random weights, on one H200, another one lends; ShareGPT-like lengths, 25 prompts at the stable rate, "
    "then twice the rate; KV memory for 1.3 times what the stable rate holds; one engine for both kinds of swap space."
)
DIFFERS_BURST = "model, GPU; nothing is redirected behind the burst: all requests are served here."
SHEETS = (
    Sheet(
        "aqua-04",
        "AQUA Figure 4: a rate that is kept and one that is not",
        ours="8B shape on one H200, chunk 512, in the simulator with measured costs; the stable rate and a step more, "
        "by when a request was sent; dotted: the limits.",
        paper="Llama 3.1 8B on an A100: 2.5 requests/s keep a TTFT of 1 s, at 3 the queue grows to 5 to 6 s.",
        differs="another GPU, simulated; the paper's rate is of its ShareGPT sample, ours of the statistics "
        "that Sarathi-Serve has of it, cut at 8,192 tokens; 90% of ours must keep 1 s, the paper names no share.",
        needs=("simulated-profile",),
        draw=stable_and_next,
    ),
    Sheet(
        "aqua-07",
        "AQUA Figure 7: a profile",
        ours="every run of the profiler: 8B shape on one H200, simulated with measured costs; green runs keep the SLO, "
        "the line is the stable rate, dotted are the limits and the threshold above which a model lends.",
        paper="(a) Stable Diffusion 3 peaks at a batch of 8 with 30 GB free; (b) Llama 8B keeps 5 requests/s on "
        "an H100 with more than 25 GB free.",
        differs="only (b); (a) is in aqua-03, and of any callable by `quire profile --callable MODULE:FUNCTION --plots "
        "DIR`. What is free is of the KV memory, which is what this engine could lend.",
        needs=("simulated-profile",),
        draw=profile,
    ),
    Sheet(
        "aqua-swap-need",
        "AQUA 9.4: swap space for bursts of 2, 3 and 5 times the stable rate",
        ours="8B shape on a simulated H200, steps of 8,192 tokens, KV memory for 1.3 times its stable rate's; an "
        "estimate of what fair slices hold beyond it. With steps of 512 tokens the chunk bounds bursts: no need.",
        paper="6, 15 and 40 GB for Yi-34B on an A100 with arXiv's lengths.",
        differs="model, lengths, GPU; the paper measures with its scheduler, ours is computed from a run without one.",
        needs=("simulated-profile",),
        draw=swap_need,
    ),
    Sheet(
        "aqua-08",
        "AQUA Figure 8: TTFT and TPOT in a burst",
        ours=OURS_BURST + " The first seed; dotted: the burst begins.",
        paper="20 times lower TTFT than FCFS, TPOT up to 1.5 times lower than with slices over PCIe.",
        differs=DIFFERS_BURST,
        needs=("h200x2-burst",),
        draw=aqua_burst.burst,
    ),
    Sheet(
        "aqua-09",
        "AQUA Figure 9a: a cached context of 100K tokens reloaded",
        ours="8B shape with random weights, 256 new tokens behind the context, one request at a time; medians; right: "
        "the reload's rate beside plain copies of as many bytes.",
        paper="(a) TTFT 3.5 times lower from a peer than from DRAM; (b) 4 times the throughput of prompts of 8,192.",
        differs="model, GPU; no other requests meanwhile. (b), prompts longer than memory, is aqua-09b.",
        needs=("h200x2-context-reload",),
        draw=aqua_burst.reload,
    ),
    Sheet(
        "aqua-09b",
        "AQUA Figure 9b: decoding prompts longer than memory",
        ours="8B shape with random weights, one request at a time; what does not fit is read in place on a peer GPU or "
        "in host memory; right: a step, dotted one in which a plain copy of the far bytes comes behind the rest.",
        paper="4 times the throughput of prompts of 8,192 tokens, with the context on a peer and not in DRAM.",
        differs="model, GPU; the paper's engine (FlexGen) stages layers, ours reads pages where they are.",
        needs=("h200x2-long-prompt",),
        draw=aqua_burst.long_prompt,
    ),
    Sheet(
        "aqua-13",
        "AQUA Figure 13: a burst of long prompts",
        ours="as Figure 8, with lengths like arXiv's (median 7,000 tokens) at three times the stable rate.",
        paper="peak TTFT and TPOT 2 times lower.",
        differs=DIFFERS_BURST,
        needs=("h200x2-burst",),
        draw=aqua_burst.long_burst,
    ),
)
