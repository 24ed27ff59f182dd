"""Two ranks of a tiny Mixtral whose sums are fused: `python -m tests.support.weave_experts_run FOLDER`.

One engine with random weights on the CPU answers the same prompts in vLLM's way, fused, and asked to weave.
FOLDER/out.json gets {way: {"answers": token ids, "counters": of each rank, what was fused and woven}}.
"""

import json
import sys
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 1024, "hidden_size": 1024,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 128, "max_position_embeddings": 2048, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "num_local_experts": 4,
    "num_experts_per_tok": 2, "torch_dtype": "float32", "sliding_window": None,
}  # fmt: skip
RANKS, LENGTHS, ANSWER_TOKENS, LONGEST = 2, (5, 40, 130), 8, 256
WAYS = ("off", "fuse", "full")


def main() -> None:
    """See the module's docstring."""
    folder = Path(sys.argv[1])
    (folder / "config.json").write_text(json.dumps(CONFIG))
    from shared.engine.vllm_setup import prepare_environment

    prepare_environment("cpu", 1, in_pages=True)
    from vllm import SamplingParams

    from shared.engine.preload import preload_architecture
    from shared.engine.weave_measured import bench_engine

    preload_architecture(str(folder))
    engine = bench_engine("weave", str(folder), RANKS, LONGEST, 16, "cpu")
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": [(7 * i * n + 3) % 1000 + 5 for i in range(n)]} for n in LENGTHS]
    found: dict[str, Any] = {}
    for way in WAYS:
        engine.switch(way)
        before = engine._llm.collective_rpc("quire_weave_counters")
        answers = [
            list(one.outputs[0].token_ids) for one in engine._llm.generate(asked, params, use_tqdm=False)
        ]
        after = engine._llm.collective_rpc("quire_weave_counters")
        grown = [{key: b[key] - a[key] for key in a} for a, b in zip(before, after, strict=True)]
        found[way] = {"answers": answers, "counters": grown}
    (folder / "out.json").write_text(json.dumps(found))
    engine.close()


if __name__ == "__main__":
    main()
