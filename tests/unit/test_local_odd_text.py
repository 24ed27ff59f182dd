"""Bytes that are no UTF-8, and names too long for the system, are refused in a sentence, and damage nothing."""

import os

import pytest
from typer.testing import CliRunner

from deploy.local import config, plan, run_supervisor
from deploy.local.cli import app
from shared.errors import SettingsError

BAD = "a\udcff"  # as the interpreter reads the byte 0xff


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize(
    "words",
    [
        ["up", "--model", BAD],
        ["up", "--host", BAD],
        ["up", "--set", f"model_name={BAD}"],
        ["up", "--set", f"api_keys=sk-1,{BAD}"],
        ["up", "--model", "a\0b"],
        ["up", "--model", "x" * 5_000],
        ["up", "--model", "x" * 5_000 + "/y"],
        ["trace", BAD],
        ["trace", "--jaeger", BAD, "chatcmpl-1"],
    ],
)
def test_what_no_file_could_hold_is_refused(home, words):
    error = CliRunner().invoke(app, [*words]).exception
    assert isinstance(error, SettingsError)
    assert len(error.message) < 400
    assert "sk-1" not in error.message
    assert not (home / "run" / "settings.json").exists()


def test_a_home_that_is_no_utf8_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / BAD))
    with pytest.raises(SettingsError, match="QUIRE_HOME"):
        config.default_home()
    monkeypatch.delenv("QUIRE_HOME")
    with pytest.raises(SettingsError, match=r"cluster\.home"):
        config.load(["--home", str(tmp_path / BAD)])


def test_a_home_of_few_characters_and_many_bytes_has_its_sockets_elsewhere():
    name = "/" + "ж" * 60
    assert len(f"{name}/run") < config.MAX_SOCKET_DIR_BYTES
    assert str(config.paths_of(name).sockets).startswith("/tmp/quire-")


def test_settings_that_cannot_be_written_leave_the_file_as_it_was(home):
    paths = config.paths_of(home)
    config.make_folders(paths)
    good = run_supervisor.Start(settings=config.load(), model=plan.Model(folder="/m", name="m"))
    run_supervisor.write_start(paths, good)
    bad = run_supervisor.Start(settings=config.load(), model=plan.Model(folder=f"/{BAD}", name="m"))
    with pytest.raises(SettingsError, match="no UTF-8"):
        run_supervisor.write_start(paths, bad)
    assert run_supervisor.read_start(paths) == good
