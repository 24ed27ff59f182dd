"""Which script measures which result file. A measuring script has NAME-independent functions:

metrics_from_samples(samples) -> {metric: number}   pure: verify_results.py calls it again
main(argv) -> exit status                           measures and writes loadtest/results/NAME.json
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"

MEASURES = {  # result name: module
    "gateway-cpu": "loadtest.bench_gateway",
    "gateway-peers": "loadtest.bench_gateway_peers",
    "cluster-footprint": "loadtest.bench_footprint",
    "h200-exactness": "loadtest.bench_exactness",
    "h200-swap": "loadtest.bench_swap",
    "h200-contiguous": "loadtest.bench_contiguous",
    "h200-arxiv-long": "loadtest.bench_arxiv_long",
    "h200-weave": "loadtest.bench_weave",
    "h200-vmm": "loadtest.bench_pages",
    "h200-vmm-variants": "loadtest.bench_pages_variants",
    "h200-release": "loadtest.bench_release",
    "h200-killed": "loadtest.bench_killed",
    "h200-faults": "loadtest.bench_faults",
    "h200x2-handoff": "loadtest.bench_handoff",
    "mempool-api": "loadtest.bench_mempool_api",
    "checksums": "loadtest.bench_checksums",
    "prefix-index": "loadtest.bench_prefix_index",
    "slot-mapping": "loadtest.bench_slot_mapping",
    "h200-slot-mapping": "loadtest.bench_slot_mapping",
    "slot-batch": "loadtest.bench_slot_batch",
    "h200-offload": "loadtest.bench_offload",
    "h200x2-transfer": "loadtest.bench_transfer",
    "h200x2-pool-transfer": "loadtest.bench_pool_transfer",
    "transfer-modes": "loadtest.bench_transfer_modes",
    "h200x2-transfer-modes": "loadtest.bench_transfer_modes",
    "two-host-transfer": "loadtest.bench_two_hosts",
    "two-host-handoff": "loadtest.bench_host_handoff",
    "cost-model": "loadtest.bench_cost_model",
    "crossover": "loadtest.bench_crossover",
    "context-caching": "loadtest.bench_caching",
    "h200-context-caching": "loadtest.bench_caching",
    "locality": "loadtest.bench_locality",
    "simulated-locality": "loadtest.bench_locality",
    "cluster-locality": "loadtest.bench_locality_cluster",
    "trace-replay": "loadtest.bench_trace_replay",
    "cluster-trace-replay": "loadtest.bench_trace_cluster",
    "simulated-profile": "loadtest.bench_profile",
    "simulated-burst": "loadtest.bench_burst_simulated",
    "prompt-tree": "loadtest.bench_prompt_tree",
    "simulator": "loadtest.bench_simulator",
    "h200-disaggregation": "loadtest.bench_disaggregation",
    "h200-beside-stock": "loadtest.bench_beside_stock",
    "h200-full-batches": "loadtest.bench_full_batches",
    "placer": "loadtest.bench_placer",
    "fair-shares": "loadtest.bench_fair_shares",
    "h200-fused-norm": "loadtest.bench_fused_norm",
    "h200x2-producer-cost": "loadtest.bench_producer_cost",
    "h200x2-burst": "loadtest.bench_burst",
    "h200x2-context-reload": "loadtest.bench_context_reload",
    "reload-host": "loadtest.bench_reload_host",
    "h200x2-long-prompt": "loadtest.bench_long_prompt",
    "h200x2-long-prompt-reclaim": "loadtest.bench_long_prompt_reclaim",
}


def script_of(name: str) -> str:
    """Path of the measuring script, relative to the repository. Raises: KeyError."""
    return MEASURES[name].replace(".", "/") + ".py"
