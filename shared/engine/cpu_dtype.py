"""Which dtype an engine on a CPU computes in where the settings leave it open.

oneDNN, and with it torch, has products of bfloat16 and float16 for x86 only with AVX-512 (or AMX, or AVX-NE-CONVERT).
Elsewhere a reference loop takes 70 times as long as float32 (docs/decisions/0053). Answers are those of the same
weights, rounded less on their way; KV takes twice the memory. Reads files; knows neither vLLM nor torch.
"""

import platform
from functools import cache
from pathlib import Path

from shared.errors import SettingsError
from shared.kv.model_files import read_config

CPUINFO = Path("/proc/cpuinfo")
FAST = frozenset({"avx512bw", "amx_bf16", "avx_ne_convert"})  # any of them, as the kernel names them
HALF = frozenset({"", "bfloat16", "float16"})  # "": what a model's config.json leaves out


def engine_dtype(asked: str, model_dir: str, *, on_cpu: bool) -> str:
    """`asked`, or "float32" where that says "auto", weights are 16 bits wide, and this CPU is slow with these.

    Quantised models keep "auto": their kernels have dtypes of their own. Raises: nothing; without a readable
    config.json, vLLM says what is wrong.
    """
    if asked != "auto" or not on_cpu or _is_fast():
        return asked
    try:
        config = read_config(model_dir)
    except SettingsError:
        return asked
    stored = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return "float32" if stored in HALF and "quantization_config" not in config else asked


@cache
def _is_fast() -> bool:
    """Whether 16 bits are no slower than 32 by much; taken for granted of what is no x86."""
    return is_fast(platform.machine(), CPUINFO.read_text() if CPUINFO.exists() else "")


def is_fast(machine: str, cpuinfo: str) -> bool:
    """By `uname -m` and the text of /proc/cpuinfo; a text without flags says nothing against it."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = next((set(found.split()) for name, _, found in lines if name.strip() == "flags"), FAST)
    return machine not in ("x86_64", "AMD64") or bool(FAST & flags)
