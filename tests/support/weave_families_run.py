"""Two ranks of tiny models whose sums are fused: `python -m tests.support.weave_families_run FOLDER`.

vLLM is imported once; of each family an engine with random weights on the CPU, forked from here, answers the same
prompts in vLLM's way, fused, asked to weave, and without any sum. FOLDER/out.json gets {family: {way: {"answers": token
ids, "counters": of each rank, what was fused and woven}}}.
"""

import json
import sys
from pathlib import Path
from typing import Any

from shared.engine.vllm_setup import prepare_environment

prepare_environment("cpu", 1, in_pages=True)

from vllm import SamplingParams  # noqa: E402
from vllm.distributed import get_tensor_model_parallel_rank  # noqa: E402
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader  # noqa: E402
from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight  # noqa: E402

from shared.engine.preload import preload_architecture  # noqa: E402
from shared.engine.weave_measured import bench_engine  # noqa: E402
from tests.support.pressure_run import ended, forked  # noqa: E402

_COMMON = {
    "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "torch_dtype": "float32", "sliding_window": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 512,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "head_dim": 32},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
}  # fmt: skip
RANKS, LENGTHS, ANSWER_TOKENS, LONGEST = 2, (5, 40, 130), 8, 256
WAYS = ("off", "fuse", "full", "alone")
SPAN = 0.3  # of weights: what layers add counts for more than what a token is


def scatter_weights() -> None:
    """In ranks forked from here, in place of vLLM's random weights: those are so small that no answer depends on a sum,
    and ranks have the same.
    """

    def fill(_loader: Any, model: Any, _config: Any) -> None:
        for number, (name, weights) in enumerate(model.state_dict().items()):
            is_split = weights.dim() > 1 and not name.endswith(".gate.weight")
            own = get_tensor_model_parallel_rank() if is_split else 0
            initialize_single_dummy_weight(weights, -SPAN, SPAN, seed=RANKS * number + own)

    DummyModelLoader.load_weights = fill


def answers_of(folder: Path, out: Path) -> None:
    """Of one family, in each of WAYS."""
    scatter_weights()
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
    engine.close()
    out.write_text(json.dumps(found))


def main() -> None:
    """See the module's docstring."""
    folder, found = Path(sys.argv[1]), {}
    for family, more in FAMILIES.items():
        made, out = folder / family, folder / f"{family}.json"
        made.mkdir()
        (made / "config.json").write_text(json.dumps(_COMMON | more))
        assert ended(forked(lambda made=made, out=out: answers_of(made, out))) == 0, family
        found[family] = json.loads(out.read_text())
    (folder / "out.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
