"""What `quire status` says of services whose probes are well, and for how long a service has been in its state."""

import pytest

from deploy.local import cmd_status
from deploy.local.service_order import Spec
from deploy.local.services_table import build
from deploy.local.supervision import Health, Supervision
from deploy.local.troubles import troubles
from tests.unit.test_local_table import a_plan


def service(name, state="ready", health="ok"):
    return {"name": name, "state": state, "health": health}


def instance(name, **more):
    return {"instance": name, "live": True, "draining": False, "silent_ms": 10, **more}


SERVICES = [service("scheduler"), service("prefill-0"), service("decode-0")]
PREFILL = instance("prefill-0")


def test_a_cluster_that_serves_is_in_no_trouble():
    scheduler = {"instances": [PREFILL, instance("decode-0")], "refused": []}
    leader = {"ready": True, "role": "leader", "problem": ""}
    assert troubles(SERVICES, scheduler, {"coordinator": leader, "standby": {"role": "standby"}}) == []
    draining = {"instances": [PREFILL, instance("decode-0", live=False, draining=True)]}
    assert troubles(SERVICES, draining, {}) == []


@pytest.mark.parametrize("known", [None, instance("decode-0", live=False)])
def test_an_instance_that_the_scheduler_refuses_is_not_called_well(known):
    scheduler = {
        "instances": [PREFILL, *([known] if known else [])],
        "refused": [{"instance": "decode-0", "reason": "decode-0 has epoch 9; 5 is over"}],
    }
    assert troubles(SERVICES, scheduler, {}) == [
        "decode-0 gets no requests: the scheduler refuses it: decode-0 has epoch 9; 5 is over"
    ]


def test_an_instance_that_the_scheduler_does_not_hear_of_is_not_called_well():
    found = troubles(SERVICES, {"instances": [instance("decode-0", live=False, silent_ms=4_200)]}, {})
    assert found == [
        "prefill-0 gets no requests: the scheduler does not know it",
        "decode-0 gets no requests: the scheduler has not heard of it for 4.2 s",
    ]


def test_what_is_not_ready_or_does_not_answer_is_said_elsewhere():
    starting = [service("decode-0", "starting", "silent"), service("prefill-0", health="not_ready")]
    assert troubles(starting, {"instances": []}, {"coordinator": None}) == []
    assert troubles(SERVICES, None, {}) == []


def test_a_service_that_does_not_answer_is_said_before_its_probe_fails():
    hung = {"name": "mempool", "state": "ready", "health": "ok"}
    ends = hung | {"name": "gateway", "state": "stopping"}
    assert troubles([hung, ends], None, {}, ["mempool", "gateway"]) == ["mempool does not answer"]


def test_a_status_says_which_of_the_tables_services_it_asked_in_vain(monkeypatch):
    monkeypatch.setattr(cmd_status, "get_json", lambda _: None)
    known = {"state": "ready", "health": "ok", "probe": "http://127.0.0.1:1/ready"}
    found = {"joined": "", "mempool": None, "services": [{"name": s.name, **known} for s in build(a_plan())]}
    assert {line.split()[0] for line in cmd_status._troubles(found)} == {"scheduler", "mempool", "gateway"}


def test_a_coordinator_that_does_not_lead_says_why():
    said = {"ready": True, "role": "unknown", "problem": "WRONGTYPE Operation against a key"}
    assert troubles([], None, {"coordinator": said}) == [
        "coordinator does not lead: WRONGTYPE Operation against a key"
    ]


def test_a_service_that_waits_to_start_has_waited_since_the_cluster_began():
    """It was up for as long as its machine."""
    core = Supervision([Spec("redis"), Spec("worker", depends_on=("redis",))])
    core.start(now_ms=5_000_000)
    assert [entry.since_ms for entry in core.entries.values()] == [5_000_000, 5_000_000]
    core.on_probe("redis", Health.OK, now_ms=5_000_700)
    assert core.entries["worker"].since_ms == 5_000_700
