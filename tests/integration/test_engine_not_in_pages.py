"""Models whose caches are no plain stack of layers are known by their configuration, before an engine is started."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 32, "long_factor": [4.0] * 32,
    "original_max_position_embeddings": 512,
}  # fmt: skip
MODELS = {
    "longrope": (LLAMA | {"rope_parameters": ROPE}, 4),  # keys of content and family, of two engines of unequal lengths
    "dynamic": (LLAMA | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, 4),
    "chunks": (
        {
            "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "attention_chunk_size": 64,
            "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 256,
        },
        "its attention goes by chunks of the context",
    ),
    "mamba": (
        {
            "architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16, "conv_kernel": 4,
            "expand": 2, "time_step_rank": 8, "use_conv_bias": True, "use_bias": False,
        },
        "it keeps state instead of attention's keys and values",
    ),
    "gaps": (
        {
            "architectures": ["DeciLMForCausalLM"], "model_type": "llama",
            "block_configs": [{"attention": {"no_op": False, "n_heads_in_group": 1}}, {"attention": {"no_op": True}}],
        },
        "some of its layers have no attention",
    ),
    "sinks": (
        LLAMA | {"architectures": ["PanguEmbeddedForCausalLM"], "param_sink_number": 8},
        "its attention has sink tokens of its own",
    ),
    "windows": (LLAMA | {"sliding_window": 64}, "its attention has sliding windows"),
    "shared": (LLAMA | {"num_kv_shared_layers": 1}, "some of its layers share a cache"),
    "plain": (LLAMA, 2),
}  # fmt: skip

SCRIPT = """
import json, sys
from pathlib import Path
from tests.support.model_families import _COMMON
from tests.support.pressure_run import settings
import msgspec
from shared.engine.describe import describe_engine, why_not_in_pages
from shared.engine.preload import preload_architecture
from shared.engine.vllm_engine import VllmEngine

VllmEngine._begin = lambda *_: None
folder, found = Path(sys.argv[1]), {}
for name, more in json.loads(sys.argv[2]).items():
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps(_COMMON | more))
    preload_architecture(str(folder / name))  # or each is looked at in a process of its own, for ten CPU-seconds
    base = settings(str(folder / name), str(folder / "none.sock"), name)
    keys = set()
    for length in 512, 513:
        asked = msgspec.structs.replace(base, kv_cache="auto", load_format="dummy", max_model_len=length)
        config = VllmEngine._engine_args(asked).create_engine_config()
        if not (why := why_not_in_pages(config)):
            keys |= {(told := describe_engine(config, "same", asked.model_dir)).content_key, told.family_key}
    found[name] = why or len(keys)
assert not VllmEngine(msgspec.structs.replace(asked, kv_cache="copy", tensor_parallel_size=2)).uses_pool
(folder / "out.json").write_text(json.dumps(found))
"""


def test_what_cannot_work_in_pages_is_said_before_an_engine_is_started(tmp_path):
    models = json.dumps({name: more for name, (more, _) in MODELS.items()})
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), models]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "out.json").read_text()) == {name: why for name, (_, why) in MODELS.items()}
