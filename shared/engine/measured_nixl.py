"""For measurements only: stock vLLM that hands prompts off, or takes them, by its own NixlConnector."""

from collections.abc import AsyncIterator
from typing import Any

from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


class NixlEngine:
    """One end, with random weights. `role`: kv_producer (prefill) or kv_consumer (decode)."""

    def __init__(self, model_dir: str, role: str, **args: Any) -> None:
        config = KVTransferConfig(kv_connector="NixlConnector", kv_role=role)
        engine_args = AsyncEngineArgs(
            model=model_dir, load_format="dummy", seed=0, kv_transfer_config=config, **args
        )
        self._llm = AsyncLLM.from_engine_args(engine_args)

    async def prefill(self, name: str, prompt: list[int]) -> dict[str, Any]:
        """Compute a prompt and hold its blocks; what the decode end needs to read them."""
        params = self._params(1, {"do_remote_decode": True, "do_remote_prefill": False})
        found: dict[str, Any] = {}
        async for output in self._llm.generate(TokensPrompt(prompt_token_ids=prompt), params, name):
            found = output.kv_transfer_params or found
        return found

    async def decode(
        self, name: str, prompt: list[int], max_tokens: int, transfer: dict[str, Any]
    ) -> AsyncIterator[int]:
        """With each output, how many of the prompt's tokens were read and not computed."""
        params = self._params(max_tokens, transfer)
        async for output in self._llm.generate(TokensPrompt(prompt_token_ids=prompt), params, name):
            yield output.num_cached_tokens or 0

    @staticmethod
    def _params(max_tokens: int, transfer: dict[str, Any]) -> SamplingParams:
        return SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA, extra_args={"kv_transfer_params": transfer},
        )  # fmt: skip

    def close(self) -> None:
        """Stop its processes."""
        self._llm.shutdown()
