"""What is under way when a cluster is stopped: its time, who is kept for it, a stop at once; with a virtual clock."""

import pytest

from deploy.local import config
from deploy.local.service_order import Spec, longest_stop_ms, start_order
from deploy.local.services_table import build
from deploy.local.supervision import SIGKILL, SIGTERM, Rules
from shared.engine.worker_config import WorkerSettings
from tests.unit.test_local_supervision import Cluster, notices, signals
from tests.unit.test_local_table import a_plan

REDIS = Spec("redis", stop_grace_ms=100)
WORKER = Spec("worker", ("redis",), stop_grace_ms=400, drain_ms=30_000)
GATEWAY = Spec("gateway", ("redis",), served_by=("worker",), stop_grace_ms=300, drain_ms=30_000)
ALL = [REDIS, WORKER, GATEWAY]
RULES = Rules(busy_silent_ms=1_500, silent_ms=3_600_000)


@pytest.fixture
def cluster():
    return Cluster(ALL, RULES).all_ready()


def stop(cluster, **more):
    return cluster.follow(cluster.core.stop(now_ms=cluster.now_ms, **more))


def says(cluster, name, count):
    return cluster.follow(cluster.core.on_in_flight(name, count, now_ms=cluster.now_ms))


def test_workers_are_stopped_behind_the_gateway_that_they_serve_and_start_before_it_is_ready(cluster):
    assert signals(stop(cluster)) == [("gateway", SIGTERM)]
    assert signals(cluster.exit("gateway", 0)) == [("worker", SIGTERM)]
    assert signals(cluster.exit("worker", 0)) == [("redis", SIGTERM)]


def test_a_gateway_that_is_not_there_holds_no_worker(cluster):
    cluster.exit("gateway", -9)
    assert signals(stop(cluster)) == [("worker", SIGTERM)]


def test_who_has_answers_under_way_has_its_drain_time_and_then_its_grace(cluster):
    stop(cluster)
    for _ in range(30):
        says(cluster, "gateway", 2)
        assert signals(cluster.tick(1_000)) == []
    says(cluster, "gateway", 2)
    assert signals(cluster.tick(299)) == []
    assert signals(cluster.tick(1)) == [("gateway", SIGKILL)]


def test_that_it_waits_is_told_once(cluster):
    assert notices(stop(cluster)) == [("stopping", "")]
    told = says(cluster, "gateway", 2) + says(cluster, "gateway", 1)
    assert notices(told) == [("waiting", "gateway")]
    assert told[0].text.startswith("2 answers are under way: waiting for them, at most 30 s; ")


def test_who_says_nothing_is_killed_after_its_grace_and_who_was_busy_after_a_while(cluster):
    stop(cluster)
    assert signals(cluster.tick(299)) == []
    says(cluster, "gateway", 1)
    says(cluster, "gateway", 0)
    assert signals(cluster.tick(1_499)) == []
    assert signals(cluster.tick(1)) == [("gateway", SIGKILL)]
    cluster.exit("gateway", -9)
    assert signals(cluster.tick(400)) == [("worker", SIGKILL)]


def test_a_second_stop_ends_what_is_under_way_at_once(cluster):
    stop(cluster)
    says(cluster, "gateway", 2)
    assert signals(stop(cluster, at_once=True)) == []
    assert signals(says(cluster, "gateway", 2)) == [("gateway", SIGTERM)], "told twice, it ends them"
    assert signals(cluster.tick(299)) == []
    assert signals(cluster.tick(1)) == [("gateway", SIGKILL)]
    cluster.exit("gateway", -9)
    assert signals(says(cluster, "worker", 1)) == [("worker", SIGTERM)]
    assert signals(cluster.tick(400)) == [("worker", SIGKILL)]


def test_a_first_stop_may_be_at_once(cluster):
    assert notices(stop(cluster, at_once=True)) == [("stopping", "")]
    told = says(cluster, "gateway", 2)
    assert (signals(told), notices(told)) == ([("gateway", SIGTERM)], [])
    assert signals(cluster.tick(300)) == [("gateway", SIGKILL)]


def test_a_stop_at_once_gives_nobody_more_time_and_kills_nobody_twice(cluster):
    stop(cluster)
    assert signals(cluster.tick(300)) == [("gateway", SIGKILL)]
    assert signals(stop(cluster, at_once=True) + cluster.tick(10_000)) == []


def test_a_shell_that_stood_still_takes_no_drain_time(cluster):
    stop(cluster)
    says(cluster, "gateway", 1)
    assert signals(cluster.stand_still(60_000)) == []
    for _ in range(29):
        says(cluster, "gateway", 1)
        assert signals(cluster.tick(1_000)) == []


def test_a_restart_lets_answers_finish_too(cluster):
    cluster.core.restart("gateway", now_ms=cluster.now_ms)
    says(cluster, "gateway", 1)
    assert signals(cluster.tick(1_000)) == []


def test_the_longest_stop_is_one_of_each_that_waits_for_another():
    assert longest_stop_ms(ALL) == 30_300 + 30_400 + 100
    assert longest_stop_ms([Spec("a", drain_ms=5), Spec("b")]) == 2_005
    assert longest_stop_ms([]) == 0


def test_services_whose_stops_wait_for_each_other_are_refused():
    with pytest.raises(ValueError, match="wait for each other"):
        longest_stop_ms([Spec("a", served_by=("b",)), Spec("b", depends_on=("a",))])


def test_a_drain_time_beyond_all_clocks_is_a_week():
    """Sockets cannot wait for longer than that, and who stops a cluster waits by it."""
    found = config.drains_ms({"QUIRE_WORKER_DRAIN_DEADLINE_MS": str(10 * 365 * 86_400_000)})
    assert found["worker"] == 7 * 24 * 3_600_000


def test_services_have_the_drain_time_of_their_own_settings_and_the_gateway_is_served_by_every_worker():
    drains_ms = config.drains_ms({"QUIRE_GATEWAY_DRAIN_DEADLINE_MS": "45000"})
    assert drains_ms == {"gateway": 45_000, "worker": WorkerSettings().drain_deadline_ms}
    found = {service.name: service for service in build(a_plan(drains_ms=drains_ms))}
    assert {name for name, each in found.items() if each.drain_ms} == {"prefill-0", "decode-0", "gateway"}
    assert found["gateway"].spec.drain_ms == 45_000
    assert found["gateway"].spec.served_by == ("prefill-0", "decode-0")
    order = start_order([each.spec for each in found.values()])
    assert order.index("scheduler") < order.index("gateway")
