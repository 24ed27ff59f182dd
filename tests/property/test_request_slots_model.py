"""Any history of requests: the window shows each one its own pages, and nothing changes under a step that reads it."""

import contextlib

import hypothesis.strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from shared.vmm.errors import BadMapping
from shared.vmm.request_slots import RequestSlots
from shared.vmm.slot_commands import Map

NUM_SLOTS, PLACES, PAGES = 4, 6, 12
pages = st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=PLACES)


class SlotsMachine(RuleBasedStateMachine):
    """`window` is what commands made; a step reads all running requests' places until it has passed."""

    requests = Bundle("requests")

    def __init__(self):
        super().__init__()
        self.table = RequestSlots(NUM_SLOTS, PLACES, max_mapped=14)
        self.window = {}
        self.tables = {}
        self.step = 0
        self.reading = {}  # step: {place: page} that it reads
        self.counter = 0

    def execute(self, commands):
        for command in commands:
            count = len(command.pages) if isinstance(command, Map) else command.num_places
            for i in range(count):
                place = command.first + i
                for read in self.reading.values():
                    assert place not in read, "changed under a step that reads it"
                if isinstance(command, Map):
                    assert place not in self.window, "mapped twice"
                    assert not command.writable
                    self.window[place] = command.pages[i]
                else:
                    del self.window[place]

    @rule(target=requests, wanted=pages)
    def begin(self, wanted):
        name = f"r{self.counter}"
        self.counter += 1
        if not self.table.num_idle():
            return name
        change = self.table.begin(name, wanted)
        if change is None:
            fence = self.table.fence()
            assert any(step <= fence for step in self.reading)
            self.pass_until(fence)
            change = self.table.begin(name, wanted)
        if change is not None:
            self.execute(change.commands)
            self.tables[name] = list(wanted)
        return name

    @rule(name=requests, more=pages)
    def grow(self, name, more):
        if name in self.tables:
            more = more[: PLACES - len(self.tables[name])]
            self.execute(self.table.grow(name, more).commands)
            self.tables[name] += more

    @rule(name=consumes(requests))
    def end(self, name):
        self.table.end(name, self.step)
        self.tables.pop(name, None)

    @rule()
    def run_step(self):
        self.step += 1
        self.reading[self.step] = {
            self.table.slot_of(name) * PLACES + place: page
            for name, table in self.tables.items()
            for place, page in enumerate(table)
        }

    @rule()
    def oldest_step_passes(self):
        if self.reading:
            self.pass_until(min(self.reading))

    @rule()
    def trim(self):
        self.execute(self.table.trim())

    @rule(gone=pages)
    def forget(self, gone):
        with contextlib.suppress(BadMapping):  # one is in use, and nothing is changed
            self.execute(self.table.forget(gone))

    def pass_until(self, fence):
        for step in [s for s in self.reading if s <= fence]:
            for place, page in self.reading.pop(step).items():
                assert self.window[place] == page
        self.table.passed(fence)

    @invariant()
    def every_request_sees_its_pages(self):
        for name, table in self.tables.items():
            base = self.table.slot_of(name) * PLACES
            assert [self.window.get(base + i) for i in range(len(table))] == table

    @invariant()
    def the_table_knows_what_is_mapped(self):
        assert self.table.num_mapped == len(self.window)


TestSlotsMachine = SlotsMachine.TestCase
