"""What `doctor`, `place`, `profile`, `make up` and the compose file's variables make of unusual machines and text."""

import json
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.local import config, doctor_checks, placement_file
from deploy.local.cli import app
from deploy.local.cluster_settings import ClusterSettings
from deploy.local.doctor_checks import Verdict
from shared.errors import SettingsError
from tests.support.local_cluster import free_base_port

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def alone(monkeypatch):
    """No cluster runs, and nothing is set."""
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(doctor_checks, "status_or_none", lambda: None)


def settings(**more):
    base = free_base_port()
    return ClusterSettings(**{"engine": "mock", "port": base + 90, "base_port": base, **more})


def with_taken(port, found):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        return doctor_checks.check_ports(found)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GATEWAY_MAX_BODY_BYTES", "0"),
        ("GATEWAY_TENANT_WEIGHTS", "foo"),
        ("GATEWAY_TREE_LOOKUP_DEADLINE_MS", "-1"),
        ("GATEWAY_API_KEYS_FILE", "/nowhere/keys.txt"),
        ("SCHEDULER_OVERLOAD_FACTOR", "0"),
        ("COORDINATOR_LEASE_TTL_MS", "1"),
        ("MEMPOOL_MAX_LEASES", "0"),
        ("MEMPOOL_LENDING_INTERVAL_MS", "0"),
        ("KEEPER_MAX_FDS", "0"),
        ("WORKER_MAX_NUM_SEQS", "-5"),
        ("WORKER_FAIR_STAY_RATIO", "0.5"),
        ("WORKER_WEAVE_SMS", "99"),
    ],
)
def test_doctor_and_up_refuse_a_services_setting_that_it_could_not_start_with(alone, variable, value):
    section, _, key = variable.lower().partition("_")
    with pytest.raises(SettingsError, match=rf"^setting {section}\.{key}: "):
        config.load(environ={f"QUIRE_{variable}": value})


def test_a_keys_file_is_read_before_anything_starts_and_found_from_the_callers_folder(
    alone, monkeypatch, tmp_path
):
    named = {"QUIRE_GATEWAY_API_KEYS_FILE": "keys.txt"}
    monkeypatch.chdir(tmp_path)
    Path("keys.txt").write_bytes(b"k\xff\n")
    with pytest.raises(SettingsError, match=r"setting gateway\.api_keys_file: .* is no UTF-8 text"):
        config.load(environ=named)
    config.load(["--join", "10.0.0.5:8100", "--address", "10.0.0.6"], environ=named)  # no gateway here
    Path("keys.txt").write_text("k acme\n")
    config.load(environ=named)
    monkeypatch.setenv("QUIRE_GATEWAY_API_KEYS_FILE", "keys.txt")
    config.use_keys_file()
    assert os.environ["QUIRE_GATEWAY_API_KEYS_FILE"] == str(tmp_path / "keys.txt")


def test_a_machine_that_joins_uses_the_first_ones_redis(alone):
    found = doctor_checks.check_redis(settings(join="10.0.0.5:8100", address="10.0.0.6"))
    assert (found.verdict, found.found) == (Verdict.OK, "the first machine's")


@pytest.mark.parametrize(
    ("offset", "more", "verdict"),
    [
        (1, {}, Verdict.OK),  # the scheduler's, which is a Unix socket here
        (4, {"redis_url": "redis://h:1/0"}, Verdict.OK),
        (90, {"join": "127.0.0.1:8100", "address": "127.0.0.1"}, Verdict.OK),  # no gateway here
        (8, {}, Verdict.OK),
        (8, {"standby": True}, Verdict.FAIL),
        (4, {}, Verdict.FAIL),
        (90, {}, Verdict.FAIL),
        (41, {"topology": "colocated"}, Verdict.FAIL),
        (21, {"topology": "colocated"}, Verdict.OK),
    ],
)
def test_doctor_looks_at_the_ports_that_up_would_use_and_at_no_others(alone, offset, more, verdict):
    found = settings(**more)
    assert with_taken(found.base_port + offset, found).verdict == verdict


def test_doctor_names_an_address_that_this_machine_cannot_listen_on(alone):
    found = doctor_checks.check_ports(settings(address="192.0.2.1"))
    assert found.verdict == Verdict.FAIL
    assert found.found.startswith("cannot listen on 192.0.2.1: ")
    assert found.found.endswith("; see cluster.address")


def test_doctor_says_what_up_refuses_before_it_looks_at_ports(alone):
    found = doctor_checks.check_ports(settings(prefill_tensor_parallel=2, decode_tensor_parallel=1))
    assert found.verdict == Verdict.OK  # in the default layout of pages
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_WORKER_KV_LAYOUT", "token-major")
        found = doctor_checks.check_ports(settings(prefill_tensor_parallel=2, decode_tensor_parallel=1))
    assert found.verdict == Verdict.FAIL
    assert "worker.kv_layout" in found.fix


def test_the_import_of_vllm_is_not_that_of_a_folder_beside_the_user(tmp_path, monkeypatch):
    for name in ("vllm", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('a source checkout')")
    (tmp_path / "site").mkdir()
    for name in ("vllm.py", "torch.py"):  # quick ones in place of the installed
        (tmp_path / "site" / name).write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    found = doctor_checks.check_vllm_import(ClusterSettings())
    assert found.verdict == Verdict.OK, found


def question(tmp_path, size, profile):
    path = tmp_path / "q.toml"
    path.write_text(
        f'[[servers]]\nname = "a"\ngpus = 2\ngpu_memory_bytes = {size}\n[[models]]\nprofile = "{profile}"\n'
    )
    return path


PROFILE = {"model": "opt-1.3b", "role": "producer", "tp": 1, "bytes_per_gpu": 1}


@pytest.mark.parametrize(
    "size",
    [f'"{"9" * 400} GB"', f'"-{"9" * 400}"', f'"{"9" * 300}"', "9" * 400, f"0x{'f' * 5000}", str(1 << 63)],
)
def test_a_size_of_hundreds_of_digits_is_refused_by_name(tmp_path, size):
    (tmp_path / "p.json").write_text(json.dumps(PROFILE))
    with pytest.raises(SettingsError, match=r"servers\[0\]\.gpu_memory_bytes: more than 2\^50 bytes"):
        placement_file.read(question(tmp_path, size, "p.json"), time_limit_ms=1)


@pytest.mark.parametrize("file", ["opt-1.3b.json", "opt-1.3b", "p.json", "p.profile"])
@pytest.mark.parametrize("is_named_in_full", [True, False])
def test_a_profile_is_found_without_its_suffix_whatever_its_name(tmp_path, file, is_named_in_full):
    if file == "opt-1.3b.json":
        (tmp_path / "opt-1.3b").mkdir()  # its model, say
    (tmp_path / file).write_text(
        json.dumps(PROFILE)
        if file.endswith(".json")
        else 'model = "opt-1.3b"\nrole = "producer"\ntp = 1\nbytes_per_gpu = 1\n'
    )
    named = file if is_named_in_full else file.removesuffix(".json")
    read = placement_file.read(question(tmp_path, '"80 GB"', named), time_limit_ms=1)
    assert [one.model for one in read.models] == ["opt-1.3b"]


def test_a_profile_alone_is_said_to_belong_into_a_file_and_the_documented_file_works(tmp_path):
    (tmp_path / "opt.json").write_text(json.dumps(PROFILE))
    with pytest.raises(SettingsError, match=r"one model's profile: name it .* profile = \"opt.json\""):
        placement_file.read(tmp_path / "opt.json", time_limit_ms=1)
    (tmp_path / "file.toml").write_text(
        (ROOT / "docs/memory-market.md").read_text().split("```toml\n")[1].split("```")[0]
    )
    read = placement_file.read(tmp_path / "file.toml", time_limit_ms=1)
    assert [(one.model, one.count) for one in read.models] == [("llama-8b", 3), ("opt-1.3b", 2)]


OPTIONS = (
    "seconds", "burst-s", "scale", "max-rate", "step", "slo-ttft-ms", "slo-tbt-ms", "ttft-share", "swap-gb-per-s",
    "max-lag-ms",
)  # fmt: skip


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((f"--{name}", text) for name in OPTIONS for text in ("inf", "nan")),
        ("--rates", "1:inf"),
        ("--burst", "2,inf"),
    ],
)
def test_a_profile_that_would_never_end_is_refused_by_name(tmp_path, monkeypatch, option, value):
    def begun(*_):
        raise AssertionError("it was begun")

    monkeypatch.setattr("deploy.local.cmd_profile._search", begun)
    words = ["profile", "--simulate", "llama-8b", option, value, "--out", str(tmp_path / "p.json")]
    with pytest.raises(SettingsError, match=rf"^{option} {value}: want .*finite number"):
        CliRunner().invoke(app, words, catch_exceptions=False)


@pytest.mark.parametrize(
    ("words", "device", "code"),
    [
        ("--device '' --python ''", "cpu", 0),  # `make up DEVICE=`
        ("--device cuda", "cuda", 0),
        ("", "cpu", 0),
        ("--device tpu", "", 2),
        ("--device", "", 2),
    ],
)
def test_no_device_is_any_device_to_the_installer(words, device, code):
    script = (ROOT / "deploy/local/bootstrap.sh").read_text()
    assert script.endswith('\nmain "$@"\n')
    stubs = "is_installed() { :; }; link_project() { :; }; nvidia-smi() { return 1; }\n"
    script = script.removesuffix('main "$@"\n') + f'{stubs}main engine {words}\necho "device: $device"\n'
    done = subprocess.run(["bash", "-c", script, "bootstrap.sh"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == code, done.stderr
    assert done.stdout == (f"device: {device}\n" if device else "")
    assert ("usage:" in done.stderr) == bool(code)


def test_the_installed_command_is_there_while_make_links_it_again(tmp_path):
    """Others use it meanwhile."""
    script = (ROOT / "deploy/local/bootstrap.sh").read_text()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f"#!/bin/sh\necho {tmp_path}$_QUIRE_TYPED\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    quire, path_file = tmp_path / "bin" / "quire", tmp_path / "quire.pth"
    look = f"{{ [[ -x {quire} && -s {path_file} ]] || echo missing; }}"
    stubs = "".join(f"{word}() {{ {look}; command {word} $@; {look}; }}\n" for word in ("rm", "chmod", "mv"))
    script = script.removesuffix('main "$@"\n') + f"root={ROOT} venv={tmp_path}\nlink_project\n{stubs}"
    script += "link_project\n"
    done = subprocess.run(["bash", "-c", script, "bootstrap.sh"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert quire.read_text().endswith('-m deploy.local "$@"\n')
    done = subprocess.run(["./bin/quire"], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == f"{tmp_path}./bin/quire\n"  # as it was typed, for hints
    assert path_file.read_text() == f"{ROOT}\n"
    assert sorted(each.name for each in tmp_path.rglob("quire*")) == ["quire", "quire.pth"]


def test_variables_of_the_compose_file_do_not_stop_commands_of_a_local_cluster():
    """`down`, `chat` and all others that look for the home; `up` and `doctor` refuse what they do not know."""
    files = (ROOT / "deploy/compose").rglob("*.yaml")
    names = {name for file in files for name in re.findall(r"\$\{(QUIRE_\w+)", file.read_text("utf-8"))}
    assert "QUIRE_API_KEYS" in names
    names.remove("QUIRE_CLUSTER_KEY")  # the old name, for .env files of before
    assert config.default_home(dict.fromkeys(names, "x")) == ROOT / ".quire"
    told = (ROOT / "deploy/compose/README.md").read_text("utf-8")
    assert re.findall(r"`(QUIRE_CLUSTER_\w+)", told) == ["QUIRE_CLUSTER_KEY"]
