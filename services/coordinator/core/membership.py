"""Who is a member, under which epoch. No I/O: time comes in, journal entries go out.

    LIVE -(no heartbeat for ttl_ms / 2)-> SUSPECT -(for ttl_ms)-> DEAD -(for forget_after_ms)-> gone
    SUSPECT, DEAD -(heartbeat)-> LIVE; any -(register)-> LIVE under a larger epoch; any -(remove)-> gone

Epochs only grow, across restarts too: a new one is above everything this instance is known to have had, and
at least the wall clock's microseconds. So a lost journal is harmless unless the wall clock also went back.
A member restored from the journal starts as SUSPECT with a full time to live: the coordinator's own restart
must not look like the death of everybody else. So does every member when a term begins: while another coordinator
led, members spoke there. Until it speaks here such a member is hearsay, and the journal knows better.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

import msgspec
from msgspec import Struct

from shared.ids import Epoch, InstanceId
from shared.wire.membership import (
    Heartbeat,
    HeartbeatReply,
    InstanceList,
    InstanceView,
    Register,
    Registered,
)

MAX_KNOWN_EPOCHS = 10_000  # of who left too; those of members are known however many there are


class MemberState(StrEnum):
    """What missed heartbeats make of a member."""

    LIVE = "live"
    SUSPECT = "suspect"
    DEAD = "dead"


class JournalEntry(Struct, frozen=True, kw_only=True):
    """What survives the coordinator: the newest epoch of an instance, and the member if there is one."""

    instance: InstanceId
    epoch: Epoch
    member: Register | None = None


class Unknown(Struct, frozen=True, kw_only=True):
    """No such member: register."""

    instance: InstanceId


class Stale(Struct, frozen=True, kw_only=True):
    """The epoch is not the member's: register again, or stop if somebody else has the id."""

    instance: InstanceId
    epoch: Epoch
    current: Epoch


class Full(Struct, frozen=True, kw_only=True):
    """max_members are known."""

    max_members: int


@dataclass(slots=True)
class Member:
    """One registration."""

    register: Register
    epoch: Epoch
    seen_at_ms: int
    state: MemberState = MemberState.LIVE
    is_hearsay: bool = False  # nobody has said here, in this term, that it lives
    num_running: int = 0
    num_waiting: int = 0
    kv_used_share: float = 0.0


@dataclass(slots=True)
class Membership:
    """The table. `journal` and `forgotten` collect what the shell must store and remove; it takes and empties them."""

    heartbeat_interval_ms: int = 500
    ttl_ms: int = 1_500
    forget_after_ms: int = 60_000
    max_members: int = 1_024
    version: int = 0  # grows with every change that readers must see
    journal: dict[InstanceId, JournalEntry] = field(default_factory=dict)
    forgotten: set[InstanceId] = field(default_factory=set)
    _members: dict[InstanceId, Member] = field(default_factory=dict)
    _epochs: dict[InstanceId, Epoch] = field(default_factory=dict)

    def lead(self, *, now_ms: int) -> None:
        """A term begins. Another coordinator may have led and heard the members: their silence here means nothing."""
        for member in self._members.values():
            member.seen_at_ms, member.state, member.is_hearsay = now_ms, MemberState.SUSPECT, True
        if self._members:
            self.version += 1

    def restore(self, entries: Iterable[JournalEntry], *, now_ms: int) -> int:
        """Take over what an earlier life, or another leader, wrote, unless something newer is known.

        Returns: members added or replaced.
        """
        num_added = 0
        # in their order: beyond the bound the oldest are forgotten
        for entry in sorted(entries, key=lambda entry: entry.epoch):
            known = self._members.get(entry.instance)
            is_hearsay = known is not None and known.is_hearsay
            last = self._epochs.get(entry.instance, Epoch(-1))
            has_left = entry.epoch == last and entry.member is None and is_hearsay  # under another leader
            if entry.epoch <= last and not has_left:
                continue
            self._remember(entry.instance, entry.epoch)
            if entry.member is None or (known is not None and not is_hearsay):
                # gone; or registered here under an epoch that others refuse: it must do so again
                if known is not None:
                    self._drop(entry.instance)
            elif known is not None or len(self._members) < self.max_members:
                self._members[entry.instance] = Member(
                    entry.member, entry.epoch, now_ms, MemberState.SUSPECT, is_hearsay=True
                )
                num_added += 1
        self._trim()
        if num_added:
            self.version += 1
        return num_added

    def register(self, register: Register, *, now_ms: int, now_unix_us: int) -> Registered | Full:
        """A process starts, or comes back, under an instance id."""
        if register.instance not in self._members and len(self._members) >= self.max_members:
            return Full(max_members=self.max_members)
        last = self._epochs.get(register.instance, Epoch(0))
        epoch = Epoch(max(last + 1, now_unix_us))
        self._remember(register.instance, epoch)
        self._members[register.instance] = Member(register, epoch, now_ms)
        self._note(register.instance)
        self._trim()
        return Registered(epoch=epoch, heartbeat_interval_ms=self.heartbeat_interval_ms, ttl_ms=self.ttl_ms)

    def heartbeat(
        self, instance: InstanceId, heartbeat: Heartbeat, *, now_ms: int
    ) -> HeartbeatReply | Unknown | Stale:
        """The member lives, and says how busy it is."""
        member = self._members.get(instance)
        if member is None:
            return Unknown(instance=instance)
        if member.epoch != heartbeat.epoch:
            return Stale(instance=instance, epoch=heartbeat.epoch, current=member.epoch)
        member.seen_at_ms = now_ms
        member.is_hearsay = False
        member.num_running = heartbeat.num_running
        member.num_waiting = heartbeat.num_waiting
        member.kv_used_share = heartbeat.kv_used_share
        if member.state is not MemberState.LIVE:
            member.state = MemberState.LIVE
            self.version += 1
        return HeartbeatReply(ttl_ms=self.ttl_ms)

    def remove(self, instance: InstanceId, epoch: Epoch) -> Unknown | Stale | None:
        """An orderly end; None when done."""
        member = self._members.get(instance)
        if member is None:
            return Unknown(instance=instance)
        if member.epoch != epoch:
            return Stale(instance=instance, epoch=epoch, current=member.epoch)
        self._drop(instance)
        return None

    def excuse(self, late_ms: int, *, now_ms: int) -> None:
        """The caller itself stood still for so long: what members said meanwhile is not read yet, and no silence."""
        for member in self._members.values():
            if member.state is not MemberState.DEAD:
                member.seen_at_ms = min(now_ms, member.seen_at_ms + late_ms)

    def tick(self, *, now_ms: int, forgets: bool = True) -> list[tuple[InstanceId, MemberState]]:
        """State changes since the last tick. Call at least every heartbeat interval.

        forgets: whether who was dead for long is gone. Not while another coordinator may lead, and hear it.
        """
        changes = []
        for instance, member in list(self._members.items()):
            silent_ms = now_ms - member.seen_at_ms
            state = self._state_after(silent_ms, member.state)
            if state is not member.state:
                member.state = state
                changes.append((instance, state))
            if forgets and silent_ms >= self.ttl_ms + self.forget_after_ms:
                self._drop(instance)
        if changes:
            self.version += 1
        return changes

    def gone_epoch(self, instance: InstanceId) -> Epoch | None:
        """The last one of an instance that left or was forgotten. None: it is a member, or was never known."""
        return None if instance in self._members else self._epochs.get(instance)

    def listing(self, *, now_ms: int) -> InstanceList:
        """All members, in the order of their ids."""
        views = [self._view(member, now_ms) for _, member in sorted(self._members.items())]
        return InstanceList(version=self.version, instances=views)

    def journal_all(self) -> None:
        """The store may have lost everything: write all members again."""
        for instance in self._members:
            self._journal(instance)

    def take_journal(self) -> list[JournalEntry]:
        """Entries to store, each instance at most once."""
        entries, self.journal = list(self.journal.values()), {}
        return entries

    def take_forgotten(self) -> set[InstanceId]:
        """Instances to remove from the store, none of them in what take_journal() has not brought yet."""
        forgotten, self.forgotten = self.forgotten, set()
        return forgotten

    def _state_after(self, silent_ms: int, now: MemberState) -> MemberState:
        if silent_ms >= self.ttl_ms:
            return MemberState.DEAD
        return MemberState.SUSPECT if 2 * silent_ms >= self.ttl_ms else now

    def _view(self, member: Member, now_ms: int) -> InstanceView:
        # fields that a Register and an InstanceView share have the same names
        return InstanceView(
            **msgspec.structs.asdict(member.register),
            epoch=member.epoch,
            age_ms=now_ms - member.seen_at_ms,
            state=member.state.value,
            num_running=member.num_running,
            num_waiting=member.num_waiting,
            kv_used_share=member.kv_used_share,
        )

    def _drop(self, instance: InstanceId) -> None:
        del self._members[instance]
        self._note(instance)

    def _note(self, instance: InstanceId) -> None:
        self.version += 1
        self._journal(instance)

    def _journal(self, instance: InstanceId) -> None:
        member = self._members.get(instance)
        self.journal[instance] = JournalEntry(
            instance=instance,
            epoch=self._epochs[instance],
            member=member.register if member is not None else None,
        )

    def _remember(self, instance: InstanceId, epoch: Epoch) -> None:
        self._epochs.pop(instance, None)
        self._epochs[instance] = epoch
        self.forgotten.discard(instance)

    def _trim(self) -> None:
        """Forget who left first of those beyond the bound: a new epoch of theirs relies on the wall clock alone."""
        excess = max(0, len(self._epochs) - MAX_KNOWN_EPOCHS)
        for instance in list(islice((i for i in self._epochs if i not in self._members), excess)):
            del self._epochs[instance]
            self.journal.pop(instance, None)
            self.forgotten.add(instance)
