"""What the supervisor decides: start order, health gates, back-off, crash loops, stop order. No I/O.

    WAITING -(dependencies ready)-> STARTING -(probe ok)-> READY
    STARTING, READY -(exit, start deadline, silence)-> BACKOFF -(delay)-> WAITING
    any with a process -(stop, restart)-> STOPPING -(exit)-> STOPPED | WAITING

Time comes in as `now_ms`, actions go out; the shell in supervisor.py carries them out and reports back.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from deploy.local.service_order import Spec, held_by, longest_stop_ms, start_order

SIGTERM = 15
SIGKILL = 9
USAGE_EXIT_CODE = 2  # a service that refuses its settings: starting it again cannot help
LOOK_MS = 1_000  # the shell comes back after at most so long, so that it is seen when it could not
AWAY_AFTER_MS = 2_000  # it was stopped, or the machine was: what services said meanwhile is not read yet


class State(StrEnum):
    """See the diagram above."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    STOPPED = "stopped"


class Health(StrEnum):
    """What one probe saw."""

    OK = "ok"
    NOT_READY = "not_ready"  # it answers, and says that it is not ready
    SILENT = "silent"  # no answer


@dataclass(frozen=True, slots=True)
class Rules:
    """Bounds of the supervisor's patience."""

    first_backoff_ms: int = 100
    max_backoff_ms: int = 10_000
    stable_ms: int = 10_000  # ready for this long forgives earlier failures
    max_start_failures: int = 3  # of one service, before the whole cluster was ready once
    crash_loop_failures: int = 5  # consecutive ones, after that
    # a ready service that answers no probe for this long is killed; a spec may say less
    silent_ms: int = 30_000
    busy_silent_ms: int = 10_000  # so is one that was told to end, and had something under way


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the process of `name`; answer with on_spawned or on_exit."""

    name: str


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to the process of `name`. SIGKILL without one: to what a Spawn may still make."""

    name: str
    signum: int


@dataclass(frozen=True, slots=True)
class Notice:
    """For the log and whoever watches. `event` is stable: starting, ready, exited, crash_loop, ..."""

    event: str
    name: str
    text: str


Action = Spawn | Signal | Notice


@dataclass(slots=True)
class Entry:
    """One service's state. Times are the shell's monotonic milliseconds."""

    spec: Spec
    state: State = State.WAITING
    pid: int = 0
    health: Health = Health.SILENT
    since_ms: int = 0  # of the state; 0 before start()
    deadline_ms: int | None = None  # start timeout, end of back-off, end of stop grace
    answered_ms: int = 0  # last probe that was not silent
    failures: int = 0  # consecutive
    restarts: int = 0
    was_ready: bool = False
    is_killed: bool = False  # for its silence, and its exit is to come: nobody starts who needs it
    restart_asked: bool = False
    last_ms: int = 0  # while STOPPING: beyond it nothing under way is waited for
    is_waited_for: bool = False  # that there is something was told
    last_exit: str = ""
    exits: deque[int] = field(default_factory=lambda: deque(maxlen=16))


def describe_exit(returncode: int) -> str:
    """'exit 1' or 'signal 9'."""
    return f"signal {-returncode}" if returncode < 0 else f"exit {returncode}"


class Supervision:
    """The whole cluster's state. Every method returns the actions that follow."""

    def __init__(self, specs: Sequence[Spec], rules: Rules | None = None) -> None:
        """Raises: ValueError as start_order and longest_stop_ms do."""
        self.rules = rules or Rules()
        self.order = start_order(specs)
        self.longest_stop_ms = longest_stop_ms(specs)
        by_name = {spec.name: spec for spec in specs}
        self.entries = {name: Entry(by_name[name]) for name in self.order}
        self.all_ready_once = False
        self.gave_up: str = ""  # the service that could not be started
        self.stopping = False
        self.at_once = False  # the stop waits for nothing that is under way
        self._attended_ms: int | None = None  # when the shell was last here

    @property
    def stopped(self) -> bool:
        """A stop was asked for and no process is left."""
        return self.stopping and all(e.state is State.STOPPED for e in self.entries.values())

    def next_wake_ms(self) -> int | None:
        """When tick() is due, LOOK_MS after the last event at the latest; None: only events matter."""
        times = [e.deadline_ms for e in self.entries.values() if e.deadline_ms is not None]
        times += [
            e.answered_ms + self._silent_ms(e)
            for e in self.entries.values()
            if e.state is State.READY and not self._is_spared(e)
        ]
        if times and self._attended_ms is not None:
            times.append(self._attended_ms + LOOK_MS)
        return min(times, default=None)

    def start(self, *, now_ms: int) -> list[Action]:
        """Spawn what depends on nothing; the others begin to wait."""
        self._attend(now_ms)
        for entry in self.entries.values():
            entry.since_ms = now_ms
        return self._spawn_waiting(now_ms)

    def on_spawned(self, name: str, pid: int) -> list[Action]:
        """The process exists."""
        entry = self.entries[name]
        entry.pid = pid
        if entry.state is State.STOPPING:  # asked to stop while it was being spawned
            return [Signal(name, SIGTERM)]
        return []

    def on_probe(self, name: str, health: Health, *, now_ms: int) -> list[Action]:
        """A probe of the process that is running now."""
        self._attend(now_ms)
        entry = self.entries[name]
        if entry.state not in (State.STARTING, State.READY):
            return []
        entry.health = health
        if health is not Health.SILENT:
            entry.answered_ms = now_ms
        if health is not Health.OK:
            return []
        if entry.state is State.READY:  # perhaps again: who needs it may have waited
            return self._spawn_waiting(now_ms)
        took_s = (now_ms - entry.since_ms) / 1000
        self._enter(entry, State.READY, now_ms)
        entry.answered_ms = now_ms
        entry.was_ready = True
        actions: list[Action] = [Notice("ready", name, f"ready after {took_s:.1f} s")]
        if not self.all_ready_once and all(e.was_ready for e in self.entries.values()):
            self.all_ready_once = True
            actions.append(Notice("all_ready", "", "every service is ready"))
        return actions + self._spawn_waiting(now_ms)

    def on_exit(self, name: str, returncode: int, *, now_ms: int) -> list[Action]:
        """The process is gone (or could not be made)."""
        self._attend(now_ms)
        entry = self.entries[name]
        entry.pid, entry.health = 0, Health.SILENT
        entry.last_exit = describe_exit(returncode)
        if entry.state is State.STOPPING or self.stopping:  # the latter: before its turn to be stopped
            if entry.restart_asked and not self.stopping:
                entry.restart_asked = False
                entry.restarts += 1
                self._enter(entry, State.WAITING, now_ms)
                return self._spawn_waiting(now_ms)
            took_s = (now_ms - entry.since_ms) / 1000
            self._enter(entry, State.STOPPED, now_ms)
            text = f"{entry.last_exit} after {took_s:.1f} s"
            return [Notice("stopped", name, text), *self._stop_free(now_ms)]
        if entry.state is State.READY and now_ms - entry.since_ms >= self.rules.stable_ms:
            entry.failures = 0
        entry.failures += 1
        entry.exits.append(now_ms)
        final = returncode == USAGE_EXIT_CODE and not entry.was_ready
        if not self.all_ready_once and (final or entry.failures >= self.rules.max_start_failures):
            return self._give_up(entry, now_ms)
        delay_ms = self.backoff_ms(entry.failures)
        self._enter(entry, State.BACKOFF, now_ms, deadline_ms=now_ms + delay_ms)
        actions: list[Action] = [
            Notice("exited", name, f"{entry.last_exit}; starts again in {delay_ms / 1000:.1f} s")
        ]
        if entry.failures == self.rules.crash_loop_failures:
            every_s = self.rules.max_backoff_ms // 1000
            text = f"{entry.failures} failures in a row; still trying, at least every {every_s} s"
            actions.append(Notice("crash_loop", name, text))
        return actions

    def backoff_ms(self, failures: int) -> int:
        """Delay after the n-th consecutive failure: doubles, capped."""
        return min(self.rules.first_backoff_ms << min(failures - 1, 20), self.rules.max_backoff_ms)

    def tick(self, *, now_ms: int) -> list[Action]:
        """Deadlines that have passed."""
        self._attend(now_ms)
        actions: list[Action] = []
        for name, entry in self.entries.items():
            due = entry.deadline_ms is not None and now_ms >= entry.deadline_ms
            if entry.state is State.BACKOFF and due:
                self._enter(entry, State.WAITING, now_ms)
                entry.restarts += 1
            elif entry.state is State.STARTING and due:
                text = f"not ready after {entry.spec.start_timeout_ms // 1000} s; killed"
                actions += [Notice("start_timeout", name, text), *self._kill(entry, now_ms)]
            elif entry.state is State.STOPPING and due:
                actions += self._kill(entry, now_ms)
            elif self._is_silent(entry, now_ms) and not self._is_spared(entry):
                entry.answered_ms, entry.is_killed = now_ms, True
                text = f"answered no probe for {self._silent_ms(entry) // 1000} s; killed"
                actions += [Notice("unresponsive", name, text), Signal(name, SIGKILL)]
        return actions + self._spawn_waiting(now_ms)

    def restart(self, name: str, *, now_ms: int) -> list[Action]:
        """An operator's wish: end it gracefully and start it again at once."""
        self._attend(now_ms)
        entry = self.entries[name]
        entry.failures = 0
        if entry.state in (State.STARTING, State.READY):
            entry.restart_asked = True
            return self._end(entry, now_ms)
        if entry.state is State.BACKOFF:
            entry.deadline_ms = now_ms
            return self.tick(now_ms=now_ms)
        return []

    def stop(self, *, now_ms: int, at_once: bool = False) -> list[Action]:
        """End everything, dependents first. Idempotent, but that a stop that waits may become one at once."""
        self._attend(now_ms)
        actions: list[Action] = []
        if not self.stopping:
            self.stopping = True
            for entry in self.entries.values():
                entry.restart_asked = False
                if entry.state in (State.WAITING, State.BACKOFF):
                    self._enter(entry, State.STOPPED, now_ms)
            actions = [Notice("stopping", "", "stopping every service"), *self._stop_free(now_ms)]
        if at_once and not self.at_once:
            self.at_once = True
            for entry in self.entries.values():
                if entry.state is State.STOPPING and entry.deadline_ms is not None:
                    entry.deadline_ms = min(entry.deadline_ms, now_ms + entry.spec.stop_grace_ms)
        return actions

    def on_in_flight(self, name: str, count: int, *, now_ms: int) -> list[Action]:
        """So many answers are under way at a service that was told to end."""
        self._attend(now_ms)
        entry = self.entries[name]
        if entry.state is not State.STOPPING or entry.deadline_ms is None or not count:
            return []
        if self.at_once:
            return [Signal(name, SIGTERM)]  # told twice, it ends them
        entry.deadline_ms = min(entry.last_ms, now_ms + self.rules.busy_silent_ms)
        if entry.is_waited_for:
            return []
        entry.is_waited_for = True
        what = "1 answer is" if count == 1 else f"{count} answers are"
        waits = f"waiting for {'it' if count == 1 else 'them'}, at most {entry.spec.drain_ms / 1000:g} s"
        how = "Ctrl-C or another `quire down` ends all that is under way at once"
        return [Notice("waiting", name, f"{what} under way: {waits}; {how}")]

    def _attend(self, now_ms: int) -> None:
        """The shell runs now. If it stood still (Ctrl-Z, a paused machine), that time was nobody's silence or delay.

        LOOK_MS of it count, so that a shell that is always late finds silent services too.
        """
        last_ms, self._attended_ms = self._attended_ms, now_ms
        if last_ms is None or now_ms - last_ms < AWAY_AFTER_MS:
            return
        late_ms = now_ms - last_ms - LOOK_MS
        for entry in self.entries.values():
            entry.answered_ms = min(now_ms, entry.answered_ms + late_ms)
            if entry.state in (State.STARTING, State.STOPPING) and entry.deadline_ms is not None:
                entry.deadline_ms += late_ms
                entry.last_ms += late_ms

    def _give_up(self, entry: Entry, now_ms: int) -> list[Action]:
        name = entry.spec.name
        self._enter(entry, State.STOPPED, now_ms)
        if self.gave_up:
            return self._stop_free(now_ms)
        self.gave_up = name
        text = f"could not be started: {entry.last_exit}, {entry.failures} attempt(s)"
        return [Notice("give_up", name, text), *self.stop(now_ms=now_ms)]

    def _spawn_waiting(self, now_ms: int) -> list[Action]:
        if self.stopping:
            return []
        actions: list[Action] = []
        for name in self.order:
            entry = self.entries[name]
            if entry.state is not State.WAITING or not self._may_start(entry):
                continue
            deadline_ms = now_ms + entry.spec.start_timeout_ms
            self._enter(entry, State.STARTING, now_ms, deadline_ms=deadline_ms)
            actions += [Notice("starting", name, "starting"), Spawn(name)]
        return actions

    def _may_start(self, entry: Entry) -> bool:
        gates: Iterable[str] = () if entry.was_ready else entry.spec.depends_on
        return all(self.entries[d].was_ready for d in gates) and all(
            live.state is State.READY and live.health is Health.OK and not live.is_killed
            for live in (self.entries[d] for d in entry.spec.needs_live)
        )

    def _is_silent(self, entry: Entry, now_ms: int) -> bool:
        return entry.state is State.READY and now_ms - entry.answered_ms >= self._silent_ms(entry)

    def _silent_ms(self, entry: Entry) -> int:
        return self.rules.silent_ms if entry.spec.silent_ms is None else entry.spec.silent_ms

    def _is_spared(self, entry: Entry) -> bool:
        """Its end would be that of others, which all serve: they need it at the next start, and no sooner."""
        now_ms = self._attended_ms or 0
        others = [e for e in self.entries.values() if entry.spec.name in e.spec.needs_live]
        return bool(others) and all(e.state is State.READY and not self._is_silent(e, now_ms) for e in others)

    def _stop_free(self, now_ms: int) -> list[Action]:
        """End each running service on which no living one depends."""
        if not self.stopping:
            return []
        held = held_by(e.spec for e in self.entries.values() if e.state is not State.STOPPED)
        actions: list[Action] = []
        for name, entry in self.entries.items():
            if entry.state in (State.STARTING, State.READY) and name not in held:
                actions += self._end(entry, now_ms)
        return actions

    def _end(self, entry: Entry, now_ms: int) -> list[Action]:
        deadline_ms = now_ms + entry.spec.stop_grace_ms
        self._enter(entry, State.STOPPING, now_ms, deadline_ms=deadline_ms)
        entry.last_ms, entry.is_waited_for = deadline_ms + entry.spec.drain_ms, False
        return [Signal(entry.spec.name, SIGTERM)] if entry.pid else []

    def _kill(self, entry: Entry, now_ms: int) -> list[Action]:
        """A deadline is over. Of what has no process no exit will be heard: it counts as gone, now."""
        entry.deadline_ms = None
        name = entry.spec.name
        signal = Signal(name, SIGKILL)
        return [signal] if entry.pid else [signal, *self.on_exit(name, -SIGKILL, now_ms=now_ms)]

    @staticmethod
    def _enter(entry: Entry, state: State, now_ms: int, *, deadline_ms: int | None = None) -> None:
        entry.state, entry.since_ms, entry.deadline_ms = state, now_ms, deadline_ms
        entry.is_killed = False
