"""For measurements only: a vLLM engine of several ranks, stock or woven, and its forward passes' times."""

import multiprocessing
import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from vllm.distributed.parallel_state import GroupCoordinator

from shared.engine.vllm_setup import fork_ranks
from shared.errors import SettingsError

KINDS = ("weave", "stock", "stock-alone", "stock-fused")
MODES = {  # of an engine of kind weave: (fuse_min_tokens, full_min_tokens, without sums)
    "full": (1, 2, False),
    "fuse": (1, 0, False),
    "off": (0, 0, False),  # vLLM's own operations, eager as the others
    "alone": (0, 0, True),
}
KV_BYTES = {"cuda": 24 << 30, "cpu": 256 << 20}  # of each rank
CAPTURED = [1, 2, 4, *range(8, 65, 8)]  # decode steps that are replayed; stock's and ours
LEAST_WOVEN_TOKENS = 1024  # of steps that serve: TokenWeave 4.2.2 weaves hybrid batches from there on
SPARE_TOKENS = 64
DECODE_STEPS = 48
_HERE = "shared.engine.weave_measured"
# A bench's: many machines have multicast off, so nothing of it may ask for it, and results are compared.
NO_MULTICAST = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",  # the other one is multicast's
}


def preload() -> None:
    """Before engines are forked: the measured shapes' class is known, so that no process has to look at it."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)


class ForwardTimes:
    """vLLM's `worker_extension_cls`: calls for every rank."""

    def quire_time_forwards(self: Any) -> None:
        """Once, when the engine is ready: from now on every forward pass of the model is timed on its stream."""
        model = self.model_runner.get_model()
        stock = model.forward
        self._quire_times = []

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = _mark()
            out = stock(*args, **kwargs)
            self._quire_times.append((out.shape[0], begin, _mark()))
            return out

        model.forward = timed

    def quire_forward_ms(self: Any) -> list[tuple[int, float]]:
        """(tokens, ms) of the passes since it was asked before. Waits for the device."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found = [(rows, _between_ms(begin, end)) for rows, begin, end in self._quire_times]
        self._quire_times.clear()
        return found

    def quire_adds_up(self) -> bool:
        """False in a rank of a process that has left sums out."""
        return GroupCoordinator.all_reduce is not _nothing_to_add

    def quire_without_sums(self: Any, is_without: bool) -> None:
        """Of a woven worker in vLLM's way: nothing is added up over ranks, and answers mean nothing."""
        if self._woven.sums is not None:
            self._woven.sums.is_alone = is_without


def leave_sums_out() -> None:
    """In a process whose engine's ranks are forked from it: the counterfactual without communication."""
    GroupCoordinator.all_reduce = _nothing_to_add


def _nothing_to_add(_self: Any, input_: torch.Tensor) -> torch.Tensor:
    return input_


class MeasuredEngine:
    """An engine without a tokenizer whose forward passes are timed. Make it in a process of its own.

    Args: kind: one of KINDS; arguments: vLLM's, of the engine; device: "cuda" or "cpu".
    """

    def __init__(self, kind: str, arguments: Mapping[str, Any], device: str) -> None:
        fork_ranks()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # noqa: TID251  vLLM's, not ours; calls reach its scheduler
        from vllm import LLM, SamplingParams
        from vllm.v1.executor import multiproc_executor

        self.kind = kind
        self._params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
        if device == "cpu":
            # vLLM spawns a CPU's ranks, whatever it is told: they would import it anew, and know of no sum left out
            multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
        self._llm = LLM(**arguments, skip_tokenizer_init=True, worker_extension_cls=f"{_HERE}.ForwardTimes")
        self._llm.collective_rpc("quire_time_forwards")
        adds_up = self._llm.collective_rpc("quire_adds_up")
        assert not any(adds_up) if kind == "stock-alone" else all(adds_up), "ranks are not forked from here"

    @property
    def modes(self) -> list[str]:
        """What one engine can be switched between."""
        return list(MODES) if self.kind == "weave" else [self.kind]

    def switch(self, mode: str) -> None:
        """From the next step on."""
        if self.kind == "weave":
            fuse, full, is_alone = MODES[mode]
            self._llm.collective_rpc("quire_weave_from", args=(fuse, full))
            self._llm.collective_rpc("quire_without_sums", args=(is_alone,))

    def woven_steps(self) -> int:
        """So far, of the first rank."""
        return (
            self._llm.collective_rpc("quire_weave_counters")[0].get("woven", 0) if self.kind == "weave" else 0
        )

    def prefill_ms(self, prompt: list[int]) -> float:
        """The forward pass of a step that is this prompt, on the slowest rank; 0 where there was none."""
        self._llm.generate({"prompt_token_ids": prompt}, self._params, use_tqdm=False)
        ranks = self._llm.collective_rpc("quire_forward_ms")
        return max((ms for rank in ranks for rows, ms in rank if rows >= len(prompt)), default=0.0)

    def decode_ms(self, num_requests: int) -> float:
        """A decode step of so many short requests, the host's part included: of long answers less short ones."""
        from vllm import SamplingParams

        def taken_s(tokens: int) -> float:
            params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
            asked = [{"prompt_token_ids": [10 + number] * 16} for number in range(num_requests)]
            begin = time.perf_counter()
            self._llm.generate(asked, params, use_tqdm=False)
            return time.perf_counter() - begin

        few, many = taken_s(1), taken_s(1 + DECODE_STEPS)
        self._llm.collective_rpc("quire_forward_ms")  # forgets them
        return max(0.0, many - few) * 1e3 / DECODE_STEPS

    def serve_s(
        self, prompts: list[list[int]], output_tokens: list[int], chunk: int, is_woven: bool
    ) -> float:
        """Until all of them, asked at once, are answered, in steps of at most `chunk` tokens.

        Decode steps of a woven engine are fused, as captured.
        """
        from vllm import SamplingParams

        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler  # in this process
        whole, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, chunk
        if self.kind == "weave":
            self._llm.collective_rpc("quire_weave_from", args=(1, LEAST_WOVEN_TOKENS if is_woven else 0))
        params = [
            SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
            for count in output_tokens
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        begin = time.perf_counter()
        self._llm.generate(asked, params, use_tqdm=False)
        taken_s = time.perf_counter() - begin
        scheduler.max_num_scheduled_tokens = whole
        self._llm.collective_rpc("quire_forward_ms")  # forgets them
        return taken_s

    def close(self) -> None:
        """Ends the ranks."""
        self._llm.llm_engine.engine_core.shutdown()


def bench_engine(
    kind: str, model_dir: str, tp: int, longest: int, num_sms: int, device: str, *, max_seqs: int = 8
) -> MeasuredEngine:
    """A bench's, on GPUs of its own: without multicast, stock vLLM with its fusion of all-reduce and norm or without.

    Random weights, no prefix cache. Raises: SettingsError for a kind that cannot be had here.
    Args: kind: one of KINDS; longest: tokens of a request, and of a step until serve_s() says otherwise; max_seqs:
        requests that run at once; num_sms: of a part's sum, 0: as measured at start.
    """
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)  # noqa: TID251  vLLM's and torch's settings, not ours
    on_cpu = device == "cpu"
    found: dict[str, Any] = {"additional_config": {"quire_measured": kind}}  # compiled graphs are kept by it
    if kind == "stock-alone":
        leave_sums_out()
    elif kind == "stock-fused" and find_spec("flashinfer") is None:
        raise SettingsError(
            "vLLM's own fusion of all-reduce and norm needs FlashInfer, which is not installed"
        )
    elif kind == "weave":
        found |= _woven(model_dir, tp, num_sms)
    if kind != "weave":
        found["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": kind == "stock-fused"}}
    if on_cpu:
        found |= {"dtype": "float32", "enforce_eager": True, "distributed_executor_backend": "mp"}
    else:
        sizes = [size for size in CAPTURED if size <= max_seqs]
        found.setdefault("compilation_config", {})["cudagraph_capture_sizes"] = sizes
    more = {
        "model": model_dir, "load_format": "dummy", "tensor_parallel_size": tp, "seed": 0, "max_num_seqs": max_seqs,
        "max_model_len": longest + SPARE_TOKENS, "max_num_batched_tokens": longest + SPARE_TOKENS,
        "enable_prefix_caching": False, "kv_cache_memory_bytes": KV_BYTES["cpu" if on_cpu else "cuda"],
    }  # fmt: skip
    return MeasuredEngine(kind, found | more, device)


def _woven(model_dir: str, tp: int, num_sms: int) -> dict[str, Any]:
    from shared.engine.weave_settings import weave_arguments
    from shared.engine.worker_config import WorkerSettings

    settings = WorkerSettings(
        model_dir=model_dir, tensor_parallel_size=tp, weave="full", weave_min_tokens=2, weave_sms=num_sms
    )
    return weave_arguments(settings, {})


def _mark() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between_ms(begin: Any, end: Any) -> float:
    return (end - begin) * 1e3 if isinstance(begin, float) else begin.elapsed_time(end)
