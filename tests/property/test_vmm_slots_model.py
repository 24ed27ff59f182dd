"""Request slots under any order of requests, prefix hits, late execution and late fences: a machine that executes the
commands with delay, as the background mapper does, and never finds a page where it must not be."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.vmm.slot_commands import Map
from shared.vmm.slots import HOLE, SlotTable
from tests.support.examples import examples

SLOTS, SLOT_PAGES, PAGE_TOKENS, PAGES = 2, 4, 2, 8
FOREIGN = (100, 101, 102)


class SlotMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.table = SlotTable(SLOTS, SLOT_PAGES, PAGE_TOKENS, ahead_tokens=1, eager_pages=1)
        self.table.grant(range(PAGES))
        self.queue = []  # (batch, commands), not executed
        self.window = {}  # place: (page, writable), as executed
        self.executed = 0
        self.lens = {}  # active slot: tokens
        self.sealed_of = {}  # active slot: pages sealed or aliased
        self.fence = self.passed = 0
        self.in_use = {}  # active slot: places that its steps touch
        self.touched_until = {}  # place: the fence behind its last use
        self.index = []  # pinned pages, as a prefix index would hold them: lists in order of a prefix
        self.foreign_pins = dict.fromkeys(FOREIGN, 0)

    # ---- what the requests do

    @rule(data=st.data(), foreign=st.booleans())
    def begin(self, data, foreign):
        prefix = []
        if foreign:
            prefix = list(FOREIGN[: data.draw(st.integers(0, 3))])
        elif self.index:
            run = data.draw(st.sampled_from(self.index))
            prefix = run[: data.draw(st.integers(0, len(run)))]
        expected = data.draw(st.integers(0, SLOT_PAGES * PAGE_TOKENS))
        reqid = self.table.alloc_reqid(prefix, expected)
        if reqid is None:
            return
        assert reqid not in self.lens
        for page in prefix:
            if page in self.foreign_pins:
                self.foreign_pins[page] += 1
        self.lens[reqid] = len(prefix) * PAGE_TOKENS
        self.sealed_of[reqid] = len(prefix)
        self.in_use[reqid] = set()

    @precondition(lambda self: self.lens)
    @rule(grow=st.lists(st.integers(0, 9), min_size=SLOTS, max_size=SLOTS), soon=st.integers(0, 9))
    def step(self, grow, soon):
        most = SLOT_PAGES * PAGE_TOKENS
        wanted = {i: min(most, tokens + grow[i]) for i, tokens in self.lens.items()}
        lens = [wanted.get(i, 0) for i in range(SLOTS)]
        coming = [min(most, n + soon) if i in wanted else 0 for i, n in enumerate(lens)]
        before = self.table.num_free
        answer = self.table.step(lens, coming)
        self.queue += [(answer.now_batch, answer.now), (answer.now_batch + 1, answer.later)]
        if not answer.ok:
            assert answer.num_short > 0
            assert self.table.num_free == before, "nothing is mapped for a step that cannot be"
            assert not any(isinstance(one, Map) and one.writable for one in answer.now + answer.later)
            return
        while self.executed < answer.wait_for:
            self.execute()
        for reqid, tokens in wanted.items():
            for place in range(-(-tokens // PAGE_TOKENS)):
                page, writable = self.window[reqid * SLOT_PAGES + place]
                self.in_use[reqid].add(reqid * SLOT_PAGES + place)
                assert page == self.table.pages_of(reqid)[place]
                if place * PAGE_TOKENS >= self.lens[reqid] and place >= self.sealed_of[reqid]:
                    assert writable
                    assert self.table.is_private(reqid, place), "what the step writes is its own"
        self.lens = wanted

    @precondition(lambda self: self.lens)
    @rule(data=st.data())
    def seal(self, data):
        reqid = data.draw(st.sampled_from(sorted(self.lens)))
        full = self.lens[reqid] // PAGE_TOKENS
        pages = self.table.seal(reqid, full)
        self.sealed_of[reqid] = max(self.sealed_of[reqid], full)
        if pages and not set(pages) & set(FOREIGN):
            for page in pages:
                self.table.pin(page)
            self.index.append(pages)

    @precondition(lambda self: self.lens)
    @rule(data=st.data())
    def end(self, data):
        self.end_one(data.draw(st.sampled_from(sorted(self.lens))))

    def end_one(self, reqid):
        self.fence += 1
        self.touched_until.update(dict.fromkeys(self.in_use.pop(reqid), self.fence))
        self.table.free_reqid(reqid, self.fence)
        del self.lens[reqid], self.sealed_of[reqid]

    @precondition(lambda self: self.index)
    @rule(data=st.data())
    def evict(self, data):
        for page in self.index.pop(data.draw(st.integers(0, len(self.index) - 1))):
            self.table.unpin(page)

    @rule(count=st.integers(1, 4))
    def lend_and_get_back(self, count):
        taken = self.table.give_back(count)
        assert not set(taken) & {page for page, _ in self.window.values()}, "given back while mapped"
        self.queue.append(self.table.flush())
        self.table.grant(taken)

    # ---- what the machine does

    @rule()
    def fences_pass(self):
        self.passed = self.fence
        self.table.passed(self.passed)

    @precondition(lambda self: self.queue)
    @rule()
    def execute(self):
        batch, commands = self.queue.pop(0)
        for command in commands:
            if isinstance(command, Map):
                for place, page in enumerate(command.pages, command.first):
                    assert place not in self.window, "mapped over something"
                    others = [other for other in self.window.values() if other[0] == page]
                    assert not (command.writable and others), (
                        "a page that is mapped elsewhere becomes writable"
                    )
                    self.window[place] = (page, command.writable)
            else:
                for place in range(command.first, command.first + command.num_places):
                    assert place not in self.in_use.get(place // SLOT_PAGES, ()), "unmapped in use"
                    assert self.touched_until.get(place, 0) <= self.passed, "unmapped before its fence"
                    del self.window[place]
        self.executed = batch
        self.table.ack(batch)

    @rule()
    def foreign_pins_go(self):
        for page in self.table.take_foreign():
            self.foreign_pins[page] -= 1

    @invariant()
    def no_page_is_writable_in_two_places_and_pins_never_negative(self):
        writable = [page for page, may_write in self.window.values() if may_write]
        assert len(writable) == len(set(writable))
        assert min(self.foreign_pins.values()) >= 0
        for page in FOREIGN:
            if any(page == mapped for mapped, _ in self.window.values()):
                assert self.foreign_pins[page] > 0
        self.table.check()

    def teardown(self):
        """Everything ends: every page and every pin returns."""
        for reqid in list(self.lens):
            self.end_one(reqid)
        for pages in self.index:
            for page in pages:
                self.table.unpin(page)
        self.fences_pass()
        returned = []
        for _ in range(3):
            returned += self.table.give_back(PAGES)
            self.queue.append(self.table.flush())
            while self.queue:
                self.execute()
        assert sorted(returned) == list(range(PAGES))
        self.foreign_pins_go()
        left = {page for slot in range(SLOTS) for page in self.table.pages_of(slot)} - {HOLE}
        assert left <= set(FOREIGN)
        for page in FOREIGN:
            assert (self.foreign_pins[page] > 0) == (page in left)


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(
    max_examples=examples(200), stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
