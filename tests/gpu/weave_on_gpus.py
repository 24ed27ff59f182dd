"""Woven and fused ranks beside stock vLLM on two GPUs: `python -m tests.gpu.weave_on_gpus [--ranks 2] [MODE ...]`.

MODE is a dtype with "+graphs" or without (float16, bfloat16+graphs): stock vLLM with as many ranks answers first, then
one engine of ours, whose steps go through the model in two parts (full) and whole (fuse); with graphs ours captures
its decode steps, stock compiles and captures. It prints a line for each mode and way.

Last come prompts that share what is computed in the same step: the shorter one goes first in the batch, and its tokens
attend to blocks that only the step's second part would have written.

The model has random weights. 16 bits tip near ties, and sums that are rounded once instead of twice tip other ones. So
a sequence that differs is looked at where it first does: "near_ties" are those where stock gave the two tokens log
probabilities less than TIE apart, "wrong" the others: it must be 0. "logprob_gap": the largest difference of a prompt
token's log probability.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 2048,
    "intermediate_size": 5632, "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 8192, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NUM_SHARERS, LONG, SHARED, SHORT = 6, 1500, 1024, 1300  # tokens of two prompts, and of what both begin with
LENGTHS = (3, 17, 130, 512, 777, 1500, 3000, 5000)  # steps hold 2,048: the last two are computed in chunks
STEP_TOKENS, ANSWER_TOKENS = 2048, 24
KV_BYTES = 4 << 30
MIN_TOKENS = 64  # of a step that is cut
TIE = {"float16": 0.05, "bfloat16": 0.4}
DEFAULT_MODES = ("float16", "bfloat16+graphs")


def make_model(folder: Path) -> Path:
    """Weights of a scale at which every layer counts; a tokenizer is not needed."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(3)
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    query = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    key = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * scale / columns**0.5).to(torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": matrix(CONFIG["vocab_size"], hidden, hidden**0.5),
        "lm_head.weight": matrix(CONFIG["vocab_size"], hidden, 4.0),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (query, hidden), "self_attn.k_proj": (key, hidden), "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        tensors |= {f"{name}{part}.weight": matrix(*shape) for part, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}{norm}.weight"] = 1 + 0.2 * torch.randn(hidden, generator=generator).to(
                torch.bfloat16
            )
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, CONFIG["vocab_size"]) for _ in range(length)] for length in LENGTHS]


def sharers() -> list[list[list[int]]]:
    """Three at a time: one fills a step while the others come, which share the next; the last begins as the second."""
    rng = random.Random(6)
    out = []
    for _ in range(NUM_SHARERS):
        filler, first, second = (
            [rng.randrange(3, CONFIG["vocab_size"]) for _ in range(length)]
            for length in (STEP_TOKENS, LONG, SHORT)
        )
        out.append([filler, first, first[:SHARED] + second[SHARED:]])
    return out


def answer(engine: Any, label: str) -> list[dict[str, Any]]:
    """Every prompt alone, all at once, then the sharers: {"tokens", "tops" (log probabilities of the best), "prompt"}.

    What asks for its prompt's log probabilities finds nothing cached, in vLLM.
    """
    from vllm import SamplingParams

    said = {
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": 8,
    }
    plain, params = SamplingParams(**said), SamplingParams(**said, prompt_logprobs=0)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts()]
    found = [engine.generate(one, params, use_tqdm=False)[0] for one in asked]
    found += engine.generate(asked, params, use_tqdm=False)
    for three in sharers():
        answers = engine.generate([{"prompt_token_ids": one} for one in three], plain, use_tqdm=False)
        found += answers
        hits = [one.num_cached_tokens for one in answers]
        if hits != [0, 0, SHARED]:
            raise RuntimeError(f"found cached: {hits}, so nothing was shared within a step")
    print(f"  {label}: {len(found)} answers", flush=True)
    out = []
    for one in found:
        choice = one.outputs[0]
        tops = [{str(token): lp.logprob for token, lp in row.items()} for row in choice.logprobs]
        rows = zip(one.prompt_token_ids[1:], (one.prompt_logprobs or [])[1:], strict=False)
        scores = [row[token].logprob for token, row in rows]
        out.append({"tokens": list(choice.token_ids), "tops": tops, "prompt": scores})
    return out


def child(kind: str, model: str, out: str, mode: str, ranks: int, device: str = "cuda") -> None:
    """One engine: OUT gets {way: answers}, and for ours the counters of its ranks."""
    from shared.engine.vllm_setup import prepare_environment

    prepare_environment(device, 1, in_pages=True)
    from shared.engine.weave_measured import NO_MULTICAST

    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    from vllm import LLM

    dtype, _, graphs = mode.partition("+")
    options: dict[str, Any] = {"compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}}
    if kind == "weave":
        from shared.engine.weave_settings import weave_arguments
        from shared.engine.worker_config import WorkerSettings

        settings = WorkerSettings(
            model_dir=model, tensor_parallel_size=ranks, weave="full", weave_min_tokens=MIN_TOKENS,
            enforce_eager=not graphs,
        )  # fmt: skip
        options = weave_arguments(settings, {})
    engine = LLM(
        model=model, dtype=dtype, tensor_parallel_size=ranks, seed=0, skip_tokenizer_init=True, max_num_seqs=16,
        max_model_len=6144, max_num_batched_tokens=STEP_TOKENS, enforce_eager=not graphs, max_logprobs=8,
        enable_prefix_caching=True, kv_cache_memory_bytes=KV_BYTES, **options,
    )  # fmt: skip
    if kind == "stock":
        found: dict[str, Any] = {"stock": answer(engine, f"stock {mode}")}
    else:
        found = {"full": answer(engine, f"full {mode}")}
        engine.collective_rpc("quire_weave_from", args=(1, 0))
        engine.reset_prefix_cache()
        found["fuse"] = answer(engine, f"fuse {mode}")
        found["counters"] = engine.collective_rpc("quire_weave_counters")
    Path(out).write_text(json.dumps(found))


def compared(ours: list[dict[str, Any]], stock: list[dict[str, Any]], dtype: str) -> dict[str, Any]:
    """A line of the table."""
    row = {"num": len(stock), "same": 0, "near_ties": 0, "wrong": 0, "logprob_gap": 0.0}
    for one, want in zip(ours, stock, strict=True):
        gaps = [abs(a - b) for a, b in zip(one["prompt"], want["prompt"], strict=True)]
        row["logprob_gap"] = round(max([row["logprob_gap"], *gaps]), 4)
        first = next(
            (i for i, (a, b) in enumerate(zip(one["tokens"], want["tokens"], strict=True)) if a != b), None
        )
        if first is None:
            row["same"] += 1
            continue
        tops = want["tops"][first]
        gap = tops[str(want["tokens"][first])] - tops.get(str(one["tokens"][first]), float("-inf"))
        row["near_ties" if gap < TIE[dtype] else "wrong"] += 1
    return row


def main() -> int:
    """Exit status 1 if anything is wrong or nothing was woven."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modes", nargs="*", default=list(DEFAULT_MODES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--child", nargs=3, metavar=("KIND", "MODEL", "OUT"))
    options = parser.parse_args()
    if options.child:
        child(*options.child, options.modes[0], options.ranks)
        return 0
    rows, num_wrong = [], 0
    with tempfile.TemporaryDirectory(prefix="quire-weave-") as name:
        folder = Path(name)
        model = make_model(folder / "model")
        for mode in options.modes:
            found: dict[str, Any] = {}
            for kind in ("stock", "weave"):
                out = folder / "out.json"
                words = [sys.executable, "-m", "tests.gpu.weave_on_gpus", mode, "--ranks", str(options.ranks)]
                words += ["--child", kind, str(model), str(out)]
                subprocess.run(words, cwd=ROOT, check=True, timeout=280)
                found |= json.loads(out.read_text())
            woven = [counters.get("woven", 0) for counters in found["counters"]]
            for way in ("full", "fuse"):
                row = compared(found[way], found["stock"], mode.partition("+")[0])
                num_wrong += row["wrong"] + (not min(woven))
                rows.append({"mode": mode, "way": way, **row, "woven": woven})
    for row in rows:
        print(json.dumps(row))
    print("ok" if not num_wrong else f"WRONG: {num_wrong}")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
