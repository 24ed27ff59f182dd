"""Small models of several families, random weights: `python -m tests.support.model_families FOLDER SOCKET OUT`.

Each is answered by stock vLLM and by an engine in the pool's pages (or, for families that cannot work in them, by
whatever the setting "auto" makes of it), in processes forked from this one. OUT gets, for each family,
{"stock", "quire", "uses_pool", "refused", "nuclei"}; "refused": what the setting "pages" says where it cannot be had;
"nuclei": of each rank its worker, and whether its top-p was mended when its memory was looked at.
"""

import asyncio
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec

from tests.support.pressure_run import (
    Driver,
    ended,
    forked,
    settings,
)  # first: it prepares vLLM's environment

from vllm.v1.sample.ops import topk_topp_sampler  # isort: skip
from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip
from shared.engine.nucleus import _KERNEL, _MENDED  # isort: skip
from shared.engine.preload import preload_architecture  # isort: skip
from shared.engine.vllm_engine import VllmEngine  # isort: skip
from shared.errors import SettingsError  # isort: skip
from tests.support.stock_reference import run_cases  # isort: skip

_COMMON = {
    "vocab_size": 4096, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 256, "max_position_embeddings": 1024,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "float32", "eos_token_id": 2, "bos_token_id": 1, "initializer_range": 0.02,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "head_dim": 32},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "mistral": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None,
    },
    "gemma": {
        "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    },
    "mistral-sliding": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64,
    },
}  # fmt: skip
LENGTHS = (5, 33, 64, 200, 450)
OPTIONS = {"load_format": "dummy", "max_model_len": 1024}


def make_model(folder: Path, tokenizer_of: Path, family: str) -> Path:
    """A model folder without weights."""
    made = folder / family
    made.mkdir()
    (made / "config.json").write_text(json.dumps(_COMMON | FAMILIES[family]))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tokenizer_of / name).exists():
            shutil.copy(tokenizer_of / name, made / name)
    return made


def cases() -> list[dict[str, Any]]:
    """Greedy and seeded, with prefixes in common."""
    rng = random.Random(4)
    stem = [rng.randrange(3, 4096) for _ in range(max(LENGTHS))]
    greedy = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    sampled = {"temperature": 0.8, "seed": 7, "n": 2, "max_tokens": 16, "ignore_eos": True}
    out = [{"id": f"greedy-{n}", "prompt": [*stem[:n], 5 + n], "params": greedy} for n in LENGTHS]
    return [*out, {"id": "seeded", "prompt": stem[:100], "params": sampled}]


def stock(model: Path, out: Path) -> None:
    preload_architecture(str(model))
    out.write_text(json.dumps(run_cases(str(model), cases(), **OPTIONS)))


def note_nuclei(out: Path) -> None:
    """Ranks made from here on append a line; one without vLLM's kernel, which not every CPU has, is given another."""
    if not hasattr(topk_topp_sampler, _KERNEL):
        setattr(topk_topp_sampler, _KERNEL, lambda logits, k, p: logits)
    stock = CPUWorker.determine_available_memory

    def noted(self: CPUWorker) -> int:
        line = [type(self).__name__, hasattr(getattr(topk_topp_sampler, _KERNEL), _MENDED)]
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return stock(self)

    CPUWorker.determine_available_memory = noted


def quire(model: Path, socket: str, out: Path) -> None:
    """In order, one after another, each twice: the second finds the first one's pages."""
    base = msgspec.structs.replace(
        settings(str(model), socket, model.name), kv_cache="auto", load_format="dummy", max_model_len=1024
    )
    refused = ""
    if "sliding" in model.name:
        try:
            VllmEngine(msgspec.structs.replace(base, kv_cache="pages"))
        except SettingsError as error:
            refused = str(error)
    nuclei = out.with_suffix(".nuclei")
    note_nuclei(nuclei)
    driver = Driver(base)

    async def run() -> dict[str, Any]:
        await driver.start()
        answers = [{case["id"]: await driver.answer(case) for case in cases()} for _ in range(2)]
        await driver.close()
        lines = [json.loads(line) for line in nuclei.read_text().splitlines()]
        return {
            "quire": answers,
            "uses_pool": driver.engine.uses_pool,
            "refused": refused,
            "nuclei": lines,
        }

    out.write_text(json.dumps(asyncio.run(run())))


def answers_of(model: Path, socket: str) -> dict[str, Any]:
    """Of both engines, at the same time."""
    parts = {name: model / f"{name}.json" for name in ("stock", "quire")}
    pids = [
        forked(lambda: stock(model, parts["stock"])),
        forked(lambda: quire(model, socket, parts["quire"])),
    ]
    codes = [ended(pid) for pid in pids]
    assert codes == [0, 0], (model.name, codes)
    return {"stock": json.loads(parts["stock"].read_text()), **json.loads(parts["quire"].read_text())}


def main() -> None:
    """See the module's docstring."""
    folder, socket, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    tokenizer_of = Path(__file__).resolve().parents[2] / "deploy" / "models" / "quire-demo"
    found: dict[str, Any] = {}
    for family in FAMILIES:
        found[family] = answers_of(make_model(folder, tokenizer_of, family), socket)
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
