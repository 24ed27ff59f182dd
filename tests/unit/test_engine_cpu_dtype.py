"""A CPU without products of 16 bits computes in float32, unless somebody says otherwise."""

import json

import pytest

from shared.engine import cpu_dtype
from shared.engine.cpu_dtype import CPUINFO, engine_dtype, is_fast


def cpuinfo(*flags: str) -> str:
    return f"processor\t: 0\nflags\t\t: fpu sse4_2 avx2 fma {' '.join(flags)}\nbugs\t\t: none\n\nprocessor\t: 1\n"


@pytest.mark.parametrize(
    ("machine", "text", "fast"),
    [
        ("x86_64", cpuinfo(), False),
        ("x86_64", cpuinfo("avx512f"), False),  # of Xeon Phi: not what oneDNN asks for
        ("x86_64", cpuinfo("avx512f", "avx512bw"), True),
        ("x86_64", cpuinfo("avx_ne_convert"), True),
        ("x86_64", cpuinfo("amx_bf16"), True),
        ("x86_64", "", True),  # nothing is known
        ("aarch64", "processor\t: 0\nFeatures\t: fp asimd\n", True),
    ],
)
def test_what_the_kernel_says_of_the_cpu_decides(machine, text, fast):
    assert is_fast(machine, text) == fast


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(cpu_dtype, "_is_fast", lambda: False)


def model(folder, **config) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"dtype": "bfloat16"}, "float32"),
        ({"torch_dtype": "torch.float16"}, "float32"),
        ({}, "float32"),
        ({"text_config": {"dtype": "bfloat16"}}, "float32"),
        ({"dtype": "float32"}, "auto"),
        ({"dtype": "bfloat16", "quantization_config": {"quant_method": "awq"}}, "auto"),
        ({"text_config": {"dtype": "bfloat16"}, "quantization_config": {"quant_method": "awq"}}, "auto"),
    ],
)
def test_weights_of_16_bits_are_computed_with_in_float32(slow, tmp_path, config, wanted):
    assert engine_dtype("auto", model(tmp_path, **config), on_cpu=True) == wanted


def test_who_names_a_dtype_or_has_a_gpu_or_a_fast_cpu_gets_it(slow, tmp_path, monkeypatch):
    folder = model(tmp_path, dtype="bfloat16")
    assert engine_dtype("bfloat16", folder, on_cpu=True) == "bfloat16"
    assert engine_dtype("auto", folder, on_cpu=False) == "auto"
    monkeypatch.setattr(cpu_dtype, "_is_fast", lambda: True)
    assert engine_dtype("auto", folder, on_cpu=True) == "auto"


def test_a_model_without_a_readable_configuration_is_left_to_who_loads_it(slow, tmp_path):
    assert engine_dtype("auto", str(tmp_path / "none"), on_cpu=True) == "auto"
    (tmp_path / "config.json").write_text("{")
    assert engine_dtype("auto", str(tmp_path), on_cpu=True) == "auto"


def test_this_machine_is_judged_as_torch_judges_it():
    torch = pytest.importorskip("torch")
    if not CPUINFO.exists():
        pytest.skip("no /proc/cpuinfo")
    assert cpu_dtype._is_fast() == torch.ops.mkldnn._is_mkldnn_bf16_supported()
