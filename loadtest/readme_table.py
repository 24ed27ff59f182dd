"""The README's table of figures, from the result files: `python -m loadtest.readme_table` rewrites it."""

import json
import sys
from typing import Any

from loadtest.registry import RESULTS, ROOT

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
README = ROOT / "README.md"

# (file, metric, what it is, form, bar)
ROWS: list[tuple[str, str, str, str, str]] = [
    (
        "gateway-cpu",
        "cpu_us_per_request",
        "gateway CPU per request, two stages, tokenizing included",
        "{:.0f} us",
        "600",
    ),
    (
        "gateway-cpu",
        "vllm_router_cpu_us_per_request",
        "the same, vllm-router (Rust, no tokenizing)",
        "{:.0f} us",
        "",
    ),
    ("gateway-cpu", "litellm_cpu_us_per_request", "the same, LiteLLM", "{:.0f} us", ""),
    (
        "gateway-cpu",
        "cpu_us_per_chunk",
        "gateway CPU per streamed chunk, detokenizing included",
        "{:.1f} us",
        "40",
    ),
    ("gateway-cpu", "vllm_router_cpu_us_per_chunk", "the same, vllm-router", "{:.1f} us", ""),
    ("gateway-cpu", "litellm_cpu_us_per_chunk", "the same, LiteLLM", "{:.0f} us", ""),
    ("gateway-cpu", "added_ttft_p99_ms", "added TTFT at half load, p99, one stage", "{:.1f} ms", "5"),
    (
        "gateway-cpu",
        "disaggregated_added_ttft_p99_ms",
        "added TTFT at half load, p99, two stages",
        "{:.1f} ms",
        "",
    ),
    (
        "gateway-peers",
        "quire_traced_added_ttft_p99_ms",
        "added TTFT at one rate for all, every request traced, p99",
        "{:.1f} ms",
        "5",
    ),
    ("gateway-peers", "smg_cache_aware_added_ttft_p99_ms", "the same, smg by cached text", "{:.1f} ms", ""),
    (
        "gateway-peers",
        "vllm_router_cache_aware_added_ttft_p99_ms",
        "the same, vllm-router by cached text",
        "{:.1f} ms",
        "",
    ),
    ("prompt-tree", "lookup_p50_us", "look-up of 256 blocks in all prompt trees, median", "{:.0f} us", "150"),
    ("prompt-tree", "insert_p50_us", "256 new blocks into one, median", "{:.0f} us", "400"),
    ("prompt-tree", "placement_p99_ms", "look-up and placement at 1,000 requests/s, p99", "{:.2f} ms", "2"),
    ("cluster-footprint", "ready_s", "`quire up` to ready, installed", "{:.0f} s", "40"),
    (
        "cluster-footprint",
        "pss_bytes",
        "memory (PSS) of 1 prefill + 1 decode + everything else",
        "{:.2f} GiB",
        "5",
    ),
    (
        "h200-vmm",
        "throughput_ratio",
        "vLLM on the mempool's pages, output tokens/s of stock's",
        "{:.3f}",
        "0.98",
    ),
    ("h200-vmm", "step_p99_ratio", "the same, p99 of a decode step", "{:.3f}", "1.02"),
    ("h200-vmm", "ttft_ratio", "the same, median time to first token", "{:.3f}", "1.02"),
    (
        "h200-vmm",
        "capacity_ratio",
        "the same, KV capacity at equal GPU memory behind serving, the worst of four shapes",
        "{:.3f}",
        "0.97",
    ),
    (
        "h200-release",
        "release_gib_per_s",
        "memory given back under pressure, seen by another process",
        "{:.0f} GiB/s",
        "40",
    ),
    ("h200-release", "release_step_p99_ratio", "the same, p99 of a decode step meanwhile", "{:.2f}", "1.02"),
    ("h200x2-transfer", "page_pull_2mib_gb_per_s", "64 pages of 2 MiB from GPU to GPU", "{:.0f} GB/s", "300"),
    ("h200x2-transfer", "page_pull_8mib_gb_per_s", "64 pages of 8 MiB from GPU to GPU", "{:.0f} GB/s", "300"),
    ("h200x2-transfer", "nixl_gb_per_s", "the same, NIXL on its own slabs, 2 MiB", "{:.0f} GB/s", ""),
    ("h200x2-transfer", "nccl_grouped_gb_per_s", "the same, NCCL grouped, 2 MiB", "{:.0f} GB/s", ""),
    ("h200x2-handoff", "32k_handoff_ms", "handoff of 32K tokens between two GPUs, 8B shape", "{:.0f} ms", ""),
    ("h200x2-handoff", "32k_fetch_ms", "the part of it that waits for pages", "{:.0f} ms", ""),
    (
        "h200x2-handoff",
        "32k_nixl_handoff_ms",
        "that handoff by vLLM's NixlConnector, no gateway between",
        "{:.0f} ms",
        "",
    ),
    (
        "h200x2-handoff",
        "4k_handoff_of_nixl_ratio",
        "handoff of 4K tokens, over NixlConnector's",
        "{:.2f}",
        "",
    ),
    ("h200x2-handoff", "32k_recompute_ms", "computing those 32K tokens again", "{:.0f} ms", ""),
    (
        "h200x2-transfer-modes",
        "layer_32768_fetch_ms",
        "the same wait where layers leave while the next is computed (`by-layer`, eager)",
        "{:.1f} ms",
        "",
    ),
    (
        "h200-fused-norm",
        "min_gain_8mb_up_tp2_ratio",
        "all-reduce + add + RMSNorm in one launch, 2 GPUs, from 8 MB up: over the best of four others, at least",
        "{:.2f}",
        "",
    ),
    (
        "h200-fused-norm",
        "limit_share_64mb_tp2_ratio",
        "the same, share of what the links could at 64 MB",
        "{:.2f}",
        "",
    ),
    ("h200-fused-norm", "min_gain_8mb_up_tp4_ratio", "the same on 4 GPUs, from 8 MB up", "{:.2f}", "1.10"),
    ("h200-fused-norm", "gain_64mb_tp4_ratio", "the same on 4 GPUs, at 64 MB", "{:.2f}", "1.10"),
    (
        "h200-fused-norm",
        "min_gain_any_ratio",
        "the same, at the worst of all sizes from 1 to 32K tokens",
        "{:.2f}",
        "0.97",
    ),
    (
        "h200-swap",
        "page_share_of_copy_ratio",
        "swap of pages to the host, share of one plain copy",
        "{:.3f}",
        "0.97",
    ),
    ("h200-swap", "batch_32k_gb_per_s", "swap in pieces of 32 KiB", "{:.0f} GB/s", "30"),
    ("h200-swap", "vllm_32k_gb_per_s", "the same, vLLM's own batch", "{:.0f} GB/s", ""),
    (
        "h200-swap",
        "shapes_of_vllm_ratio",
        "the seven shapes of vLLM's PR 38460, speed over vLLM's own copies, at the worst",
        "{:.2f}",
        "1",
    ),
    (
        "h200-offload",
        "quire_tpot_swap_of_quiet_ratio",
        "TPOT while blocks are loaded behind vLLM's OffloadingConnector",
        "{:.3f}",
        "1.05",
    ),
    ("cost-model", "cpu_median_error_ratio", "cost model off its grid, CPU: median error", "{:.3f}", "0.10"),
    ("cost-model", "cpu_p90_error_ratio", "the same, p90", "{:.3f}", "0.25"),
    ("cost-model", "h200_median_error_ratio", "the same on one H200, 8B shape: median", "{:.3f}", "0.10"),
    ("cost-model", "h200_p90_error_ratio", "the same, p90", "{:.3f}", "0.25"),
    (
        "crossover",
        "crossover_error_ratio",
        "fetch a prefix or compute it (eq 2): link rate where it turns, off the measured one, worst of four lengths",
        "{:.2f}",
        "0.20",
    ),
    ("crossover", "right_percent", "the same: choices that were the faster one", "{:.0f}%", ""),
    (
        "locality",
        "p99_ttft_vs_session_ratio",
        "placing by cost, share ratio 2: P99 of TTFT over placing by session",
        "{:.2f}",
        "0.41",
    ),
    (
        "simulated-locality",
        "p99_ttft_vs_session_ratio",
        "placing by cost, share ratio 2, simulated H200s: P99 of TTFT over placing by session",
        "{:.2f}",
        "0.41",
    ),
    (
        "simulated-locality",
        "share2_prompt_tree_p99_ttft_vs_session_ratio",
        "the same, placing by prompt tree",
        "{:.2f}",
        "0.41",
    ),
    (
        "trace-replay",
        "hit_rate_gap_points",
        "Mooncake's synthetic trace in the simulator: points of token hits below an infinite cache's",
        "{:.2f}",
        "2",
    ),
    (
        "trace-replay",
        "cost_memory_0_1_hit_percent",
        "the same with memory for a tenth of its tokens: hits",
        "{:.1f}%",
        "",
    ),
    (
        "trace-replay",
        "one_lru_memory_0_1_hit_percent",
        "the same, one LRU of all that memory",
        "{:.1f}%",
        "",
    ),
    (
        "simulator",
        "ttft_error_ratio",
        "simulator beside the CPU cluster: error of the mean TTFT",
        "{:.2f}",
        "",
    ),
    (
        "h200-disaggregation",
        "compared_points_count",
        "prefill and decode apart against colocated (8B shape): points compared",
        "{:.0f}",
        "",
    ),
    (
        "h200-disaggregation",
        "disaggregation_wins_count",
        "the same: points where P99 of JCT is surely lower apart",
        "{:.0f}",
        "",
    ),
    (
        "h200-disaggregation",
        "disaggregation_loses_count",
        "the same: points where it is surely higher",
        "{:.0f}",
        "",
    ),
    (
        "checksums",
        "default_p50_ratio",
        "a lease of 64 blocks of 1 MiB where 1 block in 1,000 has a checksum, time without",
        "{:.2f}",
        "1.1",
    ),
    ("checksums", "look_us_per_mib", "a look at a page before its lease", "{:.0f} us a MiB", "200"),
    ("mempool-api", "alloc_us_per_block", "alloc_mem, of 256 blocks", "{:.2f} us a block", "1"),
    (
        "mempool-api",
        "insert_4k_ms",
        "4K tokens into the mempool's index, worst cached ratio",
        "{:.2f} ms",
        "0.7",
    ),
    (
        "mempool-api",
        "insert_call_4k_ms",
        "the same, the whole call: pages checked and sealed",
        "{:.2f} ms",
        "",
    ),
    ("mempool-api", "match_4k_ms", "4K tokens found in it, worst cached ratio", "{:.3f} ms", "0.15"),
    ("mempool-api", "match_call_4k_ms", "the same, the whole call", "{:.3f} ms", ""),
    (
        "prefix-index",
        "check_of_vllm_ratio",
        "hashing and looking up a new prompt, time of vLLM's",
        "{:.2f}",
        "1",
    ),
    ("prefix-index", "insert_of_vllm_ratio", "naming a prompt's blocks, time of vLLM's", "{:.2f}", "1"),
    (
        "slot-batch",
        "batch_slice_of_exact_ratio",
        "requests that fit in slots, share of none wasted",
        "{:.2f}",
        "",
    ),
    (
        "placer",
        "seconds_128_gpus_s",
        "placing models on 128 GPUs so that lenders meet borrowers, slowest of 20 mixes",
        "{:.1f} s",
        "5",
    ),
    ("placer", "optimality_gap_ratio", "the same, widest gap to the proven bound", "{:.4f}", "0.02"),
    (
        "fair-shares",
        "worst_share_error_ratio",
        "tenants 4:2:1 at 3x overload, two gateways: worst share in any 30 s, off by",
        "{:.3f}",
        "0.05",
    ),
    (
        "h200x2-burst",
        "ttft_p90_gain_ratio",
        "burst of twice the stable rate, two H200s: P90 of TTFT in order of arrival over fair slices on a peer",
        "{:.1f}",
        "10",
    ),
    (
        "h200x2-burst",
        "rct_ratio",
        "the same: mean completion time, fair slices over order of arrival",
        "{:.2f}",
        "1.15",
    ),
    ("h200x2-burst", "tpot_of_dram_ratio", "the same: time per token, peer over host memory", "{:.2f}", "1"),
    (
        "h200x2-burst",
        "uncontended_ratio",
        "at the stable rate: mean completion time over order of arrival's",
        "{:.3f}",
        "1.02",
    ),
    (
        "h200x2-context-reload",
        "ttft_gain_ratio",
        "100K cached tokens and 256 new ones: TTFT from host memory over from a peer GPU",
        "{:.2f}",
        "3.5",
    ),
    ("h200x2-context-reload", "peer_reload_gb_per_s", "the same: reload from the peer", "{:.0f} GB/s", ""),
    (
        "h200x2-producer-cost",
        "throughput_ratio",
        "a lender's throughput while a consumer uses its memory without pause, the worst of three models",
        "{:.3f}",
        "0.95",
    ),
    ("h200x2-producer-cost", "full_throughput_ratio", "the same, without a budget", "{:.3f}", ""),
    (
        "h200x2-producer-cost",
        "reclaim_over_bound_ratio",
        "8 GiB back under load, over their bytes at the copies' rate and one step",
        "{:.2f}",
        "1",
    ),
    (
        "h200x2-long-prompt",
        "throughput_gain_ratio",
        "prompt longer than the GPU's KV memory, decode: the rest on a peer GPU over in host memory",
        "{:.2f}",
        "4",
    ),
    (
        "two-host-transfer",
        "nixl_share_ratio",
        "pull between two hosts over TCP, share of raw NIXL",
        "{:.2f}",
        "0.8",
    ),
    (
        "two-host-handoff",
        "handoff_share_ratio",
        "a handoff between two hosts over TCP, leases and checks included, rate of raw NIXL's",
        "{:.2f}",
        "0.8",
    ),
]


def load(name: str) -> dict[str, Any] | None:
    """A result file, or None."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def render() -> str:
    """Markdown between the marks."""
    lines = ["| what | measured | bar | file |", "|---|---|---|---|"]
    machines = set()
    for name, metric, what, form, bar in ROWS:
        found = load(name)
        if found is None or metric not in found["metrics"]:
            continue
        machine = found["machine"]
        machines.add(f"{machine.get('cpu', 'unknown CPU')}, {machine.get('num_cpus', '?')} cores")
        value = found["metrics"][metric]
        shown = form.format(value / (1 << 30) if metric.endswith("_bytes") else value)
        lines.append(f"| {what} | {shown} | {bar} | [{name}](loadtest/results/{name}.json) |")
    if len(lines) == 2:
        return "\n"
    return "\n" + "\n".join(lines) + "\n\nMachine: " + "; ".join(sorted(machines)) + ".\n"


def main() -> int:
    """Rewrite the part of the README between the marks."""
    text = README.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    README.write_text(head + BEGIN + render() + END + tail)
    return 0


if __name__ == "__main__":
    sys.exit(main())
