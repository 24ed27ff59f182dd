"""How much KV an engine in the mempool's pages has room for, beside stock vLLM, for four shapes of one GPU's rank.

Every layer of each shape is there, with random weights; of 70B with four-way tensor parallelism it is what one of the
four GPUs holds. Nothing is scaled: blocks are those that the engine got, memory is what the GPU's driver counts as used
by everybody, the mempool's context among it, once the engine has served. Engines import vLLM all at once and are made
one after the other.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.results import Metrics, Samples
from loadtest.waiting_engines import EngineFailed, Waiting

KIND = "capacity"
ENGINES = ("stock", "pages")
FLAGS = ["--rounds", "0", "--prompt-tokens", "128", "--max-tokens", "8", "--eager"]
PATIENCE = 4
IMPORTS = 3  # processes that wait with vLLM imported
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
_LLAMA |= {"torch_dtype": "bfloat16", "max_position_embeddings": 131072, "bos_token_id": 1, "eos_token_id": 2}


def _shape(layers: int, hidden: int, inner: int, heads: int, kv: int, dim: int, words: int) -> dict[str, Any]:
    return _LLAMA | {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv, "head_dim": dim, "vocab_size": words, "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    }  # fmt: skip


SHAPES = {  # as in docs/page-geometry.md
    "8b_tp1": _shape(32, 4096, 14336, 32, 8, 128, 128256),
    "70b_tp4": _shape(80, 8192, 28672 // 4, 64 // 4, 8 // 4, 128, 128256 // 4),  # one rank of four
    "34b_tp1": _shape(60, 7168, 20480, 56, 8, 128, 64000),
    "0_5b_tp1": _shape(24, 896, 4864, 14, 2, 64, 151936),
}


def token_bytes(config: Mapping[str, Any]) -> int:
    """KV of one token: all layers, K and V, 16 bits."""
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * dim * 2


def at_equal_memory(stock: Mapping[str, Any], pages: Mapping[str, Any], kv_bytes: int) -> float:
    """Tokens that fit in pages over those of stock, had both used as much of the GPU as stock did."""
    tokens = {
        name: facts["num_blocks"] * facts["block_tokens"] for name, facts in (("s", stock), ("p", pages))
    }
    return (tokens["p"] + (used(stock) - used(pages)) / kv_bytes) / tokens["s"]


def used(facts: Mapping[str, Any]) -> int:
    """Bytes of the GPU, by everybody, after it served where that was looked at."""
    return facts.get("used_after_bytes") or facts["used_bytes"]


def metrics_of(samples: Samples) -> Metrics:
    """Of each shape that both engines had; `samples` of kind "capacity"."""
    out: Metrics = {}
    for shape in dict.fromkeys(row["shape"] for row in samples):
        found = {row["engine"]: row for row in samples if row["shape"] == shape}
        for engine, row in found.items():
            out[f"{shape}_{engine}_tokens"] = row["num_blocks"] * row["block_tokens"]
            out[f"{shape}_{engine}_used_bytes"] = used(row)
        if set(ENGINES) <= found.keys() and all(used(row) for row in found.values()):
            kv_bytes = found["pages"]["token_bytes"]
            out[f"capacity_{shape}_ratio"] = at_equal_memory(found["stock"], found["pages"], kv_bytes)
    return out


def measure(
    folder: Path,
    models: Mapping[str, Path],
    done: set[tuple[str, str]],
    *,
    device: str = "cuda",
    flags: Sequence[str] = (),
    end_s: float,
    engine_s: float,
) -> Iterator[dict[str, Any]]:
    """A sample an engine, of those not in `done`. A failure is said.

    Args: models: folders by shape. end_s: nothing runs behind it (monotonic). engine_s: what an engine takes; none is
    begun with less time left, and none gets more than PATIENCE times that.
    """
    todo = [(shape, engine) for shape in models for engine in ENGINES if (shape, engine) not in done]
    waiting = Waiting(folder)

    def begin(shape: str, engine: str) -> None:
        given = [*FLAGS, *flags, "--device", device]
        waiting.begin(f"{shape}-{engine}", ["loadtest.pages_engine", *given, engine, str(models[shape])])

    try:
        for each in todo[:IMPORTS]:
            begin(*each)
        for number, (shape, engine) in enumerate(todo):
            if time.monotonic() > end_s - engine_s:
                print(f"  {KIND} {shape} {engine}: no time left", flush=True)
                continue
            begin_s = time.monotonic()
            try:
                limit_s = min(end_s - begin_s, PATIENCE * engine_s)
                found = waiting.measure(f"{shape}-{engine}", limit_s, in_pages=engine == "pages")
            except EngineFailed as error:
                print(f"  {KIND} {error}", flush=True)
                continue
            finally:
                for after in todo[number + IMPORTS : number + IMPORTS + 1]:
                    begin(*after)
            config = json.loads((models[shape] / "config.json").read_text())
            del found["samples"]
            yield {
                "kind": KIND, "shape": shape, "engine": engine, "run": 0, "token_bytes": token_bytes(config),
                "took_s": round(time.monotonic() - begin_s, 1), **found,
            }  # fmt: skip
    finally:
        waiting.close()
