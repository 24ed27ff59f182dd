"""AQUA, Figure 1: who waits for a first token in a burst, and how long whole requests take, by system."""

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from loadtest.figures.sheet import ACCENT, INK, SECOND, THIRD, Result, Sheet

SYSTEMS = {
    "fcfs": ("order of arrival", ACCENT),
    "cfs_dram": ("fair slices, host memory", THIRD),
    "cfs_peer": ("fair slices, a peer's memory", SECOND),
}


def responsiveness(result: Result) -> Figure | str:
    """Both by the moment at which a request was sent; the first seed that all systems have."""
    rows = [
        row for row in result["samples"]
        if row["kind"] == "point" and (row["workload"], row["load"]) == ("sharegpt", "burst")
    ]  # fmt: skip
    seeds = [{row["seed"] for row in rows if row["system"] == system} for system in SYSTEMS]
    both = sorted(set.intersection(*seeds))
    if not both:
        return "h200x2-burst has no seed that all systems were measured with"
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
    for system, (label, colour) in SYSTEMS.items():
        row = next(row for row in rows if (row["system"], row["seed"]) == (system, both[0]))
        at_s = [at / 1000 for at in row["at_ms"]]
        left.plot(at_s, [ms / 1000 for ms in row["ttft_ms"]], ".", markersize=3, color=colour, label=label)
        right.plot(at_s, [ms / 1000 for ms in row["rct_ms"]], ".", markersize=3, color=colour, label=label)
        left.axvline(row["burst_from_ms"] / 1000, color=INK, linestyle=":", linewidth=1)
    left.set(xlabel="sent, s", ylabel="TTFT, s", title="(a) responsiveness")
    right.set(xlabel="sent, s", ylabel="RCT, s", title="(b) throughput")
    left.legend()
    return figure


SHEETS = (
    Sheet(
        "aqua-01",
        "AQUA Figure 1: responsiveness and throughput in a burst",
        ours="8B shape on one H200, 25 prompts at the stable rate, then twice the rate for a minute (from the "
        "dotted line); one seed; time to first token and to the last, of each request.",
        paper="order of arrival has first tokens four times later in the burst; fair slices over PCIe double the "
        "completion time; over NVLink they do neither.",
        differs="GPU, model, engine of 2026; what is lent is another H200's.",
        needs=("h200x2-burst",),
        draw=responsiveness,
    ),
)
