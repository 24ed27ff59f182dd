"""SamplingSpec (the wire) to vLLM's SamplingParams."""

from typing import Any

import msgspec
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from shared.errors import InvalidRequest
from shared.wire.requests import SamplingSpec, StructuredSpec


def structured_params(spec: StructuredSpec) -> StructuredOutputsParams:
    """Raises: InvalidRequest on a kind whose value does not parse."""
    match spec.kind:
        case "json_schema":
            return StructuredOutputsParams(json=spec.value)
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "regex":
            return StructuredOutputsParams(regex=spec.value)
        case "grammar":
            return StructuredOutputsParams(grammar=spec.value)
        case "choice":
            try:
                return StructuredOutputsParams(choice=msgspec.json.decode(spec.value, type=list[str]))
            except msgspec.MsgspecError as error:
                raise InvalidRequest(f"choice is no JSON list of strings: {error}") from error


def sampling_params(spec: SamplingSpec, extra_args: dict[str, Any]) -> SamplingParams:
    """Token ids go in and come out: the gateway detokenizes and watches for stop strings.

    Raises: InvalidRequest on values that vLLM refuses.
    """
    try:
        return SamplingParams(
            n=spec.n,
            max_tokens=spec.max_tokens,
            min_tokens=spec.min_tokens,
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            min_p=spec.min_p,
            seed=spec.seed,
            presence_penalty=spec.presence_penalty,
            frequency_penalty=spec.frequency_penalty,
            repetition_penalty=spec.repetition_penalty,
            logit_bias=dict(spec.logit_bias) or None,
            stop_token_ids=list(spec.stop_token_ids) or None,
            ignore_eos=spec.ignore_eos,
            logprobs=spec.logprobs,
            prompt_logprobs=spec.prompt_logprobs,
            structured_outputs=structured_params(spec.structured) if spec.structured else None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra_args or None,
        )
    except (ValueError, TypeError) as error:
        raise InvalidRequest(str(error)) from error


def honour_seeds() -> None:
    """Have vLLM's CPU sampler draw by a request's seed beside requests that have none, as its CUDA sampler does.

    Stock forward_cpu ignores every seed of a batch unless all its requests have one.
    """
    TopKTopPSampler.forward_cpu = TopKTopPSampler.forward_native  # type: ignore[method-assign]
