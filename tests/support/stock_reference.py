"""What stock vLLM says: `python -m tests.support.stock_reference MODEL_DIR CASES.json OUT.json`.

No Quire code runs here: one colocated engine, float32, one thread, no KV connector. Each case is
{"id", "prompt": [token ids], "params": SamplingParams keywords}; "structured": JSON schema text. The result maps
id to [{"token_ids", "text", "finish_reason", "logprobs": [[token, logprob] of the sampled token]}] per choice.
Cases run one after another, so that no batch mixes them, each against an empty prefix cache.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(  # noqa: TID251  vLLM's settings
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    TORCHDYNAMO_DISABLE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)


def run_cases(model_dir: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """All cases through one stock engine."""
    from vllm import LLM, ModelRegistry, SamplingParams
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.sampling_params import StructuredOutputsParams

    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)  # saves a 13 s inspection process
    llm = LLM(
        model=model_dir,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=4096,
        max_num_seqs=16,
        kv_cache_memory_bytes=256 << 20,
        seed=0,
    )
    out: dict[str, Any] = {}
    for case in cases:
        params = dict(case["params"])
        if "structured" in case:
            params["structured_outputs"] = StructuredOutputsParams(json=case["structured"])
        if "logit_bias" in params:
            params["logit_bias"] = {int(k): v for k, v in params["logit_bias"].items()}
        llm.reset_prefix_cache()
        result = llm.generate({"prompt_token_ids": case["prompt"]}, SamplingParams(**params), use_tqdm=False)[
            0
        ]
        out[case["id"]] = [
            {
                "token_ids": list(choice.token_ids),
                "text": choice.text,
                "finish_reason": choice.finish_reason,
                "logprobs": [
                    [token, row[token].logprob]
                    for token, row in zip(choice.token_ids, choice.logprobs or [], strict=False)
                ],
            }
            for choice in sorted(result.outputs, key=lambda c: c.index)
        ]
    return out


def main() -> None:
    """See the module's docstring."""
    model_dir, cases_path, out_path = sys.argv[1:4]
    cases = json.loads(Path(cases_path).read_text())
    Path(out_path).write_text(json.dumps(run_cases(model_dir, cases)))


if __name__ == "__main__":
    main()
