"""Instances of one model's name are of one model: clients would get answers of one that they did not ask for."""

from services.scheduler.core.instances import Instances
from shared.wire.reports import Goodbye, Refused, Resync, Welcome
from tests.support.control_plane import description, hello, report

OTHER = description(fingerprint="f2")


def live(instances, now_ms):
    return [known.instance for known in instances.live("demo", now_ms=now_ms)]


def test_another_model_under_a_name_that_is_served_is_refused_until_those_have_left():
    instances = Instances()
    instances.hello(hello("p0"), now_ms=0)
    answer = instances.hello(hello("p1", description=OTHER), now_ms=0)
    assert isinstance(answer, Refused)
    assert answer.reason == (
        "its 'demo' is another model (fingerprint f2) than that of p0 (f1): other weights or another config.json; "
        "give them the same files, or another name to one of them"
    )
    assert live(instances, 0) == ["p0"]
    assert isinstance(instances.report(report("p1"), now_ms=10), Resync), "it is not known"
    instances.goodbye(Goodbye(instance="p0", epoch=1))
    assert isinstance(instances.hello(hello("p1", description=OTHER), now_ms=20), Welcome)
    assert live(instances, 20) == ["p1"]
    assert isinstance(instances.hello(hello("p0", 2), now_ms=30), Refused), "first come"


def test_a_model_that_is_read_alike_on_other_devices_and_in_other_layouts_is_one_model():
    instances = Instances()
    instances.hello(hello("p0"), now_ms=0)
    alike = description(isa="avx512", tp_size=2, max_model_len=8192, block_tokens=64)
    assert isinstance(instances.hello(hello("p1", description=alike), now_ms=0), Welcome)
    assert isinstance(instances.hello(hello("x", description=description("x", "f2")), now_ms=0), Welcome)
    assert live(instances, 0) == ["p0", "p1"]


def test_an_instance_may_come_back_with_another_model_when_it_is_alone():
    instances = Instances()
    instances.hello(hello("p0"), now_ms=0)
    assert isinstance(instances.hello(hello("p0", 2, description=OTHER), now_ms=0), Welcome)


def test_who_was_silent_while_another_model_took_its_name_is_refused_when_it_comes_back():
    instances = Instances()
    instances.hello(hello("p0"), now_ms=0)
    assert isinstance(instances.hello(hello("p1", description=OTHER), now_ms=2_000), Welcome)
    assert isinstance(instances.report(report("p0"), now_ms=2_100), Resync)
    assert live(instances, 2_100) == ["p1"]
    assert isinstance(instances.hello(hello("p0"), now_ms=2_200), Refused)
    assert live(instances, 2_200) == ["p1"]


def test_behind_a_schedulers_start_who_came_to_the_cluster_first_has_the_name_whoever_says_hello_first():
    """A worker with the wrong files, refused until then, is the quicker one: it must not have all others refused."""
    instances = Instances()
    assert isinstance(instances.hello(hello("wrong", 9, description=OTHER), now_ms=0), Welcome)
    assert isinstance(instances.hello(hello("p0", 3), now_ms=200), Welcome)
    assert live(instances, 200) == ["p0"]
    assert isinstance(instances.report(report("wrong", 9), now_ms=300), Resync)
    assert isinstance(instances.hello(hello("wrong", 9, description=OTHER), now_ms=310), Refused)
    assert isinstance(instances.hello(hello("p1", 11), now_ms=400), Welcome)


def test_later_a_name_is_not_taken_from_who_has_it_by_an_older_one():
    instances = Instances()
    instances.hello(hello("new", 9, description=OTHER), now_ms=0)
    instances.report(report("new", 9), now_ms=9_990)
    assert isinstance(instances.hello(hello("old", 3), now_ms=10_000), Refused)
    assert live(instances, 10_000) == ["new"]


def test_a_draining_instance_has_its_name_still():
    """It ends what it has begun, and what it cannot end goes on elsewhere."""
    instances = Instances()
    instances.hello(hello("p0"), now_ms=0)
    instances.report(report("p0", draining=True), now_ms=10)
    assert isinstance(instances.hello(hello("p1", description=OTHER), now_ms=20), Refused)
