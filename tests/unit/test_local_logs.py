"""`quire logs`: as many lines as were asked for, and with -f services that start later, too."""

import pytest
from typer.testing import CliRunner

from deploy.local import cmd_logs, config
from deploy.local.cli import app


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path))
    paths = config.paths_of(tmp_path)
    config.make_folders(paths)
    (paths.logs / "redis.log").write_text("".join(f"old {number}\n" for number in range(100)))
    return paths.logs


@pytest.mark.parametrize("lines", [0, 1, 3, 1_000])
def test_the_last_lines_are_as_many_as_were_asked_for(folder, lines):
    told = CliRunner().invoke(app, ["logs", "-n", str(lines)]).stdout.splitlines()
    assert told == [f"redis | old {number}" for number in range(100)][max(0, 100 - lines) :]


def test_what_starts_later_is_followed_too(folder, monkeypatch):
    rounds = []

    def sleep(_):
        rounds.append(None)
        if len(rounds) == 1:
            (folder / "gateway.log").write_text("begun\n")
        elif len(rounds) == 2:
            with (folder / "gateway.log").open("a") as log:
                log.write("on\n")
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(cmd_logs.time, "sleep", sleep)
    told = CliRunner().invoke(app, ["logs", "-f", "-n", "0"]).stdout.splitlines()
    assert told == ["gateway | begun", "gateway | on"]
