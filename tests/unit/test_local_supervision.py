"""The supervisor's decisions, with a virtual clock."""

from dataclasses import replace

import pytest

from deploy.local.service_order import Spec, start_order
from deploy.local.supervision import (
    SIGKILL,
    SIGTERM,
    Health,
    Notice,
    Rules,
    Signal,
    Spawn,
    State,
    Supervision,
)

REDIS = Spec("redis")
COORDINATOR = Spec("coordinator", depends_on=("redis",))
WORKER = Spec("worker", depends_on=("coordinator",), needs_live=("zygote",))
ZYGOTE = Spec("zygote")
GATEWAY = Spec("gateway", depends_on=("redis", "coordinator"), stop_grace_ms=500)
ALL = [GATEWAY, WORKER, COORDINATOR, REDIS, ZYGOTE]


def spawned(actions):
    return [a.name for a in actions if isinstance(a, Spawn)]


def signals(actions):
    return [(a.name, a.signum) for a in actions if isinstance(a, Signal)]


def notices(actions):
    return [(a.event, a.name) for a in actions if isinstance(a, Notice)]


class Cluster:
    """Carries out actions on a pretended machine."""

    def __init__(self, specs=ALL, rules=None):
        self.core = Supervision(specs, rules)
        self.now_ms = 1000
        self.pids = 100

    def begin(self):
        return self.follow(self.core.start(now_ms=self.now_ms))

    def follow(self, actions):
        for action in actions:
            if isinstance(action, Spawn):
                self.pids += 1
                actions = actions + self.core.on_spawned(action.name, self.pids)
        return actions

    def ready(self, *names):
        out = []
        for name in names:
            out += self.follow(self.core.on_probe(name, Health.OK, now_ms=self.now_ms))
        return out

    def exit(self, name, code=1):
        return self.follow(self.core.on_exit(name, code, now_ms=self.now_ms))

    def tick(self, by_ms):
        """Time passes, with a tick whenever the core asked for one and at the end, as the shell's timer does."""
        end_ms, out = self.now_ms + by_ms, []
        while (wake_ms := self.core.next_wake_ms()) is not None and wake_ms < end_ms:
            self.now_ms = max(self.now_ms, wake_ms)
            out += self.follow(self.core.tick(now_ms=self.now_ms))
        return out + self.stand_still(end_ms - self.now_ms)

    def stand_still(self, by_ms):
        """The shell is stopped for so long, then its timer is heard."""
        self.now_ms += by_ms
        return self.follow(self.core.tick(now_ms=self.now_ms))

    def all_ready(self):
        self.begin()
        self.ready(
            *(n for n in ("redis", "zygote", "coordinator", "worker", "gateway") if n in self.core.entries)
        )
        assert self.core.all_ready_once
        return self


def test_order_puts_dependencies_first():
    assert start_order(ALL) == ["redis", "coordinator", "gateway", "zygote", "worker"]


@pytest.mark.parametrize(
    "specs", [[Spec("a", ("b",)), Spec("b", ("a",))], [Spec("a", ("missing",))], [REDIS, REDIS]]
)
def test_impossible_tables_are_refused(specs):
    with pytest.raises(ValueError, match=r"cycle|twice"):
        start_order(specs)


def test_a_service_starts_only_when_its_dependencies_are_ready():
    cluster = Cluster()
    assert spawned(cluster.begin()) == ["redis", "zygote"]
    assert spawned(cluster.ready("redis")) == ["coordinator"]
    assert spawned(cluster.ready("coordinator")) == ["gateway"]
    assert spawned(cluster.ready("zygote")) == ["worker"]
    assert notices(cluster.ready("worker", "gateway"))[-1] == ("all_ready", "")


def test_not_ready_and_silence_open_no_gate():
    cluster = Cluster()
    cluster.begin()
    for health in (Health.NOT_READY, Health.SILENT):
        assert spawned(cluster.core.on_probe("redis", health, now_ms=cluster.now_ms)) == []
    assert cluster.core.entries["redis"].state is State.STARTING


@pytest.mark.parametrize("status", [-9, 0, 70])  # killed, by itself, after a bug
def test_back_off_doubles_is_capped_and_is_forgiven_after_a_stable_time(status):
    rules = Rules(first_backoff_ms=100, max_backoff_ms=1000, stable_ms=5000)
    cluster = Cluster(rules=rules).all_ready()
    waits = []
    for _ in range(6):
        cluster.exit("gateway", status)
        started = cluster.now_ms
        while not spawned(cluster.tick(10)):
            assert cluster.now_ms - started < 20_000
        waits.append(cluster.now_ms - started)
        cluster.ready("gateway")
    assert waits == [100, 200, 400, 800, 1000, 1000]
    cluster.tick(5000)
    cluster.exit("gateway", status)
    assert spawned(cluster.tick(100)) == ["gateway"]


def test_restarts_do_not_wait_for_gates_that_were_passed_once():
    cluster = Cluster().all_ready()
    cluster.exit("redis", -9)
    cluster.exit("coordinator", -9)
    assert spawned(cluster.tick(100)) == ["redis", "coordinator"]


def test_a_forked_service_waits_for_its_zygote_at_every_start():
    cluster = Cluster().all_ready()
    cluster.exit("zygote", -9)
    cluster.exit("worker", -9)
    assert spawned(cluster.tick(100)) == ["zygote"]
    assert cluster.core.entries["worker"].state is State.WAITING
    assert spawned(cluster.ready("zygote")) == ["worker"]


def heard(cluster, **healths):
    """Probes of a moment."""
    out = []
    for name, health in healths.items():
        out += cluster.follow(cluster.core.on_probe(name, health, now_ms=cluster.now_ms))
    return out


def test_a_zygote_that_does_not_answer_is_not_asked_to_fork():
    cluster = Cluster().all_ready()
    heard(cluster, zygote=Health.SILENT)
    cluster.exit("worker", -9)
    assert spawned(cluster.tick(5_000)) == []
    assert cluster.core.entries["worker"].state is State.WAITING
    assert spawned(heard(cluster, zygote=Health.OK)) == ["worker"], "it only stood still"


def test_a_zygote_that_hangs_is_killed_where_a_start_waits_for_it():
    cluster = Cluster([ZYGOTE, replace(WORKER, depends_on=())], rules=Rules(silent_ms=3_000)).all_ready()
    heard(cluster, zygote=Health.SILENT)
    cluster.exit("worker", -9)
    assert signals(cluster.tick(2_999)) == []
    assert signals(cluster.tick(1)) == [("zygote", SIGKILL)]
    cluster.exit("zygote", -9)
    assert spawned(cluster.tick(100)) == ["zygote"]
    assert spawned(cluster.ready("zygote")) == ["worker"]


def test_a_zygote_that_hangs_is_left_alone_while_all_that_would_end_with_it_serve():
    cluster = Cluster([ZYGOTE, replace(WORKER, depends_on=())], rules=Rules(silent_ms=3_000)).all_ready()
    for _ in range(8):
        heard(cluster, zygote=Health.SILENT, worker=Health.NOT_READY)
        assert cluster.core.next_wake_ms() > cluster.now_ms
        assert signals(cluster.tick(1_000)) == []
    # it hangs, too, or is dead, which only the zygote would say
    heard(cluster, worker=Health.SILENT)
    assert signals(cluster.tick(1_999)) == []
    assert ("zygote", SIGKILL) in signals(cluster.tick(1))


def test_a_crash_loop_is_told_once_and_tried_on():
    cluster = Cluster(rules=Rules(crash_loop_failures=3)).all_ready()
    told = []
    for _ in range(6):
        told += notices(cluster.exit("gateway"))
        assert spawned(cluster.tick(10_000)) == ["gateway"]
    assert told.count(("crash_loop", "gateway")) == 1
    assert not cluster.core.gave_up


def test_a_service_that_never_starts_ends_the_start():
    cluster = Cluster(rules=Rules(max_start_failures=3))
    cluster.begin()
    cluster.ready("redis")
    for _ in range(2):
        assert ("give_up", "coordinator") not in notices(cluster.exit("coordinator"))
        cluster.tick(1000)
    actions = cluster.exit("coordinator")
    assert ("give_up", "coordinator") in notices(actions)
    assert dict(signals(actions)) == {"redis": SIGTERM, "zygote": SIGTERM}
    cluster.exit("redis", 0)
    cluster.exit("zygote", 0)
    assert cluster.core.stopped
    assert cluster.core.gave_up == "coordinator"


def test_refused_settings_are_not_tried_again():
    cluster = Cluster()
    cluster.begin()
    assert ("give_up", "redis") in notices(cluster.exit("redis", 2))


def test_a_start_past_its_deadline_is_killed_and_counts_as_a_failure():
    cluster = Cluster([Spec("slow", start_timeout_ms=3000)])
    cluster.begin()
    assert signals(cluster.tick(2999)) == []
    assert signals(cluster.tick(1)) == [("slow", SIGKILL)]
    cluster.exit("slow", -9)
    assert cluster.core.entries["slow"].failures == 1


def test_a_silent_service_is_killed_and_an_unready_one_is_left_alone():
    cluster = Cluster([REDIS], rules=Rules(silent_ms=3000))
    cluster.begin()
    cluster.ready("redis")
    for _ in range(10):
        assert signals(cluster.tick(1000)) == []
        cluster.core.on_probe("redis", Health.NOT_READY, now_ms=cluster.now_ms)
    for _ in range(2):
        cluster.core.on_probe("redis", Health.SILENT, now_ms=cluster.now_ms)
        assert signals(cluster.tick(1000)) == []
    assert signals(cluster.tick(1000)) == [("redis", SIGKILL)]


def test_a_service_may_have_less_patience_than_others():
    cluster = Cluster([replace(REDIS, silent_ms=1000), ZYGOTE], rules=Rules(silent_ms=3000)).all_ready()
    assert signals(cluster.tick(999)) == []
    assert signals(cluster.tick(1)) == [("redis", SIGKILL)]


def test_a_shell_that_stood_still_takes_that_for_nobodys_silence():
    cluster = Cluster(rules=Rules(silent_ms=3000)).all_ready()
    cluster.tick(1000)
    for _ in range(3):
        assert signals(cluster.stand_still(60_000)) == []
        cluster.ready(*cluster.core.entries)
    assert signals(cluster.tick(2999)) == []
    assert len(signals(cluster.tick(1))) == len(ALL)


def test_a_silence_goes_on_behind_a_standstill():
    cluster = Cluster([REDIS], rules=Rules(silent_ms=10_000))
    cluster.begin()
    cluster.ready("redis")
    cluster.tick(6000)
    assert signals(cluster.stand_still(60_000)) == []
    assert signals(cluster.tick(2999)) == []
    assert signals(cluster.tick(1)) == [("redis", SIGKILL)]


def test_a_silent_service_is_found_by_a_shell_that_stands_still_at_every_turn():
    cluster = Cluster([REDIS], rules=Rules(silent_ms=10_000))
    cluster.begin()
    cluster.ready("redis")
    turns = [signals(cluster.stand_still(5000)) for _ in range(10)]
    assert turns == [[]] * 9 + [[("redis", SIGKILL)]]


def test_starts_and_stops_have_their_time_also_when_the_shell_stood_still_in_it():
    cluster = Cluster([Spec("slow", start_timeout_ms=8000, stop_grace_ms=4000)])
    cluster.begin()
    cluster.tick(2000)
    assert signals(cluster.stand_still(60_000)) == []
    assert signals(cluster.tick(4999)) == []
    assert signals(cluster.tick(1)) == [("slow", SIGKILL)]
    cluster.exit("slow", -9)
    cluster.tick(100)
    assert signals(cluster.core.stop(now_ms=cluster.now_ms)) == [("slow", SIGTERM)]
    assert signals(cluster.stand_still(60_000)) == []
    assert signals(cluster.tick(3000)) == [("slow", SIGKILL)]


def test_a_back_off_that_ended_in_a_standstill_has_ended():
    cluster = Cluster().all_ready()
    cluster.exit("gateway")
    assert spawned(cluster.stand_still(60_000)) == ["gateway"]


def test_stop_ends_dependents_first_and_kills_after_the_grace():
    cluster = Cluster().all_ready()
    actions = cluster.core.stop(now_ms=cluster.now_ms)
    assert signals(actions) == [("gateway", SIGTERM), ("worker", SIGTERM)]
    assert signals(cluster.tick(500)) == [("gateway", SIGKILL)]
    assert signals(cluster.exit("gateway", -9)) == []
    assert sorted(signals(cluster.exit("worker", 0))) == [("coordinator", SIGTERM), ("zygote", SIGTERM)]
    assert signals(cluster.exit("coordinator", 0)) == [("redis", SIGTERM)]
    cluster.exit("zygote", 0)
    assert not cluster.core.stopped
    cluster.exit("redis", 0)
    assert cluster.core.stopped
    assert spawned(cluster.tick(60_000)) == []


def test_a_process_that_appears_during_the_stop_is_ended_too():
    core = Supervision([REDIS])
    core.start(now_ms=0)
    assert signals(core.stop(now_ms=1)) == []
    assert signals(core.on_spawned("redis", 7)) == [("redis", SIGTERM)]
    core.on_exit("redis", 0, now_ms=2)
    assert core.stopped


def unborn():
    """A service whose spawn was asked for and never answered."""
    core = Supervision([Spec("w", start_timeout_ms=800, stop_grace_ms=500)])
    assert spawned(core.start(now_ms=0)) == ["w"]
    return core


def test_a_start_without_a_process_is_over_at_its_deadline():
    core = unborn()
    actions = core.tick(now_ms=800)
    assert signals(actions) == [("w", SIGKILL)]  # whoever spawns it late must not keep it
    assert notices(actions) == [("start_timeout", "w"), ("exited", "w")]
    assert spawned(core.tick(now_ms=900)) == ["w"]


def test_a_restart_of_what_never_had_a_process_starts_it_after_the_grace():
    core = unborn()
    assert signals(core.restart("w", now_ms=100)) == []
    actions = core.tick(now_ms=600)
    assert signals(actions) == [("w", SIGKILL)]
    assert spawned(actions) == ["w"]


def test_a_stop_does_not_wait_for_what_never_had_a_process():
    core = unborn()
    core.stop(now_ms=100)
    core.tick(now_ms=600)
    assert core.stopped


def test_an_asked_restart_is_graceful_and_immediate():
    cluster = Cluster().all_ready()
    assert signals(cluster.core.restart("gateway", now_ms=cluster.now_ms)) == [("gateway", SIGTERM)]
    assert spawned(cluster.exit("gateway", 0)) == ["gateway"]
    assert cluster.core.entries["gateway"].failures == 0
    assert cluster.core.entries["gateway"].restarts == 1


def test_a_restart_cuts_the_back_off_short():
    cluster = Cluster().all_ready()
    for _ in range(4):
        cluster.exit("gateway")
        cluster.tick(10_000)
    cluster.exit("gateway")
    assert spawned(cluster.core.restart("gateway", now_ms=cluster.now_ms)) == ["gateway"]
