"""Whom instances of one role have served, told on by the scheduler."""

from services.scheduler.core.instances import Instances
from services.scheduler.core.served import served_elsewhere
from shared.engine.interface import EngineLoad
from shared.engine.worker_config import WorkerSettings
from shared.engine.worker_cost import WorkerCost
from shared.engine.worker_reports import SchedulerReports
from shared.wire.reports import ServedElsewhere
from tests.support.control_plane import description, hello, report


def known(**roles) -> Instances:
    instances = Instances()
    for name, role in roles.items():
        instances.hello(hello(name, 3, role), now_ms=0)
    return instances


def tell(instances, name, seq=0, **served):
    said = report(name, 3, seq, served=served)
    instances.report(said, now_ms=10)
    return served_elsewhere(said, instances.live(now_ms=10))


def test_an_instance_hears_of_the_others_of_its_role_that_have_said_something():
    instances = known(d0="decode", d1="decode", d2="decode", p0="prefill")
    assert tell(instances, "p0", t=9) is None
    assert tell(instances, "d0", t=100) is None
    assert tell(instances, "d1", t=5, u=1) == ServedElsewhere(served={"d0/3": {"t": 100}})
    assert tell(instances, "d0", 1, t=120) == ServedElsewhere(served={"d1/3": {"t": 5, "u": 1}})
    assert tell(instances, "d2") is None, "it takes no turns"


def test_an_instance_of_another_model_and_a_silent_one_are_no_part_of_it():
    instances = known(d0="decode", d1="decode")
    instances.hello(hello("other", 3, "decode", description=description(model="other")), now_ms=0)
    tell(instances, "d0", t=1)
    tell(instances, "other", t=2)
    assert tell(instances, "d1", t=3) == ServedElsewhere(served={"d0/3": {"t": 1}})
    late = report("d1", 3, 1, served={"t": 4})
    instances.report(late, now_ms=5_000)
    assert served_elsewhere(late, instances.live(now_ms=5_000)) is None
    assert served_elsewhere(report("nobody", 3, 1, served={"t": 4}), instances.live(now_ms=5_000)) is None


def test_a_worker_passes_on_what_it_hears():
    heard = []
    reports = SchedulerReports(
        WorkerSettings(), hello=lambda epoch: hello("d0", epoch), load=EngineLoad, cost=WorkerCost(),
        on_stale=lambda: None, on_served=heard.append,
    )  # fmt: skip
    reports._on_message(0, ServedElsewhere(served={"d1/3": {"t": 5}}), [])
    assert heard == [{"d1/3": {"t": 5}}]
