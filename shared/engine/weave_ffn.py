"""One rank's FFN, whole, in equal halves, and as smart splitting cuts it (TokenWeave, Figure 9). For measurements.

    python -m shared.engine.weave_ffn MODEL_DIR OUT.json --tp RANKS [--tokens 512,768,...]

The sizes of one rank of `--tp` on one GPU, without its sums: gate and up, SiLU and product, down. Both parts of a cut
come one after the other, as without communication. Random weights; cuts take turns within a round. The smart cut is
that of shared/weave/smart_split.py with the tiles of these very kernels, all SMs theirs, with the fewest extra waves.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from shared.weave.smart_split import SmartSplit, SplitRules
from shared.weave.tiles import DEFAULT_TILE, tile_of
from shared.weave.waves import Tile, layer_gemms

TOKENS = "512,768,1024,1280,1536,2048,3072,4096,6144,8192,12288,16384"
CALLS = 8  # in one measured stretch
CPU_SMS = 8


class Ffn:
    """Weights of one rank."""

    def __init__(self, config: dict[str, Any], tp: int, device: torch.device) -> None:
        self.config, self.tp, self.device = config, tp, device
        hidden, inner = config["hidden_size"], config["intermediate_size"] // tp
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._up = torch.randn(2 * inner, hidden, dtype=dtype, device=device) / hidden**0.5
        self._down = torch.randn(hidden, inner, dtype=dtype, device=device) / inner**0.5
        self._inner = inner
        self.rows = torch.randn(1, hidden, dtype=dtype, device=device)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> the rank's part of the sum."""
        both = rows @ self._up.t()
        return (functional.silu(both[:, : self._inner]) * both[:, self._inner :]) @ self._down.t()

    def tiles(self, num_tokens: int) -> list[Tile]:
        """Of gate_up and down, from their kernels' names at this size."""
        if self.device.type != "cuda":
            return [DEFAULT_TILE, DEFAULT_TILE]
        rows = self.rows.expand(num_tokens, -1).contiguous()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self(rows)
            torch.cuda.synchronize(self.device)
        found = [tile for event in profile.events() or () if (tile := tile_of(event.name))]
        return (found + [DEFAULT_TILE] * 2)[:2]

    def splitter(self, tiles: list[Tile]) -> SmartSplit:
        """Of the FFN's two products."""
        config = self.config
        gemms = layer_gemms(
            hidden=config["hidden_size"], intermediate=config["intermediate_size"],
            num_heads=config["num_attention_heads"], num_kv_heads=config["num_key_value_heads"],
            head_dim=config["hidden_size"] // config["num_attention_heads"], tp=self.tp,
            tiles=[DEFAULT_TILE, DEFAULT_TILE, *tiles],
        )[2:]  # fmt: skip
        sms = CPU_SMS
        if self.device.type == "cuda":
            sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        return SmartSplit(gemms, SplitRules(sms, max_extra_ratio=1.0))


def timed_us(device: torch.device, work: Callable[[], Any]) -> float:
    """Of one call."""
    if device.type != "cuda":
        begin_s = time.perf_counter()
        work()
        return (time.perf_counter() - begin_s) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(CALLS):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / CALLS


def measured(ffn: Ffn, num_tokens: int, rounds: int) -> dict[str, Any]:
    """One sample: {kind, tokens, tiles, first: of each cut, us: {whole, equal, smart}: a value a round}."""
    tiles = ffn.tiles(num_tokens)
    split = ffn.splitter(tiles).choose(num_tokens)
    first = {"equal": num_tokens // 2} | ({"smart": split.first} if split else {})
    rows = ffn.rows.repeat(num_tokens, 1)

    def parts(cut: int) -> None:
        ffn(rows[:cut])
        ffn(rows[cut:])

    works: dict[str, Callable[[], Any]] = {"whole": lambda: ffn(rows)}
    works |= {name: lambda cut=cut: parts(cut) for name, cut in first.items()}
    us: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            taken = timed_us(ffn.device, work)
            if number:
                us[name].append(round(taken, 2))
    return {
        "kind": "ffn", "tokens": num_tokens, "tiles": [[tile.tokens, tile.columns] for tile in tiles], "first": first,
        "us": us,
    }  # fmt: skip


def main(argv: list[str]) -> int:
    """Exit status 0; the samples are in OUT.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(argv)
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    ffn = Ffn(json.loads((options.model_dir / "config.json").read_text()), options.tp, device)
    tokens = options.tokens or [int(n) for n in TOKENS.split(",")]
    if device.type != "cuda":
        tokens = tokens[:2]
    with torch.inference_mode():
        samples = [measured(ffn, count, options.rounds) for count in tokens]
    options.out.write_text(json.dumps({"is_whole": True, "samples": samples}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
