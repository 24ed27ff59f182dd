"""What stock vLLM says: `python -m tests.support.stock_reference MODEL_DIR CASES.json OUT.json [DTYPE [graphs]]`.

No Quire code runs here: one colocated engine, float32 unless told otherwise, one thread, no KV connector, eager unless
"graphs" asks for torch.compile and CUDA graphs. A case is
{"id", "prompt": [token ids], "params": SamplingParams keywords} and optionally "structured" (a JSON
schema), "after" (id of an earlier case: its prompt and answer go before this prompt: a second turn) and
"stop_crossing" (id of an earlier case: stop at a string that begins in its first output token and ends in its second).
The result maps id to {"prompt", "params", "choices": [{"token_ids", "text", "finish_reason", "logprobs"}]}.
Cases run one after another, so that no batch mixes them, each against an empty prefix cache, and then once more
with its own prompt cached ("cached_choices"): the last positions are then computed alone, which in 16 bits, and on a
GPU even in 32, may tip a near tie the other way.
"""

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

GRAPHS = sys.argv[-1] == "graphs"
os.environ.update(
    {} if GRAPHS else {"TORCHDYNAMO_DISABLE": "1"},
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    VLLM_USE_FLASHINFER_SAMPLER="0",
)


def crossing_stop(tokenizer: Any, token_ids: list[int]) -> str:
    """Last character of the first token's text and first character of the second's."""
    first = tokenizer.decode(token_ids[:1])
    both = tokenizer.decode(token_ids[:2])
    assert both.startswith(first), (first, both)
    assert len(both) > len(first) > 0, (first, both)
    return both[len(first) - 1 : len(first) + 1]


def resolve(case: dict[str, Any], done: dict[str, Any], tokenizer: Any) -> tuple[list[int], dict[str, Any]]:
    """Prompt and parameters of a case, given the results of earlier ones."""
    prompt, params = list(case["prompt"]), dict(case["params"])
    if "after" in case:
        earlier = done[case["after"]]
        prompt = earlier["prompt"] + earlier["choices"][0]["token_ids"] + prompt
    if "stop_crossing" in case:
        params["stop"] = crossing_stop(tokenizer, done[case["stop_crossing"]]["choices"][0]["token_ids"])
    return prompt, params


def choices_of(result: Any) -> list[dict[str, Any]]:
    """What one answer said, choice by choice."""
    return [
        {
            "token_ids": list(choice.token_ids),
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            "logprobs": [
                row[token].logprob
                for token, row in zip(choice.token_ids, choice.logprobs or [], strict=False)
            ],
        }
        for choice in sorted(result.outputs, key=lambda c: c.index)
    ]


def meet_in_a_file() -> None:
    """For the engine's only rank. vLLM chooses a port seconds before it binds it: another may have it by then."""
    from vllm.v1.executor import uniproc_executor

    folder = Path(tempfile.mkdtemp(prefix="stock-"))
    # vLLM names shared memory after what follows the last colon
    method = f"file://{folder}/rank:{folder.name}"
    setattr(uniproc_executor, "get_distributed_init_method", lambda _ip, _port: method)  # noqa: B010


def run_cases(
    model_dir: str, cases: list[dict[str, Any]], dtype: str = "float32", **options: Any
) -> dict[str, Any]:
    """All cases through one stock engine. `options`: for vLLM's LLM, beside or instead of those below."""
    gc.disable()  # until vLLM is imported: a fifth of that time
    from vllm import LLM, ModelRegistry, SamplingParams
    from vllm.platforms import current_platform
    from vllm.sampling_params import StructuredOutputsParams

    share = {}
    if current_platform.is_cpu():  # saves a 13 s inspection process
        from vllm.model_executor.models.llama import LlamaForCausalLM

        ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
    else:  # that must be free when it starts, however little it takes
        share = {"gpu_memory_utilization": 0.1}
    gc.freeze()
    gc.enable()
    meet_in_a_file()
    given: dict[str, Any] = {
        "model": model_dir,
        "dtype": dtype,
        "enforce_eager": not GRAPHS,
        "block_size": 32,
        "max_model_len": 4096,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 256 << 20,
        "seed": 0,
        "async_scheduling": False,
        "structured_outputs_config": {
            "backend": "guidance",
            "disable_any_whitespace": True,
        },  # as Quire's default
    }
    llm = LLM(**(given | share | options))
    done: dict[str, Any] = {}
    for case in cases:
        prompt, params = resolve(case, done, llm.get_tokenizer())
        sampling = dict(params)
        if "structured" in case:
            sampling["structured_outputs"] = StructuredOutputsParams(json=case["structured"])
        if "logit_bias" in sampling:
            sampling["logit_bias"] = {int(k): v for k, v in sampling["logit_bias"].items()}

        def ask(prompt: list[int] = prompt, sampling: dict[str, Any] = sampling) -> list[dict[str, Any]]:
            return choices_of(
                llm.generate({"prompt_token_ids": prompt}, SamplingParams(**sampling), use_tqdm=False)[0]
            )

        llm.reset_prefix_cache()
        done[case["id"]] = {"prompt": prompt, "params": params, "choices": ask(), "cached_choices": ask()}
    return done


def main() -> None:
    """See the module's docstring."""
    model_dir, cases_path, out_path = sys.argv[1:4]
    cases = json.loads(Path(cases_path).read_text())
    dtype = sys.argv[4] if len(sys.argv) > 4 else "float32"
    Path(out_path).write_text(json.dumps(run_cases(model_dir, cases, dtype)))


if __name__ == "__main__":
    main()
