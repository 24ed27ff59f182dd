"""worker.weave = auto: measured once beside stock vLLM, and by role; else vLLM's own way, in one line of the log.

In process: it imports vLLM.
"""

import contextlib
import dataclasses
import json
import logging
import multiprocessing
import os
import warnings
from types import SimpleNamespace

import msgspec
import pytest
from vllm.engine.arg_utils import EngineArgs

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of what vLLM's runners import
    from shared.engine import vllm_engine

from shared.engine import (
    engine_arguments,
    factory,
    weave_auto,
    weave_measured,
    weave_probe,
    weave_settings,
)
from shared.engine.weave_settings import weave_arguments
from shared.engine.worker_config import WorkerSettings, for_role
from shared.weave.threshold import Timing
from tests.integration.mempool_rig import until
from tests.support.processes import descendants, is_gone

LLAMA = {"architectures": ["LlamaForCausalLM"]}


def made(tmp_path, model=LLAMA, **changes) -> WorkerSettings:
    (tmp_path / "config.json").write_text(json.dumps(model))
    found = WorkerSettings(
        model_dir=str(tmp_path),
        mempool_socket="/run/pool",
        **{"tensor_parallel_size": 2, "weave": "auto"} | changes,
    )
    return for_role(found, role="prefill", instance="p", port=7000)


def said(caplog) -> list[str]:
    """What weaving said to the log."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("shared.engine.weave")]


class TwoGpus:
    """What auto asks of the platform."""

    is_linked = True

    def is_cuda(self):
        return True

    def is_cpu(self):
        return False

    def get_device_name(self):
        return "NVIDIA H200"

    def device_id_to_physical_device_id(self, number):
        return number

    def is_fully_connected(self, numbers):
        assert numbers == [0, 1]
        return self.is_linked


PAYS = [
    *(Timing(num_tokens=n, off_us=100.0, fuse_us=us) for n, us in ((1, 101.0), (8, 97.0), (32, 90.0))),
    *(Timing(num_tokens=n, off_us=1000.0, fuse_us=fuse, full_us=full)
      for n, fuse, full in ((512, 1100.0, 1200.0), (1024, 970.0, 960.0), (2048, 960.0, 900.0))),
]  # fmt: skip
LOSES = [Timing(num_tokens=timing.num_tokens, off_us=100.0, fuse_us=120.0, full_us=130.0) for timing in PAYS]


@pytest.fixture
def gpus(monkeypatch):
    """Two of them, and what the short engines would measure; its `asked` counts how often they were started."""
    found = SimpleNamespace(platform=TwoGpus(), timings=PAYS, asked=0)

    def measure(settings):
        found.asked += 1
        return found.timings

    monkeypatch.setattr(weave_auto, "current_platform", found.platform)
    monkeypatch.setattr(weave_settings, "current_platform", found.platform)
    monkeypatch.setattr(weave_auto, "_measure", measure)
    return found


def auto(tmp_path, role="prefill", **changes):
    settings = msgspec.structs.replace(
        made(tmp_path, state_dir=str(tmp_path / "state"), **changes), role=role
    )
    return weave_arguments(settings, {})


@pytest.mark.parametrize(
    ("role", "mode", "fuse", "full"),
    [("prefill", "full", 1024, 2048), ("colocated", "full", 1024, 2048), ("decode", "fuse", 8, 0)],
)  # fmt: skip
def test_auto_weaves_prompts_and_fuses_decodes_from_where_it_was_measured_to_win(
    tmp_path, gpus, caplog, role, mode, fuse, full
):
    with caplog.at_level(logging.INFO):
        found = auto(tmp_path, role)
    hosted = found["additional_config"]["quire_weave"]
    assert (hosted["mode"], hosted["fuse_min_tokens"], hosted["min_tokens"]) == (mode, fuse, full)
    assert found["compilation_config"]["mode"] == 0
    (line,) = said(caplog)
    assert line.startswith(f"worker.weave = auto: steps are fused from {fuse} tokens on")


def test_auto_measures_once_and_another_role_reads_the_same_times(tmp_path, gpus):
    first = auto(tmp_path)
    assert auto(tmp_path) == first
    auto(tmp_path, "decode")
    assert gpus.asked == 1
    auto(tmp_path, weave_sms=8)
    assert gpus.asked == 2, "other sizes are measured anew"


@pytest.mark.parametrize("role", ["prefill", "decode", "colocated"])
def test_auto_is_vllms_own_way_where_it_loses_and_where_nothing_could_be_measured(
    tmp_path, gpus, caplog, role
):
    gpus.timings = LOSES
    with caplog.at_level(logging.INFO):
        assert auto(tmp_path, role) == {}
    assert "win nothing here" in said(caplog)[0]
    gpus.timings, gpus.asked = [], 0
    with caplog.at_level(logging.INFO):
        assert auto(tmp_path, role, weave_sms=4) == auto(tmp_path, role, weave_sms=4) == {}
    assert gpus.asked == 1, "a measurement that fails is not tried at every start"
    assert "nothing was measured" in said(caplog)[-1]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"state_dir": ""}, "no worker.state_dir"),
        ({"calibrate": "off"}, "worker.calibrate = off"),
        ({"transfer_mode": "by-layer"}, "each layer counts once"),
        ({"kv_layout": "token-major"}, "each layer counts once"),
    ],
)
def test_auto_measures_nothing_where_it_must_not_and_says_why(tmp_path, gpus, caplog, changes, says):
    settings = made(tmp_path, **{"state_dir": str(tmp_path)} | changes)
    with caplog.at_level(logging.INFO):
        assert weave_arguments(settings, {}) == {}
    (line,) = said(caplog)
    assert says in line
    assert not gpus.asked


def test_auto_needs_nvlink_a_known_model_and_more_than_one_rank(tmp_path, gpus, caplog):
    with caplog.at_level(logging.INFO):
        assert auto(tmp_path, tensor_parallel_size=1) == {}
        assert not said(caplog)
        assert auto(tmp_path, model={"architectures": ["GemmaForCausalLM"]}) == {}
        gpus.platform.is_linked = False
        assert auto(tmp_path) == {}
    model, links = said(caplog)
    assert "GemmaForCausalLM is none of" in model
    assert "NVLink" in links
    assert not gpus.asked


@pytest.mark.parametrize(
    "name", ["NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "VLLM_ALLREDUCE_USE_SYMM_MEM"]
)
def test_times_of_other_sums_of_vllms_own_are_measured_anew(tmp_path, gpus, monkeypatch, name):
    auto(tmp_path)
    monkeypatch.setenv(name, "0" if os.environ.get(name) != "0" else "1")
    auto(tmp_path)
    assert gpus.asked == 2


# -- what stock vLLM is compared as -----------------------------------------------------------------------------

OF_A_MEMPOOL = {"worker_cls", "scheduler_cls", "kv_transfer_config"}
NOT_SUMS = {"model", "load_format", "max_model_len", "kv_cache_memory_bytes", "gpu_memory_utilization",
            "enable_prefix_caching", "skip_tokenizer_init", "worker_extension_cls"}  # fmt: skip
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
SHAPE = LLAMA | {
    "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 32,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def on_gpus(monkeypatch):
    """Arguments and environment of engines on two of them; none is made."""
    for module in (engine_arguments, weave_settings, weave_auto):
        monkeypatch.setattr(module, "current_platform", TwoGpus())


def probe(tmp_path, monkeypatch, kind, settings, look=lambda arguments: None):
    """(arguments, environment) of the short engine that auto_choice() starts, as its own process would have them.

    `look` is called with the arguments while the model that they name is there.
    """
    found = SimpleNamespace(arguments={}, environment={}, parents=[])

    class Measured:
        def __init__(self, *, worker_extension_cls, skip_tokenizer_init, **arguments):
            own = {"worker_extension_cls": worker_extension_cls, "skip_tokenizer_init": skip_tokenizer_init}
            found.arguments, found.environment = own | arguments, dict(os.environ)
            look(own | arguments)
            raise KeyboardInterrupt

    class Popen:
        pid = 0

        def __init__(self, words, **more):
            assert more.keys() == {"stdout", "stderr", "process_group"}, "the environment is inherited"
            with pytest.raises(KeyboardInterrupt):
                weave_probe.main(words[3:])

        def wait(self, timeout):
            return 1

    monkeypatch.setattr("vllm.LLM", Measured)
    monkeypatch.setattr(weave_probe, "die_with_parent", lambda worker: found.parents.append(worker))
    monkeypatch.setattr("shared.engine.preload.preload_architecture", lambda _: None)
    monkeypatch.setattr(weave_auto.subprocess, "Popen", Popen)
    monkeypatch.setattr(weave_auto, "_end_group", lambda _: None)
    weave_auto._run(settings, kind, tmp_path / "out.json", tmp_path / "log", 1.0)
    assert found.parents == [os.getpid()]
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"block_tokens": 32, "max_num_seqs": 17}, {"kv_cache": "copy", "max_num_batched_tokens": 8192},
        {"enforce_eager": True, "structured_backend": "xgrammar"}, {"mempool_socket": "", "dtype": "float16"},
        {"kv_cache_bytes": 1 << 30, "gpu_memory_utilization": 0.5, "max_model_len": 4096},
    ],
)  # fmt: skip
def test_the_short_stock_engine_is_told_what_the_engine_is_told_with_weave_off(
    tmp_path, monkeypatch, on_gpus, changes
):
    settings = msgspec.structs.replace(made(tmp_path, SHAPE), device="cuda", **changes)
    off = vllm_engine.VllmEngine._engine_args(msgspec.structs.replace(settings, weave="off"))
    told = probe(tmp_path, monkeypatch, "stock", settings).arguments
    short = EngineArgs(**told)
    other = {
        field.name
        for field in dataclasses.fields(EngineArgs)
        if getattr(short, field.name) != getattr(off, field.name)
    }
    assert other <= NOT_SUMS | OF_A_MEMPOOL == weave_probe.OWN_ARGUMENTS
    assert {"model", "load_format", "enable_prefix_caching"} <= other
    assert "pass_config" not in told.get("compilation_config", {}), "vLLM's own choice of what it fuses"
    assert short.max_num_batched_tokens == settings.max_num_batched_tokens
    assert short.max_model_len > settings.max_num_batched_tokens, "a step may be one prompt"


@pytest.mark.parametrize("kind", ["stock", "weave"])
@pytest.mark.parametrize(
    "users", [{}, MULTICAST_OFF, {"NCCL_NVLS_ENABLE": "1", "VLLM_LOGGING_LEVEL": "INFO"}]
)
@pytest.mark.parametrize("changes", [{}, {"kv_cache": "copy", "threads": 3}])
def test_the_short_engines_have_the_engines_environment_and_a_users_variables_stay(
    tmp_path, monkeypatch, on_gpus, users, kind, changes
):
    settings = msgspec.structs.replace(made(tmp_path, SHAPE), device="cuda", **changes)
    bare = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_", *weave_auto.SUMS_ENVIRONMENT))
    }
    monkeypatch.setattr(os, "environ", bare | users)
    found = {}
    monkeypatch.setattr(factory, "choose_device", lambda *_: "cuda")
    monkeypatch.setattr("shared.engine.vllm_setup.check_version", lambda: "vllm")
    monkeypatch.setattr("shared.engine.vllm_setup.check_platform", lambda _: None)
    monkeypatch.setattr("shared.engine.crashes.die_when_crashed", lambda: None)
    monkeypatch.setattr(vllm_engine, "VllmEngine", lambda _: found.update(os.environ))
    factory.make_engine(msgspec.structs.replace(settings, weave="off"))
    engines = found | {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}  # once it is about to start its ranks
    monkeypatch.setattr(os, "environ", bare | users)
    short = probe(tmp_path, monkeypatch, kind, settings).environment
    assert short.pop("VLLM_ENABLE_V1_MULTIPROCESSING") == "0", "its core is in its own process"
    assert short == engines
    assert users.items() <= short.items()
    asks = {name for name in short if name.startswith(weave_auto.SUMS_ENVIRONMENT)}
    assert asks == {name for name in users if name.startswith("NCCL_") or "SYMM" in name}


def test_the_short_woven_engine_is_told_what_a_woven_engine_is_told(tmp_path, monkeypatch, on_gpus):
    settings = msgspec.structs.replace(made(tmp_path, SHAPE, weave_sms=8), device="cuda")
    told = probe(tmp_path, monkeypatch, "weave", settings).arguments
    woven = vllm_engine.VllmEngine._engine_args(
        msgspec.structs.replace(settings, weave="full", weave_min_tokens=2)
    )
    short = EngineArgs(**told)
    other = {
        field.name
        for field in dataclasses.fields(EngineArgs)
        if getattr(short, field.name) != getattr(woven, field.name)
    }
    assert other <= weave_probe.OWN_ARGUMENTS
    assert told["worker_cls"] == "shared.engine.weave_worker_gpu.WeaveGPUWorker"


FAMILIES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral",
}  # fmt: skip
LONG = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        *((name, {}) for name in FAMILIES),
        ("llama", {"model_max_length": 2048, "max_sequence_length": 2048}),
        ("llama", {"max_position_embeddings": None}),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 3.0, "original_max_position_embeddings": 683}}),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0},
                   "original_max_position_embeddings": 512}),
        ("llama", {"rope_scaling": LONG, "original_max_position_embeddings": 1024}),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("context", "batched"), [(2048, 2048), (4096, 8192), (8192, 8192), (2048, 131_072)])
def test_steps_that_are_longer_than_the_models_context_are_measured(
    tmp_path, monkeypatch, on_gpus, model_type, more, context, batched
):
    architectures = [f"{FAMILIES[model_type]}ForCausalLM"]
    shape = {"architectures": architectures, "model_type": model_type, "vocab_size": 1000,
             "intermediate_size": 2048, "max_position_embeddings": context}  # fmt: skip
    settings = made(tmp_path, SHAPE | shape | more, device="cuda", max_num_batched_tokens=batched)
    lengths = []

    def look(told):
        lengths.append(EngineArgs(**told).create_model_config().max_model_len)  # refused where it is too long

    probe(tmp_path, monkeypatch, "stock", settings, look)
    assert lengths == [min(batched, weave_probe.MOST_PROMPT_TOKENS) + weave_probe.SPARE_TOKENS]


def test_a_short_engine_is_of_its_workers_session_and_ends_when_that_is_killed(tmp_path):
    settings = made(tmp_path, device="cpu")
    config = tmp_path / "config.json"
    config.unlink()
    os.mkfifo(config)  # where it stands still
    worker = multiprocessing.get_context("fork").Process(
        target=weave_auto._run, args=(settings, "stock", tmp_path / "out", tmp_path / "log", 600.0)
    )
    worker.start()
    writers = []

    def is_read() -> bool:
        with contextlib.suppress(OSError):  # by nobody yet
            writers.append(os.open(config, os.O_WRONLY | os.O_NONBLOCK))
        return bool(writers)

    try:
        until(is_read, "it stands still")
        (probe,) = descendants(worker.pid)
        is_seen = os.getsid(probe) == os.getsid(worker.pid)  # by the guard of the worker's session
    finally:
        worker.kill()
        worker.join()
    try:
        until(lambda: is_gone(probe), "its end")
    finally:
        os.close(writers[0])  # it reads no model there, and ends in any case
    assert is_seen


def test_a_bench_asks_for_no_multicast_and_for_its_own_fusions(monkeypatch):
    made = []
    monkeypatch.setattr(os, "environ", {"NCCL_NVLS_ENABLE": "1"})
    monkeypatch.setattr(weave_measured, "MeasuredEngine", lambda *given: made.append(given))
    weave_measured.bench_engine("stock", "/model", 2, 1024, 0, "cuda")
    (_, arguments, _) = made[0]
    assert arguments["compilation_config"]["pass_config"] == {"fuse_allreduce_rms": False}
    assert os.environ == weave_measured.NO_MULTICAST | {"NCCL_NVLS_ENABLE": "1"}, "a user's variables stay"


def test_an_engine_that_cannot_be_measured_is_said_with_its_error(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(weave_auto, "PROBES_LIMIT_S", 30.0)
    monkeypatch.setattr(weave_auto.sys, "executable", "/bin/false")
    with caplog.at_level(logging.WARNING):
        assert weave_auto._measure(made(tmp_path)) == []
    assert "stock engine to measure ended with status 1" in said(caplog)[0]
