"""Models and folders with square brackets are printed as they are: they are no markup of the terminal's library."""

import pytest

from deploy.local import cmd_doctor, cmd_status, cmd_up, config
from deploy.local.doctor_checks import Finding, Verdict
from deploy.local.terminal import err, out

NAMES = ["demo[int8]", "demo[/v2]", "[bold]demo", "demo\\[x]"]
STATUS = {
    "url": "http://[::1]:8000", "authenticated": False, "trace_endpoint": "", "traces": "t", "logs": "l", "ready": True,
    "troubles": [], "stopping": False, "device": "cpu", "topology": "colocated", "uptime_s": 1, "mempool": None,
    "workers": {}, "joined": "",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_what_up_says_at_the_end(capsys, name):
    cmd_up._summary({**STATUS, "model": name}, "quire")
    assert f"Quire serves {name} at http://[::1]:8000/v1\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_what_status_says(capsys, name):
    service = {"name": "decode-0", "state": "ready", "health": "ok", "says": name, "pid": 1, "state_s": 1}
    service |= {"restarts": 0, "last_exit": ""}
    cmd_status._show({**STATUS, "model": name, "services": [service]})
    said = capsys.readouterr().out
    assert f"{name} at http://[::1]:8000/v1  ready  cpu" in said
    assert f"ok: {name} " in said


@pytest.mark.parametrize("name", NAMES)
def test_what_doctor_finds(capsys, monkeypatch, name):
    monkeypatch.setattr(config, "load", lambda _: None)
    monkeypatch.setattr(cmd_doctor, "CHECKS", [lambda _: Finding("disk", Verdict.OK, f"room in {name}")])
    with pytest.raises(SystemExit):
        cmd_doctor.doctor(quick=True)
    assert f"ok   disk         room in {name}\n" in capsys.readouterr().out


@pytest.mark.parametrize("console", [out, err])
@pytest.mark.parametrize("name", NAMES)
def test_no_command_has_markup_that_it_did_not_ask_for(capsys, console, name):
    console.print(f"starting {name}")
    assert f"starting {name}\n" in "".join(capsys.readouterr())
