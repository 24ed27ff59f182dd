"""What bench_weave.py's samples say: metrics, and a table for people. Pure."""

from statistics import median

from loadtest.results import Metrics, Samples

LONG_TOKENS = 4096  # the gain is that of steps from here on
SHAREGPT = "sharegpt"
STOCKS = ("stock", "stock-fused")  # vLLM without and with its own fusion: gains are over the better one


def step_times(samples: Samples) -> dict[tuple[str, int, int], dict[str, float]]:
    """(shape, ranks, tokens) -> mode -> median ms."""
    found: dict[tuple[str, int, int], dict[str, list[float]]] = {}
    for sample in samples:
        if sample["kind"] == "step":
            key = (f"{sample['shape']}_{sample['layers']}_layers", sample["ranks"], sample["tokens"])
            found.setdefault(key, {}).setdefault(sample["mode"], []).append(sample["ms"])
    return {key: {mode: median(values) for mode, values in modes.items()} for key, modes in found.items()}


def gains(samples: Samples, shape: str, ranks: int) -> dict[str, list[float]]:
    """Ratios of the long steps of a shape on so many ranks."""
    out: dict[str, list[float]] = {"gain": [], "fuse": [], "recovered": []}
    for (name, count, tokens), ms in step_times(samples).items():
        if not name.startswith(f"{shape}_") or count != ranks or tokens < LONG_TOKENS:
            continue
        stocks = [ms[mode] for mode in STOCKS if mode in ms]
        if not stocks or "full" not in ms:
            continue
        out["gain"].append(min(stocks) / ms["full"])
        out["fuse"].append(min(stocks) / ms["fuse"])
        if "stock-alone" in ms and min(stocks) > ms["stock-alone"]:
            out["recovered"].append((min(stocks) - ms["full"]) / (min(stocks) - ms["stock-alone"]))
    return out


def step_metrics(samples: Samples) -> Metrics:
    """Medians over rounds; the gains of the 70B shape on the most ranks stand for the whole."""
    out: Metrics = {}
    for (shape, ranks, tokens), modes in step_times(samples).items():
        for mode, ms in modes.items():
            out[f"{shape}_tp{ranks}_{tokens}_{mode.replace('-', '_')}_ms"] = ms
    groups = sorted({(s["shape"], s["ranks"]) for s in samples if s["kind"] == "step"})
    for shape, ranks in groups:
        found = gains(samples, shape, ranks)
        for name, values in found.items():
            if values:
                out[f"{shape}_tp{ranks}_{name}_ratio"] = median(values)
        if shape == "70b" and found["gain"]:  # in order of ranks: the most of them stay
            out["prefill_gain_ratio"] = median(found["gain"])
            out["prefill_gain_ranks_count"] = float(ranks)
            out.pop("communication_recovered_ratio", None)
            if found["recovered"]:
                out["communication_recovered_ratio"] = median(found["recovered"])
    return out


def serving_metrics(samples: Samples) -> Metrics:
    """Tokens per second, of prompts and answers together, by load and chunk; what full gains over the better stock."""
    rates: dict[tuple[str, int, str], dict[str, list[float]]] = {}
    for sample in samples:
        if sample["kind"] == "serving":
            workload = sample.get("workload", SHAREGPT)
            what = ("" if workload == SHAREGPT else f"{workload}_") + str(sample["step_tokens"])
            key = (f"{sample['shape']}_{sample['layers']}_layers", sample["ranks"], what)
            rates.setdefault(key, {}).setdefault(sample["mode"], []).append(sample["tokens"] / sample["s"])
    out: Metrics = {}
    for (shape, ranks, what), modes in rates.items():
        found = {mode: median(values) for mode, values in modes.items()}
        for mode, rate in found.items():
            out[f"{shape}_tp{ranks}_serving_{what}_{mode.replace('-', '_')}_tokens_per_s"] = rate
        stocks = [found[mode] for mode in STOCKS if mode in found]
        if stocks and "full" in found:
            out[f"{shape}_tp{ranks}_serving_gain_{what}_ratio"] = found["full"] / max(stocks)
    return out


def ffn_metrics(samples: Samples) -> Metrics:
    """Of one rank's FFN in two parts: the time of each cut over that of the whole; medians."""
    out: Metrics = {}
    for sample in samples:
        if sample["kind"] == "ffn":
            head = f"{sample['shape']}_tp{sample['ranks']}_ffn_{sample['tokens']}"
            whole_us = median(sample["us"]["whole"])
            out[f"{head}_us"] = whole_us
            for cut in ("equal", "smart"):
                if sample["us"].get(cut):
                    out[f"{head}_{cut}_ratio"] = median(sample["us"][cut]) / whole_us
    return out


def metrics_from_samples(samples: Samples) -> Metrics:
    """All of them; what failed has no metric but its count."""
    out = step_metrics(samples) | serving_metrics(samples) | ffn_metrics(samples)
    out["failed_count"] = float(sum(sample["kind"] == "failed" for sample in samples))
    return out


def table(samples: Samples) -> list[str]:
    """A line for each group and length, a column for each way, in ms."""
    times = step_times(samples)
    columns = sorted({mode for modes in times.values() for mode in modes})
    lines = [f"{'':28}" + "".join(f"{column:>13}" for column in columns) + f"{'stock/full':>13}"]
    for (shape, ranks, tokens), modes in sorted(times.items()):
        cells = "".join(f"{modes[c]:13.3f}" if c in modes else f"{'-':>13}" for c in columns)
        stocks = [modes[mode] for mode in STOCKS if mode in modes]
        gain = f"{min(stocks) / modes['full']:13.3f}" if stocks and "full" in modes else f"{'-':>13}"
        lines.append(f"{shape + ' tp' + str(ranks):20}{tokens:8}{cells}{gain}")
    return lines
