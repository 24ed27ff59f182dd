"""Two hosts (campaign_host.py) as one world: pages that one mempool pulls from the other over TCP, links that are cut,
and peers that are killed or stand still, which the other one has to notice within two seconds.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from shared.free_ports import free_port
from tests.fault.campaign_host import Host
from tests.fault.campaign_instances import Instance
from tests.fault.campaign_rig import Clock, Process, Zygote
from tests.fault.campaign_world import BOTH, CUT, KILL, PATIENCE_S, RECOVERY_S, STOP, World

STILL_S = 2.6  # longer than the heartbeats' patience and the two seconds, or until that is noticed
FREEZE_S = 0.06
CATCH_S = 3.0
LINK = "link"
STANDS_STILL = "stop of a peer"  # in detections_s


def losses_s(observer: Host, since_s: float) -> list[float]:
    """When its mempool lost the other host's, since then; logs name milliseconds."""
    return [s for event, s in observer.link_lines() if event == "peer_lost" and s > since_s - 0.002]


class Hosts:
    """Both, as one World to the campaign."""

    is_late = World.is_late

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._rng = rng
        self.clock = Clock()
        self.zygote = Zygote(self.clock)
        addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        self.hosts = [Host(name, folder / name, rng, self.zygote, addresses) for name in "ab"]
        self.a, self.b = self.hosts
        self.faulted = self._is_late = False
        self._misses = 0  # before this episode
        self.detections_s: dict[str, list[float]] = {}
        self.recoveries_s: list[float] = []
        self.counters: Counter[str] = Counter()
        for host in self.hosts:
            host.detections_s, host.counters = self.detections_s, self.counters
        self.clock.guard = self.guard
        self.is_cut = False  # a link was, and is not known to be up again
        self.suspects = True  # a path between the hosts may have to be made anew
        self.num_made = 0  # numbers of handoffs, swaps, offers, steps
        self._unnoticed: list[tuple[str, Host, int, float]] = []  # what, by whom, in which life, since when
        self._frozen: dict[int, float] = {}  # pid -> when its pause is over

    @property
    def late(self) -> bool:
        """See World. Also when a link was lost by itself: the machine stopped a mempool for longer than one may be
        silent."""
        if not self._is_late and self._num_misses() != self._misses:
            self.late = True
            self.counters["links lost by themselves"] += 1
        return self._is_late

    @late.setter
    def late(self, late: bool) -> None:
        self._is_late = late
        self._misses = self._num_misses()

    def number(self) -> int:
        """One that nothing had before."""
        self.num_made += 1
        return self.num_made

    @property
    def rng(self) -> random.Random:
        return self._rng

    @rng.setter
    def rng(self, rng: random.Random) -> None:
        self._rng = rng
        for host in self.hosts:
            host.rng = rng

    @property
    def instances(self) -> list[Instance]:
        return [instance for host in self.hosts for instance in host.instances]

    @property
    def damaged(self) -> bool:
        return self.is_cut or any(host.damaged for host in self.hosts)

    @property
    def num_checks(self) -> int:
        return sum(host.num_checks for host in self.hosts)

    @property
    def num_pages_read(self) -> int:
        return sum(host.num_pages_read for host in self.hosts)

    def host_of(self, instance: Instance) -> Host:
        return next(host for host in self.hosts if instance in host.instances)

    def other(self, host: Host) -> Host:
        return self.b if host is self.a else self.a

    def note_blocks(self, hashes: Sequence[bytes], num_ranks: int) -> None:
        """See World."""
        for host in self.hosts:
            host.note_blocks(hashes, num_ranks)

    def start(self) -> None:
        for host in self.hosts:
            self.clock.guard = host.guard
            host.start()
        self.clock.guard = self.guard
        self._await_links()

    def guard(self) -> None:
        """See World."""
        for host in self.hosts:
            host.guard()

    # -- faults -----------------------------------------------------------------------------------

    def victims(self) -> list[str]:
        """See World."""
        return [LINK, *(f"{host.name}/{victim}" for host in self.hosts for victim in host.victims())]

    def choices(self) -> list[tuple[str, str]]:
        """As a rule what moves pages: mempools, the link between them; else keepers, engines and callers."""
        pairs = [(f"{h.name}/{v}", a) for h in self.hosts for v, a in h.choices()]
        movers = [(LINK, CUT), *(pair for pair in pairs if pair[0][2:] in ("mempool", BOTH[0]))]
        return movers if self.rng.random() < 0.6 else [pair for pair in pairs if pair not in movers]

    def hit(self, victim: str, action: str) -> None:
        """See World."""
        self.faulted = True
        if victim == LINK:
            self.counters[f"{action} {LINK}"] += 1
            self.clock.trace.append(f"HIT {action} {LINK}")
            self.is_cut = self.suspects = True
            for host in self.hosts:
                self._expect_notice("loss of the link", host)
            mempool = self.rng.choice(self.hosts).mempool.process
            if mempool is not None and mempool.alive:
                mempool.cut(None)
            return
        host = self.a if victim.startswith("a/") else self.b
        what = victim[2:]
        if "mempool" in what:
            self.suspects = True
        if action == KILL and "mempool" in what and host.mempool.alive:
            self._expect_notice("death of a peer", self.other(host))
        host.hit(what, action)
        if (what, action) == ("mempool", STOP) and self.rng.random() < 0.25:
            self._stand_still(host)

    def _stand_still(self, host: Host) -> None:
        """A stop that is longer than a peer may be silent."""
        process = host.mempool.process
        if process is None or not process.alive:
            return
        self.counters["mempools that stood still"] += 1
        self.clock.stop(process, PATIENCE_S)
        observer, at_s, until_s = self.other(host), time.time(), time.monotonic() + STILL_S
        num_expected = len(self._unnoticed)
        self._expect_notice(STANDS_STILL, observer)
        is_expected = len(self._unnoticed) > num_expected

        def is_over() -> bool:
            """An observer that stood still itself, for a moment, begins to count anew."""
            if time.monotonic() <= until_s or not (is_expected and observer.mempool.alive):
                return time.monotonic() > until_s
            return bool(losses_s(observer, at_s))

        self.clock.until(is_over, "it stood still", PATIENCE_S)
        self.clock.wake(process)

    def _expect_notice(self, what: str, observer: Host) -> None:
        process = observer.mempool.process
        is_stopped = process is None or process.pid in self.clock.stopped
        if observer.mempool.alive and not is_stopped and observer.is_linked:
            self._unnoticed.append((what, observer, observer.mempool.since, time.time()))

    def _check_notices(self) -> None:
        """Whoever had to notice the loss of its peer has noticed it."""
        waiting, self._unnoticed = self._unnoticed, []
        for what, observer, since, at_s in waiting:
            if not observer.mempool.alive or observer.mempool.since != since:
                continue
            found: list[float] = []

            def seen(observer: Host = observer, at_s: float = at_s, found: list[float] = found) -> bool:
                lost = losses_s(observer, at_s)
                found.extend(lost[:1])
                return bool(lost)

            self.clock.until(seen, f"{observer.name} notices {what}", PATIENCE_S)
            self.detections_s.setdefault(what, []).append(max(0.0, found[0] - at_s))

    # -- recovery ---------------------------------------------------------------------------------

    def recover(self) -> None:
        """See World."""
        self.clock.wake_all()
        self._frozen.clear()
        began = time.monotonic()
        hosts = list(self.hosts)
        self.rng.shuffle(hosts)
        for host in hosts:
            if host.damaged:
                self.clock.guard = host.guard
                host.recover()
        self.clock.guard = self.guard
        self._check_notices()
        self._await_links()
        self.is_cut = False
        self.recoveries_s.append(time.monotonic() - began)

    def _await_links(self) -> None:
        for host in self.hosts:
            self.clock.until(lambda h=host: h.is_linked, f"{host.name} reaches the other host", RECOVERY_S)

    def check_detection(self) -> None:
        """See World."""
        for host in self.hosts:
            host.check_detection()
        self._check_notices()

    def end(self, instance: Instance) -> None:
        """See World."""
        self.host_of(instance).end(instance)

    # -- moments ----------------------------------------------------------------------------------

    def catch(self, condition: Callable[[], bool], is_over: Callable[[], bool]) -> bool:
        """Stop both mempools in the moment in which something is so. False: it was missed, or is over.

        What happens between two mempools takes less than a millisecond: the memory is looked at without a pause.
        """
        until_s = time.monotonic() + CATCH_S
        looks = 0
        while not condition():
            looks += 1
            if looks % 64 == 0:
                self.clock.tick()
                if is_over() or time.monotonic() > until_s:
                    return False
        self.freeze()
        if condition():
            return True
        self.thaw()
        return False

    def freeze(self, *hosts: Host, for_s: float = FREEZE_S) -> None:
        """No mempool of these, or of both, goes on until thaw()."""
        processes: list[Process] = []
        for host in hosts or self.hosts:
            process = host.mempool.process
            if process is not None and process.alive and process.pid not in self.clock.stopped:
                self.clock.stop(process, for_s)
                self._frozen[process.pid] = self.clock.stopped[process.pid][0]
                processes.append(process)
        for process in processes:
            while not process.is_stopped():
                time.sleep(0.0005)

    def thaw(self) -> None:
        """They go on, but for those that a fault stopped meanwhile."""
        for pid, due_s in self._frozen.items():
            found = self.clock.stopped.get(pid)
            if found is not None and found[0] == due_s:
                self.clock.stopped[pid] = (0.0, found[1])
        self._frozen.clear()
        self.clock.tick()

    # -- checks -----------------------------------------------------------------------------------

    def check(self) -> None:
        """See World."""
        for host in self.hosts:
            host.check()

    def what_is_busy(self) -> str:
        """See World."""
        return next((said for host in self.hosts if (said := host.what_is_busy())), "")

    def what_is_left(self) -> str:
        """See World."""
        return next((said for host in self.hosts if (said := host.what_is_left())), "")

    def empty(self) -> None:
        """See World."""
        for host in self.hosts:
            host.empty()

    def _num_misses(self) -> int:
        return sum(host.num_misses() for host in self.hosts)

    def drop_unpinned(self) -> None:
        """See World."""
        for host in self.hosts:
            host.drop_unpinned()

    def close(self) -> None:
        """See World."""
        self.clock.wake_all()
        for host in self.hosts:
            host.end_processes()
        self.zygote.close()
