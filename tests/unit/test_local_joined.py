"""A machine that joined another one's cluster has no gateway: what its commands say of it, and what they ask for."""

import pytest

from deploy.local import cmd_chat, cmd_status, cmd_up, plan, run_supervisor
from shared.errors import SettingsError
from tests.unit.test_local_brackets import STATUS
from tests.unit.test_local_table import a_plan, settings

JOINED = {**STATUS, "url": "", "joined": "10.0.0.5", "model": "m", "services": []}


def test_its_status_has_no_url_and_says_whom_it_joined():
    start = run_supervisor.Start(settings=settings(), model=plan.Model(folder="/m", name="m"))
    found = run_supervisor.describe(start, a_plan(join=plan.parse_join("10.0.0.5:8100"), address="10.0.0.6"))
    assert (found["url"], found["joined"]) == ("", "10.0.0.5")
    found = run_supervisor.describe(start, a_plan())
    assert (found["url"], found["joined"]) == ("http://127.0.0.1:8000", "")


def test_up_and_status_offer_no_command_that_cannot_run_there(capsys):
    cmd_up._summary(JOINED, "quire")
    said = capsys.readouterr().out
    assert "Quire serves m at the gateway of 10.0.0.5\n" in said
    assert "chat" not in said
    assert "curl" not in said
    cmd_status._show(JOINED)
    assert "m at the gateway of 10.0.0.5  ready" in capsys.readouterr().out


def test_chat_asks_for_the_gateways_address(monkeypatch):
    monkeypatch.setattr(cmd_chat, "status_or_none", lambda: JOINED)
    with pytest.raises(SettingsError, match=r"joined 10\.0\.0\.5.*--url .*http://10\.0\.0\.5:8000"):
        cmd_chat._local_url()
