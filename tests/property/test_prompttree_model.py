"""Owners, a Redis that is lost, wiped, stalled or full, and time: what the tree says, and what was true.

- After a quiet time the tree says of every living owner exactly what it holds, and nothing of the dead.
- At every moment a block that the tree gives to an owner was held by it within the last TTL (and a call's deadline).
- What the tree says of an owner was published under the largest epoch that ever claimed its name in this Redis.
The server is a model of scripts.py (test_prompttree_redis.py runs the Lua); the owners run the real HeldBlocks in turns
of the publisher. A call may run although its answer is lost, and one that timed out may run late.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shared.prompttree.held_blocks import HeldBlocks
from shared.prompttree.scripts import SHORT_HASH_BYTES
from tests.support.examples import examples

TTL_MS = 1_000
BEAT_MS = 100
LATE_MS = 50  # a call that timed out may run as late as that
NAMES = ("prefill-0", "decode-0")
INCIDENTS = (
    "cleared", "dies", "restarts", "is replaced and does not know", "wiped", "set evicted", "blocks lost",
    "stops or goes on",
)  # fmt: skip
blocks = st.lists(st.integers(0, 12), max_size=6)
faults = st.lists(st.sampled_from(["", "", "", "", "before", "after", "late"]), min_size=1, max_size=4)


def block(i):
    return i.to_bytes(4, "big") * 8


def short_of(i):
    return block(i)[:SHORT_HASH_BYTES]


def shorts(blob):
    return {blob[i : i + SHORT_HASH_BYTES] for i in range(0, len(blob), SHORT_HASH_BYTES)}


@dataclass
class Row:
    tag: int
    epoch: int


@dataclass
class Server:
    """Rows and sets as the scripts keep them."""

    now_ms: int = 0
    rows: dict = field(default_factory=dict)
    fences: dict = field(default_factory=dict)  # of rows that are gone
    sets: dict = field(default_factory=dict)  # (name, tag) -> (members, expires_ms)

    def members(self, name, tag):
        found = self.sets.get((name, tag))
        return found[0] if found is not None and found[1] > self.now_ms else None

    def said(self, name):
        row = self.rows.get(name)
        return (self.members(name, row.tag) or set()) if row is not None else set()

    def check(self, name, epoch, tag):
        row = self.rows.get(name)
        if row is None:
            return "lost"
        if row.epoch > epoch:
            return "stale"
        return "ok" if row.tag == tag and self.members(name, tag) is not None else "lost"

    def claim(self, name, epoch, tag):
        row = self.rows.get(name)
        if self.fences.get(name, 0) > epoch or (row is not None and row.epoch > epoch):
            return "stale"
        if row is not None:
            self.sets.pop((name, row.tag), None)
        self.rows[name] = Row(tag, epoch)
        self.sets[name, tag] = (set(), self.now_ms + TTL_MS)
        return "ok"

    def write(self, name, epoch, tag, stored, removed):
        verdict = self.check(name, epoch, tag)
        if verdict == "ok":
            members, expires_ms = self.sets[name, tag]
            self.sets[name, tag] = ((members | stored) - removed, expires_ms)
        return verdict

    def beat(self, name, epoch, tag):
        verdict = self.check(name, epoch, tag)
        if verdict != "ok":
            return verdict
        members, _ = self.sets[name, tag]
        self.sets[name, tag] = (members, self.now_ms + TTL_MS)
        for other in [n for n, row in self.rows.items() if self.members(n, row.tag) is None]:
            self.fences[other] = max(self.fences.get(other, 0), self.rows.pop(other).epoch)
        return len(members)


@dataclass
class Owner:
    """A process: the publisher's turns around the real HeldBlocks."""

    name: str
    epoch: int
    held: HeldBlocks = field(default_factory=lambda: HeldBlocks(max_pending=8))
    holds: set = field(default_factory=set)  # in truth
    tag: int = 0
    stale: bool = False
    beat_at_ms: int = 0

    def end_publication(self, verdict):
        self.held.lost()
        self.stale = verdict == "stale"


class Tree(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.server = Server()
        self.owners = {}  # name -> the living process
        self.zombies = []  # older processes that do not know yet that they are
        self.truth = {name: {} for name in NAMES}  # block -> when it was last held, ms
        self.epochs = 0
        self.tags = 0
        self.claimed_epoch = {}  # largest that ever claimed
        self.late = []  # calls that timed out and may still run
        self.is_up = True

    # -- calls ------------------------------------------------------------------------------------

    def call(self, fault, method, owner, *args):
        """The answer, or None: no answer in time. The call may have run, or run later."""
        if not self.is_up or fault == "before":
            return None
        if fault == "late":
            self.late.append((self.server.now_ms + LATE_MS, method, owner.name, owner.epoch, args))
            return None
        verdict = self.perform(method, owner.name, owner.epoch, args)
        return None if fault == "after" else verdict

    def perform(self, method, name, epoch, args):
        verdict = getattr(self.server, method)(name, epoch, *args)
        if method == "claim" and verdict == "ok":
            assert epoch >= self.claimed_epoch.get(name, 0)
            self.claimed_epoch[name] = epoch
        return verdict

    def turn(self, owner, fault=""):
        """One turn of the publisher: claim, or one batch, or a beat that is due."""
        if owner.stale:
            return
        if not owner.held.claimed:
            self.tags += 1
            owner.tag = self.tags
            verdict = self.call(fault, "claim", owner, owner.tag)
            if verdict == "ok":
                owner.held.on_claimed()
            else:
                owner.end_publication(verdict)
            return
        batch = owner.held.next_batch()
        if batch is not None:
            stored, removed = shorts(batch.stored), shorts(batch.removed)
            verdict = self.call(fault, "write", owner, owner.tag, stored, removed)
            if verdict != "ok":
                owner.end_publication(verdict)
        elif self.server.now_ms >= owner.beat_at_ms:
            owner.beat_at_ms = self.server.now_ms + BEAT_MS
            verdict = self.call(fault, "beat", owner, owner.tag)
            if not isinstance(verdict, int):
                owner.end_publication(verdict)
            elif not owner.held.agrees(verdict):
                owner.held.lost()

    def everyone(self):
        return [*self.owners.values(), *self.zombies]

    # -- what happens -----------------------------------------------------------------------------

    @initialize()
    def everybody_starts(self):
        for name in NAMES:
            self.start(name)

    def start(self, name):
        self.epochs += 1
        self.owners[name] = Owner(name, self.epochs)

    @rule(name=st.sampled_from(NAMES), some=blocks, gone=blocks, faults=faults)
    def caches_and_evicts(self, name, some, gone, faults):
        owner = self.owners.get(name)
        if owner is None:
            return
        owner.held.stored([block(i) for i in some])
        owner.holds |= {short_of(i) for i in some}
        self.note_truth()
        for fault in faults:
            self.turn(owner, fault)
        owner.held.removed([block(i) for i in gone])
        owner.holds -= {short_of(i) for i in gone}

    @rule(name=st.sampled_from(NAMES), faults=faults)
    def publishes(self, name, faults):
        for owner in self.everyone():
            if owner.name == name:
                for fault in faults:
                    self.turn(owner, fault)

    @rule(name=st.sampled_from(NAMES), incident=st.sampled_from(INCIDENTS), count=st.integers(1, 3))
    def something_breaks(self, name, incident, count):
        row, owner = self.server.rows.get(name), self.owners.get(name)
        if incident == "cleared" and owner is not None:
            owner.held.cleared()
            owner.holds.clear()
        elif incident == "dies":
            self.owners.pop(name, None)
        elif incident in ("restarts", "is replaced and does not know"):
            if owner is not None and incident != "restarts":
                self.zombies.append(owner)
            self.start(name)
        elif incident == "wiped":
            self.server.rows.clear()
            self.server.fences.clear()
            self.server.sets.clear()
            self.claimed_epoch.clear()
        elif incident == "set evicted" and row is not None:
            self.server.sets.pop((name, row.tag), None)
        elif incident == "blocks lost" and row is not None:  # a server that came back with an older file
            for _ in range(min(count, len(self.server.said(name)))):
                self.server.sets[name, row.tag][0].pop()
        elif incident == "stops or goes on":
            self.is_up = not self.is_up

    @rule(ms=st.integers(1, TTL_MS // 2))
    def time_passes(self, ms):
        """In steps, so that beats of owners that live are on time; a stopped Redis expires sets all the same."""
        end = self.server.now_ms + ms
        while self.server.now_ms < end:
            self.server.now_ms = min(end, self.server.now_ms + BEAT_MS // 2)
            self.run_late()
            self.note_truth()
            for owner in self.everyone():
                self.turn(owner)

    def run_late(self):
        due = [entry for entry in self.late if entry[0] <= self.server.now_ms]
        self.late = [entry for entry in self.late if entry[0] > self.server.now_ms]
        if self.is_up:
            for _, method, name, epoch, args in due:
                self.perform(method, name, epoch, args)

    # -- what must hold ---------------------------------------------------------------------------

    def note_truth(self):
        for owner in self.everyone():
            for short in owner.holds:
                self.truth[owner.name][short] = self.server.now_ms

    @invariant()
    def what_is_said_was_true_within_the_ttl(self):
        self.note_truth()
        for name in NAMES:
            for short in self.server.said(name):
                held_at_ms = self.truth[name].get(short)
                assert held_at_ms is not None, f"{name} never held it"
                assert self.server.now_ms - held_at_ms <= TTL_MS + LATE_MS + BEAT_MS

    @invariant()
    def the_largest_epoch_that_claimed_speaks(self):
        for name, row in self.server.rows.items():
            assert row.epoch >= self.claimed_epoch.get(name, 0)

    def teardown(self):
        """Quiet: Redis is up, nothing changes any more; the tree tells what is so."""
        self.is_up = True
        self.zombies.clear()
        for _ in range(2 * (TTL_MS + LATE_MS) // BEAT_MS):
            self.time_passes(BEAT_MS)
        for name in NAMES:
            owner = self.owners.get(name)
            wanted = owner.holds if owner is not None else set()
            assert self.server.said(name) == wanted


Tree.TestCase.settings = settings(max_examples=examples(250), stateful_step_count=40, deadline=None)
TestTree = Tree.TestCase
