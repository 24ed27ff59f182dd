"""The campaign's cluster: services, instances with what they hold, faults, and recovery as supervisors do it."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from tests.fault.campaign_instances import CopyInstance, Instance, PageInstance
from tests.fault.campaign_oracle import Oracle
from tests.fault.campaign_rig import Actor, Clock, Gone, Process, Refused, Service, Zygote, mempool_flags

PATIENCE_S = 30.0  # with what a death or a cut makes others do
RECOVERY_S = 60.0
SHORT_STOP_S, LONG_STOP_S = (0.005, 0.08), 1.2
KILL, STOP, CUT = "kill", "stop", "cut"
ACTIONS = (KILL, STOP, CUT)
BOTH = ("mempool+keeper", "keeper+mempool")


class World:
    """All processes. `damaged`: a fault was done to them that recover() has not repaired yet."""

    def __init__(self, folder: Path, rng: random.Random, zygote: Zygote | None = None) -> None:
        """Args: zygote: of a world that this one is a part of."""
        self.rng = rng
        self.zygote = zygote or Zygote(Clock())
        self.clock = self.zygote.clock
        self.clock.guard = self.guard
        self.keeper = Service(self.zygote, "keeper", folder, "keeper_listening", {"expected-fds": 1})
        self.mempool = Service(self.zygote, "mempool", folder, "settings", self.flags(folder))
        self.oracle = self.make_oracle()
        self.instances = self.make_instances(folder)
        self.damaged = False
        self.faulted = False  # in this episode
        self.late = False  # in this episode the machine was slower than what a story has the time for
        self.detections_s: dict[str, list[float]] = {}
        self.recoveries_s: list[float] = []
        self.counters: Counter[str] = Counter()
        self._undetected: list[tuple[str, Process, int]] = []  # what died, under which mempool's eyes
        self._is_kept = False  # the keeper has all that it needs to have
        self._cuts: list[tuple[str, Actor, int, int]] = []  # whom, under which mempool, attached how often

    def flags(self, folder: Path) -> dict[str, object]:
        """Settings of the mempool."""
        return mempool_flags(self.keeper.socket)

    def make_oracle(self) -> Oracle:
        """Of the mempool's memory."""
        return Oracle(self.mempool)

    def make_instances(self, folder: Path) -> Sequence[Instance]:
        """Not started yet."""
        socket, log = self.mempool.socket, folder / "actors.log"
        self.prefill = PageInstance(self.zygote, "prefill", socket, log)
        self.decode = PageInstance(self.zygote, "decode", socket, log)
        self.copy_prefill = CopyInstance(self.zygote, "copy-prefill", socket, log, has_front=False)
        self.copy_decode = CopyInstance(self.zygote, "copy-decode", socket, log, has_front=True)
        return [self.prefill, self.decode, self.copy_prefill, self.copy_decode]

    def note_blocks(self, hashes: Iterable[bytes], num_ranks: int) -> None:
        """Somebody will compute these, on so many ranks."""
        self.oracle.num_ranks_of.update(dict.fromkeys(hashes, num_ranks))

    def start(self) -> None:
        self.keeper.start()
        self.mempool.start()
        self.oracle.look()
        self._is_kept = True
        for instance in self.instances:
            for _ in instance.start(self.clock):
                pass
        self.oracle.look()
        self._all_known()

    def _all_known(self) -> None:
        for instance in self.instances:
            waits = bool(instance.copying)  # with attaching, perhaps, until its copy is over
            for process in instance.parts.values():
                if process is not None and not (waits and process.ask("is_lost")):
                    process.known_to = self.mempool.since

    @property
    def num_checks(self) -> int:
        """How often the table was looked at."""
        return self.oracle.num_checks

    @property
    def num_pages_read(self) -> int:
        """Pages whose bytes were compared."""
        return self.oracle.num_pages_read

    def guard(self) -> None:
        """Raises: Gone when a service is dead, so that nothing is to be waited for."""
        for service in (self.keeper, self.mempool):
            if not service.alive:
                raise Gone(f"the {service.name} is dead")

    def is_late(self, since_s: float, limit_ms: int) -> bool:
        """Whether so much time has passed that what has this limit may be over, though nobody did anything wrong."""
        if (time.monotonic() - since_s) * 1e3 > 0.8 * limit_ms:
            self.late = True
            self.counters["too late"] += 1
            return True
        return False

    # -- faults -----------------------------------------------------------------------------------

    def victims(self) -> list[str]:
        """Names of all processes, and pairs of services."""
        return ["mempool", "keeper", *BOTH, *(name for i in self.instances for name in i.parts)]

    def choices(self) -> list[tuple[str, str]]:
        """What may be done to whom."""
        return [(v, a) for v in self.victims() for a in (ACTIONS if v not in BOTH else (KILL,))]

    def hit(self, victim: str, action: str) -> None:
        """Do it now, to whatever is alive of the victim."""
        self.damaged = self.faulted = True
        self.counters[f"{action} {victim}"] += 1
        self.clock.trace.append(f"HIT {action} {victim}")
        for name in victim.split("+"):
            if action == CUT:
                self._cut(name)
            elif (process := self._process(name)) is None or not process.alive:
                continue
            elif action == STOP:
                self._stop(name, process)
            else:
                self._kill(name, process)

    def _process(self, name: str) -> Process | None:
        if name == "mempool":
            return self.mempool.process
        if name == "keeper":
            return self.keeper.process
        return next(i.parts[name] for i in self.instances if name in i.parts)

    def _stop(self, name: str, process: Process) -> None:
        is_long = self.rng.random() < 0.05
        self.clock.stop(process, LONG_STOP_S if is_long else self.rng.uniform(*SHORT_STOP_S))

    def _kill(self, name: str, process: Process) -> None:
        self.clock.stopped.pop(process.pid, None)
        if name == "mempool":
            self._undetected.clear()  # its successor finds them dead
            for instance in self.instances:
                instance.mempool_died()
        if name == "keeper":
            self._is_kept = False
        self._note_death(name, process)
        self.clock.trace.append(f"kill {name} {process.pid}")
        process.kill()

    def _note_death(self, name: str, process: Process) -> None:
        if name in ("mempool", "keeper") or process.known_to == self.mempool.since:
            self._undetected.append((name, process, self.mempool.since))

    def _cut(self, name: str) -> None:
        """A worker's link to the mempool; the mempool's to the keeper; all of the mempool's."""
        mempool = self.mempool.process
        if mempool is None or not mempool.alive:
            return
        if name == "keeper":
            self._is_kept = False
            mempool.cut(self.keeper.socket)
            return
        names = [name] if name != "mempool" else [n for i in self.instances for n in i.parts]
        for one in names:
            process = self._process(one)
            if not isinstance(process, Actor) or not process.alive:
                continue
            before = self._num_attaches(process)
            if process.cut(self.mempool.socket) and process.was_attached:
                self._cuts.append((one, process, self.mempool.since, before))
        for instance in self.instances:
            instance.link_cut(set(names) & set(instance.parts))

    def _num_attaches(self, process: Process) -> int:
        lines = self.mempool.log.read()[self.mempool.since :]
        return sum(line["event"] == "peer_attaches" and line["pid"] == process.pid for line in lines)

    def _await_cuts(self) -> None:
        """Until whoever was cut off knows: a core says so, the others attach again by themselves."""
        waiting, self._cuts = self._cuts, []
        for name, process, since, count in waiting:
            is_copying = any(i.copying and name in i.parts for i in self.instances)
            if not process.alive or not self.mempool.alive or since != self.mempool.since or is_copying:
                continue
            if name.endswith("core"):
                self.clock.until(lambda p=process: p.ask("is_lost"), f"{name} sees the cut", PATIENCE_S)
            else:
                self.clock.until(
                    lambda p=process, n=count: self._num_attaches(p) > n, f"{name} attaches again", RECOVERY_S
                )

    # -- recovery ---------------------------------------------------------------------------------

    def recover(self) -> None:
        """Until everything runs and is attached. Raises: AssertionError when that takes too long."""
        self.clock.wake_all()
        began = time.monotonic()
        while True:
            try:
                for _ in self.recovery():
                    pass
                break
            except (Gone, Refused) as error:
                self.counters["recoveries repeated"] += 1
                if time.monotonic() - began > RECOVERY_S:
                    raise AssertionError("no recovery") from error
                time.sleep(0.01)
        self.damaged = False
        self.recoveries_s.append(time.monotonic() - began)

    def recovery(self) -> Iterator[str]:
        """What supervisors and the processes themselves do after a fault; yields before each protocol step."""
        self.check_detection()
        self._await_cuts()
        services = [self.keeper, self.mempool]
        self.rng.shuffle(services)
        for service in services:
            if not service.alive:
                yield f"{service.name} starts"
                self._start(service)
        instances = list(self.instances)
        self.rng.shuffle(instances)
        for instance in instances:
            yield from self._recover(instance)
        self._see_kept()
        self._all_known()

    def end(self, instance: Instance) -> None:
        """Its supervisor ends all of it."""
        for name, process in instance.parts.items():
            if process is not None and process.alive:
                self._kill(name, process)
        instance.void()

    def _start(self, service: Service) -> None:
        if service is self.keeper:
            service.start()
            return
        was_kept = self._is_kept and self.keeper.alive and self.oracle.has_memory
        service.start()
        is_new = self.oracle.look()
        if was_kept:
            assert self.oracle.has_memory, "the mempool's crash lost its pages"
            assert not is_new, "the successor has other pages"
        if is_new:
            self.counters["memory lost with mempool and keeper"] += 1
            for instance in self.instances:
                instance.memory_lost()

    def _see_kept(self) -> None:
        """The mempool has handed everything to the keeper that runs now."""
        if self._is_kept:
            return

        def is_restored() -> bool:
            lines = self.mempool.log.read()[self.mempool.since :]
            events = [line["event"] for line in lines]
            lost = max((n for n, e in enumerate(events) if e == "keeper_lost"), default=-1)
            return "keeper_restored" in events[lost + 1 :] or lost < 0

        self.clock.until_attached(is_restored, "the keeper gets everything again")
        self._is_kept = True

    def _recover(self, instance: Instance) -> Iterator[str]:
        if instance.is_whole:
            is_attached = yield from instance.reattach(self.clock)
            if is_attached:
                return
        yield f"{instance.name}: what is left of it writes on"
        if instance.alive and self.mempool.alive:
            self.oracle.settled()  # its lost connection has been seen
            self.check_pages_of(instance)
            instance.scribble()
        self.end(instance)
        self.check_detection()
        yield from instance.start(self.clock)
        self.counters["instances restarted"] += 1

    # -- detection --------------------------------------------------------------------------------

    def check_detection(self) -> None:
        """Whoever has to notice each death so far has noticed it."""
        waiting, self._undetected = self._undetected, []
        for name, process, since in waiting:
            if name == "mempool":
                alive = [p for i in self.instances for p in i.listeners() if p.alive]
                for actor in alive:
                    self._measure(
                        name, process, lambda actor=actor: time.time() if actor.ask("is_lost") else 0.0
                    )
            elif self.mempool.alive and since == self.mempool.since:
                event = {"keeper": "keeper_lost"}.get(name, "process_dead")
                event = "peer_left" if name.endswith("front") else event
                fields = {} if name == "keeper" else {"pid": process.pid}
                self._measure(name, process, lambda e=event, f=fields: self._logged(e, f))

    def _logged(self, event: str, fields: dict) -> float:
        """Wall time of the last such line of the present mempool."""
        for line in reversed(self.mempool.log.read()[self.mempool.since :]):
            if line["event"] == event and all(line.get(k) == v for k, v in fields.items()):
                return datetime.fromisoformat(line["time"]).timestamp()
        return 0.0

    def _measure(self, name: str, process: Process, noticed_s: Callable[[], float]) -> None:
        """Args: noticed_s: since when it is, in wall time; 0: it is not."""
        at_s = 0.0

        def is_noticed() -> bool:
            nonlocal at_s
            at_s = noticed_s()
            return at_s > 0

        self.clock.until(is_noticed, f"the death of {name} is noticed", PATIENCE_S)
        self.detections_s.setdefault(name, []).append(at_s - process.killed_s)

    # -- checks -----------------------------------------------------------------------------------

    def check(self) -> None:
        """All invariants that can be seen now; a mempool that is dead or stopped leaves its table to look at."""
        mempool = self.mempool.process
        if mempool is not None and mempool.alive and mempool.pid not in self.clock.stopped:
            self.oracle.check_counts()
        self.check_memory()
        for service in (self.mempool, self.keeper):
            bug = service.log.bug()
            assert not bug, bug

    def check_memory(self) -> None:
        """What the memory itself says."""
        pinned = [own for i in self.instances for own in i.pinned()]
        held = [own for i in self.instances for own in i.held()]
        self.oracle.check_table(pinned, held, self.damaged)
        self.oracle.check_bytes()

    def check_pages_of(self, instance: Instance) -> None:
        """What it pins and holds, while something is damaged."""
        self.oracle.check_table(instance.pinned(), instance.held(), damaged=True)

    def what_is_busy(self) -> str:
        """Leased, held over, in doubt, or pinned by others than the caches of living engines; "": nothing is."""
        status = self.oracle.settled()
        if status is None:
            return "no answer"
        states = status.pages_by_state
        busy = status.num_leases + status.num_handoffs + status.num_pinned - status.num_kept
        busy += sum(states.get(name, 0) for name in ("retiring", "leased", "quarantined"))
        sealed = sum(len(instance.sealed) for instance in self.instances)
        return "" if busy == 0 and status.num_kept <= sealed else repr(status)

    def what_is_left(self) -> str:
        """Of what everybody had who is gone now; "": every page is free, or sealed and unpinned."""
        status = self.oracle.settled()
        assert status is not None
        states = {name for name, count in status.pages_by_state.items() if count}
        counts = (status.num_leases, status.num_handoffs, status.num_pinned, status.num_kept)
        return "" if states <= {"free", "sealed"} and counts == (0, 0, 0, 0) else repr(status)

    def empty(self) -> None:
        """Drop the whole index: then every page is free."""
        self.oracle.delete_unpinned()
        status = self.oracle.check_counts()
        assert status is not None
        assert status.pages_by_state["free"] == status.num_pages, status

    def drop_unpinned(self, *, always: bool = False) -> None:
        """Whatever nobody pins leaves the index, if the mempool can be asked now.

        Args: always: also while some other process is stopped.
        """
        process = self.mempool.process
        is_stopped = process is not None and process.pid in self.clock.stopped
        if self.mempool.alive and not (is_stopped if always else self.clock.stopped):
            self.oracle.delete_unpinned()

    def close(self) -> None:
        """End everything."""
        self.end_processes()
        self.zygote.close()

    def end_processes(self) -> None:
        """All but the zygote."""
        self.clock.wake_all()
        self.oracle.close()
        for instance in self.instances:
            for process in instance.parts.values():
                if process is not None:
                    process.close()
        for service in (self.mempool, self.keeper):
            if service.process is not None:
                service.process.close()
            service.log.close()
