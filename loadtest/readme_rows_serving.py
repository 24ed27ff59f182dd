"""Of readme_rows.py: whole requests beside plain vLLM."""

# (file, metric, what it is, form, bar)
SERVING: list[tuple[str, str, str, str, str]] = [
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
    ("h200-beside-stock", "loogle_ttft_mean_ratio", "mean TTFT over plain vLLM's, documents", "{:.2f}", ""),
    ("h200-beside-stock", "sharegpt_ttft_mean_ratio", "the same, chat", "{:.2f}", ""),
    ("h200-beside-stock", "react_ttft_mean_ratio", "the same, agents", "{:.2f}", ""),
    (
        "h200-full-batches",
        "stream_256_ratio",
        "256 requests at once, streamed: tokens/s over plain vLLM's with two or four API processes, whichever suits it",
        "{:.2f}",
        "",
    ),
    (
        "h200-full-batches",
        "whole_256_ratio",
        "the same, answers not streamed",
        "{:.2f}",
        "",
    ),
    ("h200-full-batches", "stream_64_ratio", "the same of 64 at once, streamed", "{:.2f}", ""),
    ("h200-full-batches", "whole_64_ratio", "the same of 64 at once, not streamed", "{:.2f}", ""),
    (
        "h200-full-batches",
        "stream_256_quire_ttft_p50_ms",
        "256 requests at once, streamed: median first token",
        "{:.0f} ms",
        "",
    ),
    (
        "h200-full-batches",
        "stream_256_stock_ttft_p50_ms",
        "the same, plain vLLM",
        "{:.0f} ms",
        "",
    ),
]
