"""On a GPU the cluster's tokens equal stock vLLM's."""

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.gpu import compare_with_stock as table
from tests.support.exactness_cases import build_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("topology", ["disaggregated", "colocated"])
def test_every_case_equals_stock_vllm_in_float32(topology):
    cases = build_cases(table.MODEL, 2)
    with tempfile.TemporaryDirectory() as name:
        want = table.stock(Path(name), cases, "float32")
        row = table.compare(Path(name), topology, "float32", cases, want)
    assert row["unlike_either"] == [], row
