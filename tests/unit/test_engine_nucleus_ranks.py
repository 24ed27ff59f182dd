"""Top-p is mended in the processes of every form of our engines, whatever its worker, before anything runs there."""

import json
import multiprocessing
import sys
from pathlib import Path

import msgspec
import pytest

from shared.engine.vllm_setup import prepare_environment

prepare_environment("cpu", 1, in_pages=True)

from vllm.v1.engine.core import EngineCoreProc  # noqa: E402
from vllm.v1.executor.multiproc_executor import WorkerProc  # noqa: E402

from shared.engine import nucleus, rank_processes, vllm_engine  # noqa: E402
from shared.engine.vllm_engine import VllmEngine  # noqa: E402
from shared.engine.worker_config import WorkerSettings  # noqa: E402

DEMO = Path(__file__).parents[2] / "deploy" / "models" / "quire-demo"
LIMIT_S = 60
FORK = multiprocessing.get_context("fork")  # as engines are started
WINDOWS = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 256, "max_position_embeddings": 1024, "torch_dtype": "float32", "sliding_window": 64,
}  # fmt: skip
STOCK = "vllm.v1.worker.cpu_worker.CPUWorker"
WOVEN = {"weave": "fuse", "tensor_parallel_size": 2}
FORMS = {  # settings, whether the model fits into pages, and the worker that vLLM is told
    "pages": ({}, True, "shared.engine.page_worker_cpu.PageCPUWorker"),
    "slots": ({"kv_layout": "token-major"}, True, "shared.engine.slot_worker_cpu.SlotCPUWorker"),
    "copies": ({"kv_cache": "copy"}, True, STOCK),
    "own cache": ({}, False, STOCK),
    "woven pages": (WOVEN, True, "shared.engine.weave_worker_cpu.WeavePageCPUWorker"),
    "woven slots": (
        WOVEN | {"kv_layout": "token-major"},
        True,
        "shared.engine.weave_worker_cpu.WeaveSlotCPUWorker",
    ),
    "woven copies": (WOVEN | {"kv_cache": "copy"}, True, "shared.engine.weave_worker_cpu.WeaveCPUWorker"),
    "woven own cache": (WOVEN, False, "shared.engine.weave_worker_cpu.WeaveCPUWorker"),
}


def is_mended() -> bool:
    """Whether the kernel of this process, which has one, is."""
    return hasattr(getattr(sys.modules[nucleus._MODULE], nucleus._KERNEL), nucleus._MENDED)


def begin(said, settings):
    """An engine whose core and rank end where vLLM's part of them begins, and say what they found."""
    setattr(sys.modules[nucleus._MODULE], nucleus._KERNEL, lambda logits, k, p: logits)

    def core():
        rank = FORK.Process(target=WorkerProc.worker_main)
        rank.start()
        rank.join()
        said.put(["core", is_mended()])

    def from_config(config, **_):
        said.put(["worker", config.parallel_config.worker_cls])
        process = FORK.Process(target=EngineCoreProc.run_engine_core)
        process.start()
        process.join()
        raise SystemExit(0)

    rank_processes._stock_core, rank_processes._stock_rank = core, lambda: said.put(["rank", is_mended()])
    vllm_engine.AsyncLLM.from_vllm_config = from_config
    VllmEngine(settings)


@pytest.mark.parametrize("form", FORMS)
def test_the_processes_of_every_form_of_engine_keep_whole_nuclei(form, tmp_path):
    changes, in_pages, worker = FORMS[form]
    model = DEMO
    if not in_pages:
        model = tmp_path
        (tmp_path / "config.json").write_text(json.dumps(WINDOWS))
    settings = WorkerSettings(
        model_dir=str(model), model_name="m", instance="i", dtype="float32", device="cpu", max_model_len=256,
        max_num_seqs=2, max_num_batched_tokens=256, gpu_memory_utilization=0.1, kv_cache="auto",
        mempool_socket=str(tmp_path / "none.sock"), load_format="dummy",
    )  # fmt: skip
    said = FORK.Queue()
    front = FORK.Process(target=begin, args=(said, msgspec.structs.replace(settings, **changes)))
    front.start()
    found = dict(said.get(timeout=LIMIT_S) for _ in range(3))
    front.join(LIMIT_S)
    assert found == {"worker": worker, "rank": True, "core": True}
