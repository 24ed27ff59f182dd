"""A machine that joined another one's cluster has no gateway: what its commands say of it, and what they ask for."""

import pytest

from deploy.local import cmd_chat, cmd_status, cmd_up, config, plan, run_supervisor
from deploy.local.services_table import build
from shared.errors import SettingsError
from tests.unit.test_local_brackets import STATUS
from tests.unit.test_local_table import a_plan, flags, of_name, settings

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


def test_two_homes_of_one_address_that_join_a_cluster_take_no_name_of_each_other():
    """Each registration took the other's epoch, for ever."""
    names = []
    for base_port in (9100, 9200):
        found = settings(
            address="10.0.0.6", join="10.0.0.5:8100", engine="mock", memory_market=True,
            base_port=base_port, port=8000,
        )  # fmt: skip
        services = of_name(
            build(plan.make_plan(found, config.paths_of("/h"), plan.Model(folder="/m", name="m")))
        )
        names += [
            flags(services["mempool"])["--market-name"],
            *(n for n in services if n.startswith("decode-")),
        ]
    assert names == [
        "mempool-10-0-0-6-9100", "decode-0-10-0-0-6-9100", "mempool-10-0-0-6-9200", "decode-0-10-0-0-6-9200",
    ]  # fmt: skip


def test_what_other_machines_connect_to_is_looked_at_before_anything_starts():
    """An address that this machine lacks was found out by the mempool alone, as a device that UCX does not know."""
    address = {"address": "10.0.0.6"}
    by_name = of_name(build(a_plan(**address)))
    for name, port in (("scheduler", 8102), ("mempool", 8107), ("prefill-0", 8120), ("decode-0", 8140)):
        assert ("10.0.0.6", port) in by_name[name].listens
    assert ("10.0.0.6", 8103) in by_name["coordinator"].listens
    joined = of_name(build(a_plan(**address, join=plan.parse_join("10.0.0.5:8100"))))
    assert ("10.0.0.6", 8140) in joined["decode-0"].listens
    hosts = {host for service in build(a_plan()) for host, _ in service.listens}
    assert hosts == {"127.0.0.1"}, "alone it listens on sockets instead"
