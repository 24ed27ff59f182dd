"""SamplingSpec (the wire) to vLLM's SamplingParams, and what vLLM says of a prompt back to the wire."""

import asyncio
from typing import Any

import msgspec
import torch
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.structured_output import backend_guidance
from vllm.v1.worker.gpu_input_batch import InputBatch

from shared.errors import InvalidRequest
from shared.wire.requests import GREEDY_BELOW, SamplingSpec, StructuredSpec, TokenLogprob

MOST_CHOICES = 1 << 14  # vLLM's own limit of n
NUM_SEEDS = (1 << 63) - MOST_CHOICES
SLICE_SCORES = 4_096  # about a millisecond


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
            except msgspec.MsgspecError as error:  # of a str
                raise InvalidRequest(f"choice is no JSON list of strings: {error}") from error


def engine_seed(seed: int | None) -> int | None:
    """A seed that every choice's can be made of, by the same rule each time.

    vLLM gives choice i `seed + i`, which must fit int64, and reads -1 as no seed: too large ones wrap around.
    """
    if seed in (None, -1) or 0 <= seed < NUM_SEEDS or seed < -MOST_CHOICES:
        return seed
    return seed % NUM_SEEDS


def sampling_params(spec: SamplingSpec, extra_args: dict[str, Any]) -> SamplingParams:
    """Token ids go in and come out: the gateway detokenizes and watches for stop strings.

    Raises: InvalidRequest on values that vLLM refuses.
    """
    try:
        return SamplingParams(
            n=spec.n,
            max_tokens=spec.max_tokens,
            min_tokens=spec.min_tokens,
            # anything else below 0.01 is raised to that, and would be drawn
            temperature=0.0 if 0 <= spec.temperature < GREEDY_BELOW else spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            min_p=spec.min_p,
            seed=engine_seed(spec.seed),
            presence_penalty=spec.presence_penalty,
            frequency_penalty=spec.frequency_penalty,
            repetition_penalty=spec.repetition_penalty,
            logit_bias=dict(spec.logit_bias) or None,
            stop_token_ids=list(spec.stop_token_ids) or None,
            ignore_eos=spec.ignore_eos,
            logprobs=spec.logprobs,
            prompt_logprobs=spec.prompt_logprobs,
            flat_logprobs=spec.prompt_logprobs is not None,  # made in a third of the time, see prompt_rows()
            structured_outputs=structured_params(spec.structured) if spec.structured else None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra_args or None,
        )
    except (ValueError, TypeError) as error:
        raise InvalidRequest(str(error)) from error


async def prompt_rows(found: FlatLogprobs) -> list[list[TokenLogprob] | None]:
    """The prompt's log probabilities as the wire has them: see PromptScored.

    There may be hundreds of thousands: the loop gets its turn in between.
    """
    rows: list[list[TokenLogprob] | None] = []
    due = SLICE_SCORES
    for begin, end in zip(found.start_indices, found.end_indices, strict=True):
        rows.append(_row(found, begin, end) if begin < end else None)
        if end > due:
            due = end + SLICE_SCORES
            await asyncio.sleep(0)
    return rows


def _row(found: FlatLogprobs, begin: int, end: int) -> list[TokenLogprob]:
    """The token itself is among the best, as a rule: it comes once then."""
    ids = found.token_ids[begin:end]
    values = zip(ids, found.logprobs[begin:end], found.ranks[begin:end], strict=True)
    row = [TokenLogprob(token, logprob, rank or 0) for token, logprob, rank in values]
    if ids[0] in ids[1:]:
        row[0] = row.pop(ids.index(ids[0], 1))
    return row


class RewindableGenerator(torch.Generator):
    """A CPU generator whose last draw can be taken back.

    vLLM draws for every request of a batch and takes back what it drew for prompts that are not computed to their end,
    by moving the generator's offset: CPU generators have none, and the engine died of it.
    """

    _before: torch.Tensor | None = None

    @classmethod
    def like(cls, other: torch.Generator) -> "RewindableGenerator":
        """One that goes on where `other` is."""
        made = cls()
        made.set_state(other.get_state())
        return made

    def keep(self) -> None:
        """The next draw may be taken back."""
        self._before = self.get_state()

    def get_offset(self) -> int:
        """CUDA's meaning is not kept: only the difference to set_offset() counts."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Take the last draw back. Raises: nothing; without a draw nothing happens."""
        if offset < 0 and self._before is not None:
            self.set_state(self._before)


def honour_seeds() -> None:
    """Have vLLM's CPU sampler draw by a request's seed beside requests that have none, as its CUDA sampler does.

    Stock forward_cpu ignores every seed of a batch unless all its requests have one; and see RewindableGenerator.
    """
    native, add_request = TopKTopPSampler.forward_native, InputBatch.add_request

    def draw(self: Any, logits: Any, generators: dict[int, torch.Generator], k: Any, p: Any) -> Any:
        for generator in generators.values():
            if isinstance(generator, RewindableGenerator):
                generator.keep()
        return native(self, logits, generators, k, p)

    def add(self: Any, request: Any) -> int:
        generator = request.generator
        if type(generator) is torch.Generator and generator.device.type == "cpu":
            request.generator = RewindableGenerator.like(generator)
        return add_request(self, request)

    TopKTopPSampler.forward_cpu = draw  # type: ignore[method-assign]
    InputBatch.add_request = add  # type: ignore[method-assign]


_CHECKED = "quire_grammar_checked"


def mark_checked(params: SamplingParams) -> None:
    """The grammar of these parameters was tried out: see trust_checks()."""
    setattr(params, _CHECKED, True)


def trust_checks() -> None:
    """Have vLLM not validate again, on the event loop, the grammars that mark_checked() names. Harmless twice."""
    stock = backend_guidance.validate_guidance_grammar
    if hasattr(stock, _CHECKED):
        return

    def validate(sampling_params: SamplingParams, tokenizer: Any = None) -> None:
        if not getattr(sampling_params, _CHECKED, False):
            stock(sampling_params, tokenizer)

    setattr(validate, _CHECKED, True)
    backend_guidance.validate_guidance_grammar = validate
