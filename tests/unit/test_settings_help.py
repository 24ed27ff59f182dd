"""`--help` of every service: what it does, each of its flags with the default, exit status 0."""

import importlib

import msgspec
import pytest

from deploy.local import config
from deploy.local.config import section_struct
from shared import settings
from shared.errors import SettingsError

SERVICES = ["gateway", "scheduler", "coordinator", "mempool", "mempool.keeper", "prefill", "decode"]


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("service", SERVICES)
def test_help_says_what_a_service_does_and_each_setting_with_its_default(service, flag, capsys, monkeypatch):
    monkeypatch.setenv(
        "QUIRE_WORKER_NO_SUCH_KEY", "1"
    )  # what is wrong elsewhere keeps nobody from reading it
    name = f"services.{service}.config"
    config, struct = importlib.import_module(name), section_struct(name)
    assert struct is not None
    with pytest.raises(SystemExit) as ended:
        config.load([flag])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"python -m services.{service}" in said.splitlines()[0]
    shown = {line.split()[0]: line.split()[-1] for line in said.splitlines() if line.startswith("  --")}
    fields = msgspec.structs.fields(struct)
    assert list(shown) == [f"--{field.name.replace('_', '-')}" for field in fields]
    log_level = next(field.default for field in fields if field.name == "log_level")
    assert shown["--log-level"] == log_level


class Kinds(msgspec.Struct, frozen=True, kw_only=True):
    """One of each."""

    names: list[str] = msgspec.field(default_factory=lambda: ["a", "b"])
    is_on: bool = True
    share: float = 0.5
    place: str = ""


def test_help_shows_values_as_flags_take_them():
    lines = settings.help_text(Kinds, "worker", "Does this.").splitlines()
    assert lines[0] == "Does this."
    shown = [line.split() for line in lines if line.startswith("  --")]
    assert shown == [
        ["--names", "A,B,...", "a,b"],
        ["--is-on", "true|false", "true"],
        ["--share", "FLOAT", "0.5"],
        ["--place", "STR", '""'],
    ]


def test_settings_of_no_program_of_their_own_have_no_help():
    with pytest.raises(SettingsError, match="unknown flag '--help'"):
        settings.load(Kinds, "worker", ["--help"], environ={})


def test_names_that_are_like_nothing_get_no_guess_and_a_key_outside_of_sections_is_said(tmp_path):
    (tmp_path / "a.toml").write_text("port = 1\n")
    with pytest.raises(SettingsError, match="key 'port' is in no section"):
        settings.read_toml(tmp_path / "a.toml")
    assert "did you mean" not in settings.nearest("old_key", ["api_keys", "port"])
    with pytest.raises(SettingsError, match="--set foo: no such setting of the cluster; known: address"):
        config.cluster_key("foo")
