"""What the coordinator's journal of members must keep, and what it may lose: as core/membership.py decides it."""

from services.coordinator.core import membership as module
from services.coordinator.core.membership import JournalEntry, Membership
from shared.wire.membership import Registered
from tests.support.control_plane import register

BOUND = 4


class Stored:
    """A membership, and the store that its shell fills."""

    def __init__(self, **more):
        self.membership, self.fields = Membership(**more), {}

    def flush(self):
        entries, forgotten = self.membership.take_journal(), self.membership.take_forgotten()
        assert not forgotten & {entry.instance for entry in entries}, "both to be written and to be removed"
        self.fields.update((entry.instance, entry) for entry in entries)
        for instance in forgotten:
            self.fields.pop(instance, None)

    def join(self, name, now_unix_us=1):
        reply = self.membership.register(register(name), now_ms=0, now_unix_us=now_unix_us)
        assert isinstance(reply, Registered)
        self.flush()
        return reply.epoch

    def leave(self, name, epoch):
        assert self.membership.remove(name, epoch) is None
        self.flush()


def test_the_store_has_as_many_instances_as_are_known_and_loses_who_left_first(monkeypatch):
    monkeypatch.setattr(module, "MAX_KNOWN_EPOCHS", BOUND)
    stored = Stored()
    stored.join("stays", 10)
    for number in range(20):
        stored.leave(f"w{number}", stored.join(f"w{number}", 100 + number))
        assert len(stored.fields) <= BOUND
    assert sorted(stored.fields) == ["stays", "w17", "w18", "w19"]


def test_members_are_stored_however_many_there_are(monkeypatch):
    monkeypatch.setattr(module, "MAX_KNOWN_EPOCHS", BOUND)
    stored = Stored()
    for number in range(3 * BOUND):
        stored.join(f"w{number}", 100 + number)
    assert len(stored.fields) == 3 * BOUND
    again = Membership()
    assert again.restore(stored.fields.values(), now_ms=0) == 3 * BOUND


def test_who_was_forgotten_and_comes_back_is_stored_again(monkeypatch):
    monkeypatch.setattr(module, "MAX_KNOWN_EPOCHS", 1)
    stored = Stored()
    stored.membership.register(register("a"), now_ms=0, now_unix_us=1)
    stored.membership.register(register("b"), now_ms=0, now_unix_us=2)
    stored.membership.remove("a", 1)
    stored.membership.register(register("c"), now_ms=0, now_unix_us=3)  # "a" is forgotten in the same flush
    stored.membership.register(register("a"), now_ms=0, now_unix_us=4)
    stored.flush()
    assert stored.fields["a"].member is not None
    assert stored.fields["a"].epoch == 4


def test_a_store_beyond_the_bound_is_cut_as_it_is_read_and_keeps_its_members(monkeypatch):
    monkeypatch.setattr(module, "MAX_KNOWN_EPOCHS", BOUND)
    stored = Stored()
    entries = [JournalEntry(instance=f"w{n}", epoch=100 + n) for n in range(20)]
    entries.insert(3, JournalEntry(instance="stays", epoch=1, member=register("stays")))
    stored.fields = {entry.instance: entry for entry in reversed(entries)}
    assert stored.membership.restore(list(stored.fields.values()), now_ms=0) == 1
    stored.flush()
    assert sorted(stored.fields) == ["stays", "w17", "w18", "w19"]
