"""vAttention, Tables 6 and 7: what of a prompt's time is attention, and what a decode step's attention takes."""

from matplotlib.figure import Figure

from loadtest.figures.sheet import Result, Sheet, table
from loadtest.figures.vattention import CONTIGUOUS, NAMES, NOT_YET, SHAPE

LIBRARIES = {"flash3": "FA3", "torch_flash2": "FA2", "triton": "Triton"}
LACKING = "h200-contiguous.json has no samples for this table: that part failed or was left out"
Cells = dict[tuple[str, int], float]  # (cache and kernel, size) -> ms


def _name(variant: str) -> str:
    cache, _, kernel = variant.partition(".")
    return f"{NAMES.get(cache, cache)}, {LIBRARIES.get(kernel, kernel)}"


def _least(cells: Cells, key: tuple[str, int], ms: float) -> None:
    cells[key] = min(ms, cells.get(key, ms))


def _attention(result: Result, kind: str) -> Cells:
    """ms of all layers, by prompt tokens or by batch."""
    layers = result["settings"]["model"]["num_hidden_layers"]
    out: Cells = {}
    for row in result["samples"]:
        if row["part"] == "kernel" and row["kind"] == kind:
            size, ms = (
                (row["tokens"], row["layer_ms"] * layers) if kind == "prefill" else (row["batch"], row["ms"])
            )
            _least(out, (_name(row["variant"]), size), ms)
    return out


def _rows(cells: Cells, shown: dict[tuple[str, int], str], size_of: str) -> Figure | str:
    if not cells:
        return LACKING
    names = list(dict.fromkeys(name for name, _ in cells))
    sizes = sorted({size for _, size in cells})
    rows = [
        [f"{size // 1024}K" if size >= 1024 else str(size), *(shown.get((name, size), "-") for name in names)]
        for size in sizes
    ]
    return table(rows, [size_of, *names], 3 + 1.7 * len(names))


def prefill(result: Result) -> Figure | str:
    """Table 6: s from a prompt to its first token, in parentheses the attention of all layers in one call."""
    whole: Cells = {}
    for row in result["samples"]:
        if row["part"] == "serving" and row["kind"] == "prefill":
            _least(whole, (_name(f"{row['engine']}.{row['kernel']}"), row["tokens"]), row["ttft_ms"])
    attention = _attention(result, "prefill")
    shown = {
        key: f"{ms / 1e3:.2f} ({attention[key] / 1e3:.2f})" if key in attention else f"{ms / 1e3:.2f}"
        for key, ms in whole.items()
    }
    return _rows(whole, shown, "prompt tokens")


def decode(result: Result) -> Figure | str:
    """Table 7: ms of all layers' attention in one decode step, 16K tokens a request."""
    cells = _attention(result, "decode")
    return _rows(cells, {key: f"{ms:.2f}" for key, ms in cells.items()}, "batch")


SHEETS = (
    Sheet(
        "vattention-table-6",
        "vAttention Table 6: prefill, and its attention in parentheses, s",
        ours=f"time to first token of one prompt at a time, eager, in the server's chunks; attention: all layers, the "
        f"prompt in one call; {SHAPE}.",
        paper="Llama-3-8B at 128K on 2 A100s: FlashAttention-2 20.4 (15.4) with blocks, 16.8 (11.6) without.",
        differs="one H200, FlashAttention-3, whose paged kernel has caught up; up to 128K tokens.",
        needs=(CONTIGUOUS,),
        reason=NOT_YET,
        draw=prefill,
    ),
    Sheet(
        "vattention-table-7",
        "vAttention Table 7: attention of a decode step, all layers, ms",
        ours=f"16K tokens a request, captured in a graph where that can be; {SHAPE}.",
        paper="Llama-3-8B, batch 16 and 32: 11.9 and 25.4 with blocks, 11.8 and 25.3 without; vLLM's 17.8, 35.3.",
        differs="vLLM 0.26 has that kernel no more; its Triton kernel is shown.",
        needs=(CONTIGUOUS,),
        reason=NOT_YET,
        draw=decode,
    ),
)
