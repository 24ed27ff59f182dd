"""Which instances there are: Hello, Report and Goodbye in; liveness and fencing out.

    unknown -(Hello)-> live -(no report for dead_after_ms)-> dead -(Report)-> live
    live, dead -(Goodbye, or dead for forget_after_ms)-> unknown; unknown -(Report)-> Resync, then Hello
    no two that are heard have one model's name and other files: the newcomer is refused (admission.py)
    after a Goodbye it is a source of fetches still, until the next Hello (departed.py)
    live -(OLD_REPORTS reports in a row whose numbers are not new)-> Resync, then Hello: numbers begin anew

Silence counts only while this process could have heard: see attend().

An instance's epoch only grows. A smaller one is refused for good, also after the instance was forgotten. The
coordinator's list may name a larger epoch before its owner says Hello here: then the older process is not
placed any more, but not refused either, because it may be the owner itself that registered again.

Where there is a coordinator its list decides: anybody can say Hello under any name. An epoch above that of a member
that beats there is dropped after some answers, see follow(), and believed again only when the list names it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.scheduler.core.admission import makes_way, other_model, stale, unconfirmed
from services.scheduler.core.departed import Departed
from services.scheduler.core.fading import Fading
from services.scheduler.core.lent_costs import LentCosts, model_of
from services.scheduler.core.limits import FORGET_MS
from services.scheduler.core.load import InstanceLoad, LoadView
from shared.costmodel.model import CostModel
from shared.costmodel.transfer import LinkRates
from shared.errors import Overloaded
from shared.ids import Epoch, InstanceId
from shared.kv.layout import EngineDescription
from shared.wire.membership import InstanceList
from shared.wire.placement import Target
from shared.wire.reports import Goodbye, Hello, PoolPlace, Refused, Report, Resync, Role, Welcome

MAX_REMEMBERED_EPOCHS = 10_000
AWAY_AFTER_MS = 300  # between two attend(): three of the shell's ticks
CONTRADICTED_POLLS = 3  # the first answer may have been on its way when the owner registered
OLD_REPORTS = 3  # in a row: the number before them was not the worker's, or it counts anew
AWAY_COUNTS_MS = 100  # of a longer time, as one tick: who stands still at every turn has to see the dead, too


@dataclass(frozen=True, slots=True)
class InstanceLimits:
    """Times of liveness; what a Welcome asks for."""

    dead_after_ms: int = 1_500
    forget_after_ms: int = 60_000
    report_interval_ms: int = 250
    max_instances: int = 1_024


@dataclass(frozen=True, slots=True)
class Dropped:
    """An epoch that the coordinator's list contradicts; `now`: the one that counts instead."""

    instance: InstanceId
    epoch: Epoch
    now: Epoch


PoolKey = tuple[str, int, str]  # a mempool, for those whose KV is alike: family, boot generation, address
SpaceKey = tuple[str, int, str, int]  # a space of it


@dataclass(slots=True)
class Instance:
    """One instance under one epoch."""

    instance: InstanceId
    epoch: Epoch
    role: Role
    endpoint: str
    description: EngineDescription
    family_key: str  # description.family_key, hashed once
    load: InstanceLoad
    seen_at_ms: int
    last_seq: int = -1
    num_old: int = 0  # reports in a row that were not newer than last_seq
    chosen_at: int = 0  # sequence number of its last placement: breaks ties
    draining: bool = False
    dead: bool = False  # said once by tick()
    # of its coefficients, or of its family's, else its model's, first that sent some
    model: CostModel | None = None
    prefill_correction: float = 1.0
    decode_correction: float = 1.0
    prefill_said: Fading = field(default_factory=Fading)
    decode_said: Fading = field(default_factory=Fading)
    pool: PoolPlace | None = None  # by move_to()
    links: LinkRates = field(default_factory=LinkRates)
    probed_at_ms: int | None = None  # when it last fetched only to measure (probes.py)
    sends_ahead: bool = False  # see Hello
    target: Target = field(init=False)  # as the gateway needs it
    pool_key: PoolKey | None = field(init=False)  # None: it uses no mempool
    space_key: SpaceKey | None = field(init=False)  # None: no memory of a mempool is its own
    crosses_hosts: bool = field(init=False)  # its blocks can go to other hosts, and theirs come to it

    def __post_init__(self) -> None:
        self.target = Target(instance=self.instance, epoch=self.epoch, role=self.role, endpoint=self.endpoint)
        self.move_to(self.pool)

    def move_to(self, pool: PoolPlace | None) -> None:
        """Which mempool, and which memory of it, the instance uses."""
        self.pool = pool
        self.pool_key = self.space_key = None
        self.crosses_hosts = pool is not None and pool.address != "" and pool.crosses_hosts
        if pool is not None:
            self.pool_key = (self.family_key, pool.boot_generation, pool.address)
            if pool.memory_id:
                self.space_key = (*self.pool_key, pool.memory_id)

    def view(self, *, now_ms: int) -> LoadView:
        """Load now."""
        return self.load.view(now_ms=now_ms)


@dataclass(slots=True)
class Instances:
    """The table. Bounded: max_instances, MAX_REMEMBERED_EPOCHS.

    Who is live is asked for every request and seldom changes, so the answer is kept until it may.
    """

    limits: InstanceLimits = field(default_factory=InstanceLimits)
    num_report_gaps: int = 0
    _known: dict[InstanceId, Instance] = field(default_factory=dict)
    _epochs: dict[InstanceId, Epoch] = field(default_factory=dict)  # largest that said Hello
    _fences: dict[InstanceId, Epoch] = field(default_factory=dict)  # largest that the coordinator named
    # by whom: an epoch that is larger than the coordinator's, and how many of its answers in a row said so
    _contradicted: dict[InstanceId, tuple[Epoch, int]] = field(default_factory=dict)
    _denied: dict[InstanceId, Epoch] = field(
        default_factory=dict
    )  # dropped: from here on the list comes first
    _departed: Departed[Instance] = field(default_factory=Departed)
    _lent_costs: LentCosts = field(default_factory=LentCosts)
    # by model, "": all; empty: to be found anew
    _live: dict[str, list[Instance]] = field(default_factory=dict)
    _live_until_ms: int = 0
    _listeners: list[set[InstanceId]] = field(default_factory=list)
    _attended_ms: int | None = None
    _begun_ms: int | None = None  # when the first said Hello
    _forget_ms: int = FORGET_MS

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._known.values())

    def get(self, instance: InstanceId) -> Instance | None:
        """The known instance of that name, dead or alive."""
        return self._known.get(instance)

    def listen(self, changed: set[InstanceId]) -> None:
        """From now on names are added to it whose load, place or turn changes, until the answer of live() does."""
        self._listeners.append(changed)

    def touch(self, known: Instance) -> None:
        """Its load or its turn has changed."""
        for changed in self._listeners:
            changed.add(known.instance)

    def keep_for(self, forget_ms: int) -> None:
        """Stages whose end is not told are dropped so late, or later."""
        self._forget_ms = max(self._forget_ms, forget_ms)
        for known in self._known.values():
            known.load.forget_ms = self._forget_ms

    def hello(self, hello: Hello, *, now_ms: int) -> Welcome | Refused:
        """A worker introduces itself. The same epoch again keeps the load; a larger one starts anew."""
        newest = self._epochs.get(hello.instance, Epoch(-1))
        if hello.epoch < newest:
            return stale(hello.instance, hello.epoch, newest)
        if self._is_unconfirmed(hello.instance, hello.epoch):
            return unconfirmed(hello.instance, hello.epoch)
        self._begun_ms = now_ms if self._begun_ms is None else self._begun_ms
        beside = self._heard_beside(hello.instance, now_ms)
        if (refused := other_model(hello.description, beside)) is not None:
            younger = makes_way(hello.description, hello.epoch, beside, now_ms - self._begun_ms)
            if not younger:
                return refused
            for name in younger:
                del self._known[name]
        known = self._known.get(hello.instance)
        if known is None and len(self._known) >= self.limits.max_instances:
            return Refused(code=Overloaded.code, reason=f"{len(self._known)} instances are the most")
        if known is not None and known.epoch == hello.epoch:
            load = known.load
            load.resize(max(1, hello.max_running), max(1, hello.max_batched_tokens))
        else:
            known = None
            load = InstanceLoad(
                max(1, hello.max_running),
                max(1, hello.max_batched_tokens),
                forget_ms=self._forget_ms,
                only_decodes=hello.role == "decode",
                only_whole=hello.role == "colocated",
            )
        self._departed.pop(hello.instance, None)
        family_key = hello.description.family_key
        if hello.cost is not None:
            self._lent_costs.note(hello.description, hello.cost)
        self._known[hello.instance] = Instance(
            instance=hello.instance,
            epoch=hello.epoch,
            role=hello.role,
            endpoint=hello.endpoint,
            description=hello.description,
            family_key=family_key,
            load=load,
            seen_at_ms=now_ms,
            pool=known.pool if known is not None else None,
            sends_ahead=hello.sends_ahead,
        )
        self._forget_live()
        self._give_models(hello)
        _put_last(self._epochs, hello.instance, hello.epoch)
        return Welcome(report_interval_ms=self.limits.report_interval_ms)

    def _give_models(self, hello: Hello) -> None:
        """The new one its own; to those that sent no coefficients, others'.

        One without any would have all of its model placed without predictions.
        """
        if hello.cost is not None:
            known = self._known[hello.instance]
            known.model = model_of(hello.cost)
            known.load.lend(None)
        for other in self._known.values():
            if other.model is None and (model := self._lent_costs.model_for(other.description)) is not None:
                other.model = model
                other.load.lend(model)

    def report(self, report: Report, *, now_ms: int) -> Resync | Refused | None:
        """A worker's heartbeat. Resync when it must say Hello first."""
        newest = self._epochs.get(report.instance, Epoch(-1))
        if report.epoch < newest:
            return stale(report.instance, report.epoch, newest)
        known = self._known.get(report.instance)
        if known is None or known.epoch != report.epoch:
            return Resync()
        if now_ms - known.seen_at_ms >= self.limits.dead_after_ms:
            self._forget_live()  # it is back
            if other_model(known.description, self._heard_beside(known.instance, now_ms)) is not None:
                del self._known[known.instance]  # its Hello is answered with the reason
                return Resync()
        known.seen_at_ms = now_ms
        known.dead = False
        if report.seq <= known.last_seq:
            known.num_old += 1  # an echo of the past: proof of life, but no news
            return Resync() if known.num_old >= OLD_REPORTS else None
        if known.last_seq >= 0 and report.seq != known.last_seq + 1:
            self.num_report_gaps += 1  # each report is whole, so a gap needs no repair
        known.last_seq, known.num_old = report.seq, 0
        if known.draining != report.draining:
            known.draining = report.draining
            self._forget_live()
        known.prefill_correction = known.prefill_said.now(
            report.prefill_correction, report.num_prefills_measured, now_ms
        )
        known.decode_correction = known.decode_said.now(
            report.decode_correction, report.num_decodes_measured, now_ms
        )
        if known.pool != report.pool:
            known.move_to(report.pool)
        known.links = LinkRates(report.links)  # it falls back to careful rates, path by path
        known.load.on_report(report, now_ms=now_ms)
        self.touch(known)
        return Resync() if self._is_fenced(known) else None

    def attend(self, *, now_ms: int) -> None:
        """This process runs now; before each message and each tick. Cost: O(1) unless it has stood still.

        Reports that came while it stood (a paused machine, one with too much to do) may still lie unread behind the
        message it reads now, so that time is nobody's silence, but for AWAY_COUNTS_MS of it.
        """
        last_ms, self._attended_ms = self._attended_ms, now_ms
        if last_ms is None or now_ms - last_ms < AWAY_AFTER_MS:
            return
        for known in self._known.values():
            if last_ms - known.seen_at_ms < self.limits.dead_after_ms:
                known.seen_at_ms += now_ms - last_ms - AWAY_COUNTS_MS
        self._live_until_ms = 0

    def goodbye(self, goodbye: Goodbye) -> bool:
        """An orderly end. False when the epoch is not the known one: then nothing changes."""
        known = self._known.get(goodbye.instance)
        if known is None or known.epoch != goodbye.epoch:
            return False
        del self._known[goodbye.instance]
        self._departed.add(known)
        self._forget_live()
        return True

    def fence(self, instance: InstanceId, epoch: Epoch) -> None:
        """The coordinator granted this epoch: processes with smaller ones are not placed any more."""
        if epoch > self._fences.get(instance, Epoch(-1)):
            _put_last(self._fences, instance, epoch)
            self._forget_live()

    def follow(self, members: InstanceList) -> list[Dropped]:
        """One answer of the coordinator, each of them once. Returns: epochs that are no more believed.

        Only who beats there contradicts: a new leader may know a replaced process from its journal.
        """
        dropped: list[Dropped] = []
        contradicted: dict[InstanceId, tuple[Epoch, int]] = {}
        for member in members.instances:
            name, epoch = member.instance, member.epoch
            self.fence(name, epoch)
            newest = max(self._epochs.get(name, epoch), self._fences.get(name, epoch))
            if newest <= epoch:
                continue
            said, count = self._contradicted.get(name, (newest, 0))
            # one that is late with a beat neither adds nor begins anew
            count = (count if said == newest else 0) + (member.state == "live")
            if count < CONTRADICTED_POLLS:
                contradicted[name] = newest, count
                continue
            self._drop(name, newest, epoch)
            dropped.append(Dropped(name, newest, epoch))
        self._contradicted = contradicted
        return dropped

    def _drop(self, name: InstanceId, epoch: Epoch, now: Epoch) -> None:
        """What said Hello under `epoch` is nobody; processes below `now` stay refused."""
        _put_last(self._epochs, name, now)
        _put_last(self._fences, name, now)
        _put_last(self._denied, name, epoch)
        self._departed.pop(name, None)
        known = self._known.get(name)
        if known is not None and known.epoch > now:
            del self._known[name]
        self._forget_live()

    def _is_unconfirmed(self, name: InstanceId, epoch: Epoch) -> bool:
        denied = self._denied.get(name)
        return denied is not None and epoch >= denied and epoch > self._fences.get(name, Epoch(-1))

    def tick(self, *, now_ms: int) -> list[Instance]:
        """Instances found dead now, each once per death. Long dead ones are forgotten."""
        died = []
        for known in list(self._known.values()):
            silent_ms = now_ms - known.seen_at_ms
            if silent_ms >= self.limits.dead_after_ms and not known.dead:
                known.dead = True
                died.append(known)
            if silent_ms >= self.limits.forget_after_ms:
                del self._known[known.instance]
                self._forget_live()
        return died

    def is_live(self, known: Instance, *, now_ms: int) -> bool:
        """Reported in time, newest epoch, not draining."""
        return self._is_heard(known, now_ms) and not known.draining

    def source(self, name: InstanceId, *, now_ms: int) -> Instance | None:
        """The instance of that name, if what it holds can be fetched: it lives, drains, or said Goodbye."""
        known = self._known.get(name)
        if known is None:
            return self._departed.find(name, now_ms=now_ms)
        return known if self._is_heard(known, now_ms) else None

    def _is_heard(self, known: Instance, now_ms: int) -> bool:
        silent_ms = now_ms - known.seen_at_ms
        return silent_ms < self.limits.dead_after_ms and not self._is_fenced(known)

    def _heard_beside(self, name: InstanceId, now_ms: int) -> list[Instance]:
        return [k for k in self._known.values() if k.instance != name and self._is_heard(k, now_ms)]

    def live(self, model: str = "", *, now_ms: int) -> Sequence[Instance]:
        """Instances on which something may be placed. Args: model: only those that serve it; "": any.

        The same object as the last time as long as they are the same and nobody said Hello.
        """
        if now_ms >= self._live_until_ms or not self._live:
            found = [known for known in self._known.values() if self.is_live(known, now_ms=now_ms)]
            before = self._live.get("", [])
            if len(found) != len(before) or any(a is not b for a, b in zip(found, before, strict=True)):
                self._forget_live()
                self._live[""] = found
                for known in found:
                    if known.description.model:
                        self._live.setdefault(known.description.model, []).append(known)
            silent_since_ms = min((known.seen_at_ms for known in found), default=now_ms)
            self._live_until_ms = silent_since_ms + self.limits.dead_after_ms
        return self._live.get(model, ())

    def _forget_live(self) -> None:
        self._live.clear()
        self._listeners.clear()

    def _is_fenced(self, known: Instance) -> bool:
        return known.epoch < self._fences.get(known.instance, Epoch(-1))


def _put_last(remembered: dict[Any, Any], key: str, value: object) -> None:
    remembered.pop(key, None)
    remembered[key] = value
    if len(remembered) > MAX_REMEMBERED_EPOCHS:
        del remembered[next(iter(remembered))]
