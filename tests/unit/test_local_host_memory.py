"""Host memory behind engines' pages: blocks on GPUs go between machines through it, so there is some by default."""

import os

import msgspec
import pytest

from deploy.local import cmd_up, config, doctor_checks, plan, run_supervisor
from deploy.local.cluster_settings import ClusterSettings, check
from deploy.local.doctor_checks import Verdict
from deploy.local.services_table import build
from shared.errors import SettingsError

GIB = 1 << 30
MACHINE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MODEL = plan.Model(folder=str(config.DEMO_MODEL), name="m")
FIRST = {"address": "10.0.0.5", "device": "cuda", "num_decode": 0, "topology": "disaggregated"}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Two GPUs, nothing set."""
    monkeypatch.setattr(plan, "find_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(plan, "installed_vllm", lambda: "vllm")
    for name in list(os.environ):
        if name.startswith("QUIRE_"):
            monkeypatch.delenv(name)


def settings(**more):
    return ClusterSettings(home="/h", redis_url="redis://there/0", **more)


def told(found):
    """What the mempool is told of it; None: nothing."""
    services = {
        service.name: service for service in build(plan.make_plan(found, config.paths_of("/h"), MODEL))
    }
    words = services["mempool"].command
    return int(words[words.index("--dram-bytes") + 1]) if "--dram-bytes" in words else None


def said(found):
    return run_supervisor.describe(
        run_supervisor.Start(settings=found, model=MODEL), plan.make_plan(found, config.paths_of("/h"), MODEL)
    )["host_memory"]


def test_machines_whose_blocks_are_on_gpus_have_host_memory_for_them_by_default_and_up_says_so():
    for found in (settings(**FIRST), settings(**FIRST | {"address": "10.0.0.6", "join": "10.0.0.5:8100"})):
        taken = told(found)
        assert taken == min(8 * GIB, MACHINE_BYTES // 4)
        assert said(found).startswith(f"{taken / GIB:.1f} GiB of host memory for blocks between machines")


def test_it_is_as_much_as_the_mempool_is_to_have_and_no_more_than_a_quarter_of_the_machines():
    assert told(settings(**FIRST, mempool_bytes=64 << 20)) == 64 << 20
    assert told(settings(**FIRST, mempool_bytes=1 << 60)) == MACHINE_BYTES // 4
    assert told(settings(**FIRST, memory_market=True)) == min(8 * GIB, MACHINE_BYTES // 4)


@pytest.mark.parametrize("more", [{"address": ""}, {"device": "cpu"}, {"engine": "mock"}])
def test_one_machine_and_machines_whose_blocks_are_in_host_memory_need_none(more):
    found = settings(**FIRST | {"num_decode": 1} | more)
    assert (told(found), said(found)) == (None, "")
    assert doctor_checks.check_machines(found).verdict == Verdict.OK


def test_what_was_asked_for_is_taken_and_nobody_needs_to_be_told():
    found = settings(**FIRST, dram_bytes=3 << 40)
    assert (told(found), said(found)) == (3 << 40, "")


def test_without_any_up_and_doctor_say_that_hand_offs_are_computed_anew():
    found = config.load([f"--{key}={value}" for key, value in FIRST.items()] + ["--dram_bytes=0"])
    assert told(found) is None
    finding = doctor_checks.check_machines(found)
    assert finding.found == said(found)
    assert "hand-offs between machines are computed anew" in finding.found
    assert (finding.verdict, "8589934592" in finding.fix) == (Verdict.WARN, True)
    assert doctor_checks.check_machines(settings(**FIRST)).verdict == Verdict.OK


def test_the_market_needs_some_whatever_is_said():
    found = settings(**FIRST, dram_bytes=0, memory_market=True)
    assert told(found) == GIB
    assert doctor_checks.check_machines(found).verdict == Verdict.OK


def test_the_mempools_own_setting_is_not_overruled_by_the_default(monkeypatch):
    monkeypatch.setenv("QUIRE_MEMPOOL_DRAM_BYTES", str(5 * GIB))
    found = settings(**FIRST)
    assert (told(found), said(found)) == (None, "")
    config.check_overrides({"mempool": {"socket"}})
    with pytest.raises(SettingsError, match=r"set cluster\.dram_bytes"):
        config.check_overrides({"mempool": {"dram_bytes"}})


def test_up_prints_it_below_what_it_starts(capsys, monkeypatch):
    service = {"name": "mempool", "state": "ready"}
    status = {"model": "m", "device": "cuda", "topology": "colocated", "services": [service], "gave_up": ""}
    status |= {"was_ready": True, "host_memory": "8.0 GiB of host memory"}

    class Client:
        def call(self, **_):
            return status

    monkeypatch.setattr(cmd_up, "_summary", lambda *_: None)
    wanted = cmd_up.Wanted(settings(), config.paths_of("/h"), "quire")
    cmd_up._follow(Client(), wanted, is_ours=False)
    assert capsys.readouterr().out.splitlines()[1] == "8.0 GiB of host memory"
    del status["host_memory"]  # an older supervisor
    cmd_up._follow(Client(), wanted, is_ours=False)


def test_a_negative_size_is_refused_and_not_said_is_allowed():
    assert check(settings()).dram_bytes is None
    with pytest.raises(SettingsError, match=r"cluster\.dram_bytes"):
        check(msgspec.structs.replace(settings(), dram_bytes=-1))
