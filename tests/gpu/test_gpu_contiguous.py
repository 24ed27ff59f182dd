"""On a GPU, without a block table, the cluster's tokens equal stock vLLM's. `python -m tests.gpu.test_gpu_contiguous`
prints a table, in float32 (torch's kernel) and bfloat16 (FlashAttention-3, torch's FlashAttention-2); there near ties
may fall the other way, as the kernels differ in their last bits.
"""

import json
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

from loadtest import bench_exactness
from loadtest import exactness_rig as rig
from tests.gpu import compare_with_stock as table
from tests.support.exactness_cases import build_cases

# a layer-major page of the demo model has 2 MiB for each layer's K: 4,096 tokens in float32, 8,192 in 16 bits
TOKENS = {"token-major": "32", "layer-major": "4096"}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU"),
]


def settings_of(layout: str, dtype: str, kernel: str) -> dict[str, str]:
    """Of the workers."""
    tokens = TOKENS[layout] if dtype == "float32" or layout == "token-major" else "8192"
    return {"kv_layout": layout, "block_tokens": tokens, "slot_kernel": kernel}


@pytest.mark.parametrize("layout", TOKENS)
def test_no_case_is_unlike_stock_vllm_in_float32_but_at_a_near_tie(layout):
    """The kernel of request slots sums in another order than stock's: bench_exactness.py says what a near tie is."""
    options = bench_exactness.parsed(["--modes", f"float32+{layout}", "--topologies", "disaggregated"])
    cases = rig.cases()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stock = rig.stock_answers(folder, cases, "float32")
        run = rig.cluster_answers(folder, options, options.modes[0], "disaggregated", cases, stock)
        samples = [run, rig.shares_row(folder, run, cases, stock)]
    (judged,) = bench_exactness.merged(samples)
    verdicts = {case["id"]: case["verdict"] for case in judged["cases"]}
    assert len(verdicts) == len(cases)
    assert "wrong" not in verdicts.values(), judged


def main() -> None:
    """See the module."""
    kernels = {"float32": ["torch_sdpa"], "bfloat16": ["flash3", "torch_flash2"]}
    cases = build_cases(table.MODEL, 2)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for dtype in sys.argv[1:] or kernels:
            want = table.stock(Path(name), cases, dtype)
            for layout in TOKENS:
                for kernel in kernels[dtype]:
                    folder = Path(tempfile.mkdtemp(dir=name))
                    row = {"layout": layout, "kernel": kernel, "dtype": dtype, "num_cases": len(cases)}
                    try:
                        settings = settings_of(layout, dtype, kernel)
                        row |= table.compare(folder, "colocated", dtype, cases, want, settings)
                    except Exception as error:  # noqa: BLE001  one that fails is a row, too
                        traceback.print_exc()
                        row["failed"] = repr(error)[-300:]
                    rows.append(row)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
