"""Whatever fails in whatever order: one process per service, gates hold, and a stop always ends."""

from hypothesis import given
from hypothesis import strategies as st

from deploy.local.service_order import Spec, longest_stop_ms
from deploy.local.supervision import Health, Rules, Signal, Spawn, State, Supervision

SPECS = [
    Spec("a"),
    Spec("b", depends_on=("a",)),
    Spec("z", depends_on=()),
    Spec("c", depends_on=("b",), needs_live=("z",)),
    Spec("d", depends_on=("a", "b"), served_by=("c",), stop_grace_ms=300, drain_ms=3000),
]
NAMES = [spec.name for spec in SPECS]
BY_NAME = {spec.name: spec for spec in SPECS}
RULES = Rules(max_start_failures=1000, silent_ms=4000)
LONGEST_STOP_MS = longest_stop_ms(SPECS)  # all of them deaf, and with something under way

steps = st.lists(
    st.tuples(
        st.sampled_from(["ok", "not_ready", "silent", "busy", "exit", "tick", "restart", "tick_long"]),
        st.sampled_from(NAMES),
        st.integers(1, 500),
    ),
    max_size=60,
)


class Machine:
    """Processes as the actions make them; SIGTERM is obeyed or not, SIGKILL always."""

    def __init__(self, deaf):
        self.core = Supervision(SPECS, RULES)
        self.now_ms, self.running, self.deaf, self.pid = 0, {}, deaf, 0
        self.was_ready = set()

    def follow(self, actions):
        queue = list(actions)
        while queue:
            action = queue.pop(0)
            if isinstance(action, Spawn):
                assert action.name not in self.running
                assert set(BY_NAME[action.name].depends_on) <= self.was_ready
                assert all(self.core.entries[d].state is State.READY for d in BY_NAME[action.name].needs_live)
                self.pid += 1
                self.running[action.name] = self.pid
                queue += self.core.on_spawned(action.name, self.pid)
            elif isinstance(action, Signal):
                assert action.name in self.running
                if action.signum == 9 or action.name not in self.deaf:
                    queue += self.exit(action.name)

    def exit(self, name):
        del self.running[name]
        return self.core.on_exit(name, -9, now_ms=self.now_ms)

    def probe(self, name, health):
        if name in self.running:
            if health is Health.OK and self.core.entries[name].state is State.STARTING:
                self.was_ready.add(name)
            self.follow(self.core.on_probe(name, health, now_ms=self.now_ms))

    def do(self, step, name, by_ms):
        if step in ("ok", "not_ready", "silent"):
            self.probe(name, Health(step))
        elif step == "busy":
            self.follow(self.core.on_in_flight(name, by_ms, now_ms=self.now_ms))
        elif step == "exit" and name in self.running:
            self.follow(self.exit(name))
        elif step == "restart":
            self.follow(self.core.restart(name, now_ms=self.now_ms))
        elif step.startswith("tick"):
            self.now_ms += by_ms * (100 if step == "tick_long" else 1)
            self.follow(self.core.tick(now_ms=self.now_ms))


@given(steps, st.sets(st.sampled_from(NAMES)), st.booleans())
def test_gates_hold_and_a_stop_ends_with_no_process_left(history, deaf, at_once):
    machine = Machine(deaf)
    machine.follow(machine.core.start(now_ms=0))
    for step in history:
        machine.do(*step)
        assert set(machine.running) == {n for n, e in machine.core.entries.items() if e.pid}
    machine.follow(machine.core.stop(now_ms=machine.now_ms, at_once=at_once))
    limit_ms = sum(spec.stop_grace_ms for spec in SPECS) if at_once else LONGEST_STOP_MS
    for _ in range(limit_ms // 500 + len(SPECS)):
        for name in NAMES:
            machine.do("busy", name, 1)
        machine.do("tick", "a", 500)
    assert machine.core.stopped
    assert not machine.running


@given(steps, st.integers(1, 6))
def test_whoever_has_something_under_way_has_its_time_and_so_has_who_serves_it(history, num_rounds):
    machine = Machine(set(NAMES))
    machine.follow(machine.core.start(now_ms=0))
    for name in NAMES:
        machine.probe(name, Health.OK)
    for step in history:
        machine.do(*step)
    for name in NAMES:
        machine.probe(name, Health.OK)
    before = set(machine.running)
    is_served = machine.core.entries["c"].state is State.READY
    machine.follow(machine.core.stop(now_ms=machine.now_ms))
    for _ in range(num_rounds):
        machine.do("busy", "d", 1)
        machine.do("ok", "c", 1)
        machine.do("tick", "a", 500)
    if "d" in before and machine.core.entries["d"].last_ms > machine.now_ms:
        assert "d" in machine.running
        assert "c" in machine.running or not is_served


def test_nobody_starts_who_needs_a_service_that_is_killed_for_its_silence_in_the_same_moment():
    machine = Machine(set(NAMES))
    machine.follow(machine.core.start(now_ms=0))
    for name in NAMES:
        machine.probe(name, Health.OK)
    for step in (("tick_long", "a", 1), ("tick_long", "a", 10), ("tick_long", "a", 19), ("exit", "c", 1)):
        machine.do(*step)
    machine.do("tick_long", "a", 10)
    assert {"c", "z"}.isdisjoint(machine.running)


def test_what_a_service_that_is_being_killed_still_answers_does_not_count():
    machine = Machine(set())
    machine.follow(machine.core.start(now_ms=0))
    for name in NAMES:
        machine.probe(name, Health.OK)
    for _ in range(4):
        machine.do("tick", "a", RULES.silent_ms // 4 - 20)
    machine.do("exit", "c", 1)
    machine.now_ms += RULES.first_backoff_ms
    killed = machine.core.tick(now_ms=machine.now_ms)
    assert Signal("z", 9) in killed
    assert Spawn("c") not in killed + machine.core.on_probe("z", Health.OK, now_ms=machine.now_ms)
    machine.follow([a for a in killed if isinstance(a, Signal)])
    while "z" not in machine.running:
        machine.do("tick", "a", 100)
    machine.probe("z", Health.OK)
    assert "c" in machine.running


def test_a_service_that_dies_before_its_turn_to_be_stopped_holds_up_no_stop():
    machine = Machine(set())
    machine.follow(machine.core.start(now_ms=0))
    for name in ("a", "b", "z"):
        machine.probe(name, Health.OK)
    machine.deaf = {"c"}
    machine.follow(machine.core.stop(now_ms=0))
    machine.follow(machine.exit("a"))
    for _ in range(LONGEST_STOP_MS // 500):
        machine.do("tick", "a", 500)
    assert machine.core.stopped


@given(steps, st.sets(st.sampled_from(NAMES)))
def test_without_a_stop_everything_becomes_ready_again(history, deaf):
    machine = Machine(deaf)
    machine.follow(machine.core.start(now_ms=0))
    for step in history:
        machine.do(*step)
    for _ in range(60):
        for name in NAMES:
            machine.probe(name, Health.OK)
        machine.do("tick", "a", 1000)
    assert all(entry.state is State.READY for entry in machine.core.entries.values())
