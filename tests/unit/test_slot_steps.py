"""What an engine with request slots does before and after each of vLLM's steps."""

from types import SimpleNamespace

import pytest
import torch

from shared.engine.slot_attention import SlotAttentionImpl
from shared.engine.slot_settings import GPU_AHEAD_TOKENS
from shared.engine.slot_steps import SlotSteps, Span
from shared.engine.slot_worker import SlotWorkerMixin
from shared.errors import SettingsError
from shared.vmm.request_slots import RequestSlots
from shared.vmm.slot_commands import Map

BLOCK = 4


class FakeMapper:
    """Executes up to `done`."""

    def __init__(self):
        self.batches = []
        self.done = 0
        self.waited = []

    def submit(self, commands):
        if commands:
            self.batches.append(commands)
        return len(self.batches)

    def is_done(self, ticket):
        return self.done >= ticket

    def wait(self, ticket):
        self.waited.append(ticket)
        self.done = max(self.done, ticket)


class FakeEvent:
    def __init__(self):
        self.over = False
        self.was_waited_for = False

    def query(self):
        return self.over

    def synchronize(self):
        self.over = self.was_waited_for = True


def output(new=(), cached=(), finished=(), preempted=(), resumed=()):
    """new: (id, block ids, computed, scheduled); cached: (id, new block ids or None, computed, scheduled)."""
    return SimpleNamespace(
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted),
        num_scheduled_tokens={row[0]: row[3] for row in (*new, *cached)},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(list(ids),), num_computed_tokens=computed)
            for name, ids, computed, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[row[0] for row in cached],
            resumed_req_ids=set(resumed),
            new_block_ids=[None if row[1] is None else (list(row[1]),) for row in cached],
            num_computed_tokens=[row[2] for row in cached],
        ),
    )


@pytest.fixture
def mapper():
    return FakeMapper()


@pytest.fixture
def events():
    return []


@pytest.fixture
def steps(mapper, events):
    def record():
        events.append(FakeEvent())
        return events[-1]

    return SlotSteps(RequestSlots(2, 16), mapper, BLOCK, record)


def run(steps, out):
    steps.before(out)
    steps.wait_mapped()
    steps.after()


def test_the_first_step_of_a_request_waits_for_its_pages(steps, mapper):
    steps.before(output(new=[("a", [6, 8], 0, 5)]))
    assert mapper.batches == [[Map(steps.table.slot_of("a") * 16, (5, 7), False)]]  # block id = page id + 1
    assert steps.spans(["a"]) == [Span(0, 5, steps.table.slot_of("a"), 5)]
    steps.wait_mapped()
    assert mapper.waited == [1]


def test_a_page_that_comes_ahead_is_waited_for_only_by_the_step_that_reads_it(steps, mapper):
    run(steps, output(new=[("a", [6], 0, 2)]))
    run(steps, output(cached=[("a", [9], 2, 1)]))  # a block for tokens 4 and on, while token 3 is computed
    assert mapper.waited == [1]
    run(steps, output(cached=[("a", None, 3, 1)]))
    assert mapper.waited == [1]
    run(steps, output(cached=[("a", None, 4, 1)]))
    assert mapper.waited == [1, 2]
    assert steps.counters.pages_ahead == 1
    assert steps.counters.waits == 2


def test_a_page_mapped_in_the_background_costs_the_step_nothing(steps, mapper):
    run(steps, output(new=[("a", [6], 0, 2)]))
    run(steps, output(cached=[("a", [9], 2, 1)]))
    mapper.done = 2
    run(steps, output(cached=[("a", None, 3, 1)]))
    run(steps, output(cached=[("a", None, 4, 1)]))
    assert mapper.waited == [1]


def test_a_chunk_of_a_long_prompt_waits_for_the_pages_that_come_with_it(steps, mapper):
    run(steps, output(new=[("a", [6], 0, 4)]))
    run(steps, output(cached=[("a", [7, 8], 4, 8)]))
    assert mapper.waited == [1, 2]


def test_rows_are_spans_in_the_order_that_the_runner_gives(steps):
    steps.before(output(new=[("a", [6, 8], 3, 2), ("b", [4], 0, 3)]))
    a, b = steps.table.slot_of("a"), steps.table.slot_of("b")
    assert steps.spans(["b", "a"]) == [Span(0, 3, b, 3), Span(3, 5, a, 5)]


def test_a_slot_is_used_again_only_behind_the_last_step_of_its_request(steps, events):
    run(steps, output(new=[("a", [6], 0, 2), ("b", [9], 0, 2)]))
    run(steps, output(cached=[("b", None, 2, 1)], finished=["a"]))
    steps.before(output(new=[("c", [7], 0, 1)], cached=[("b", None, 3, 1)]))
    assert events[0].was_waited_for
    assert not events[1].was_waited_for
    assert steps.counters.fence_waits == 1
    assert steps.table.pages_at(steps.table.slot_of("c")) == [6]


def test_a_preempted_request_comes_back_to_the_slot_that_has_its_beginning(steps, events, mapper):
    run(steps, output(new=[("a", [6, 7], 0, 6)]))
    slot = steps.table.slot_of("a")
    run(steps, output(new=[("b", [2], 0, 1)], preempted=["a"]))
    events[0].over = True
    steps.before(output(cached=[("a", [6, 9], 0, 7)], resumed=["a"]))
    assert steps.table.slot_of("a") == slot
    assert steps.table.pages_at(slot) == [5, 8]


def test_a_request_that_was_preempted_and_comes_anew_has_its_new_pages(steps, events):
    run(steps, output(new=[("a", [6, 7], 0, 6)]))
    events[0].over = True
    steps.before(output(new=[("a", [3], 0, 4)]))
    assert steps.table.pages_at(steps.table.slot_of("a"))[:1] == [2]
    assert steps.table.length("a") == 1


def test_without_events_a_step_is_over_when_it_returns(mapper):
    steps = SlotSteps(RequestSlots(1, 16), mapper, BLOCK, None)
    run(steps, output(new=[("a", [6], 0, 2)]))
    run(steps, output(new=[("b", [7], 0, 2)], finished=["a"]))
    assert steps.table.pages_at(0) == [6]
    assert steps.counters.fence_waits == 0


def test_between_steps_nothing_is_under_way(steps):
    assert not steps.under_way
    steps.before(output(new=[("a", [6], 0, 2)]))
    assert steps.under_way
    steps.after()
    assert not steps.under_way


TILE_TOKENS = 224  # FlashAttention-3's longest


@pytest.fixture
def gpu_steps(mapper, monkeypatch):
    """As a GPU's worker makes them, with pages of so many tokens."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(record_event=FakeEvent))
    worker, memory = SimpleNamespace(device=torch.device("cuda")), SimpleNamespace(mapper=mapper)

    def make(block):
        layout = SimpleNamespace(num_slots=1, slot_places=256, block_tokens=block)
        return SlotWorkerMixin._make_steps(worker, memory, layout)

    return make


@pytest.mark.parametrize("block", [16, 64, 256])
@pytest.mark.parametrize("chunk", [1, 34, 35, 200, 256, 257])
def test_a_step_waits_for_every_page_that_its_tiles_reach(mapper, gpu_steps, block, chunk):
    steps = gpu_steps(block)
    tokens = have = 0
    for number in (2048, chunk, *[1] * 300):
        end = tokens + number
        more = range(1 + have, 1 + -(-(end + GPU_AHEAD_TOKENS) // block))  # as page_manager.py allocates
        have += len(more)
        row = ("a", more, tokens, number)
        run(steps, output(cached=[row]) if tokens else output(new=[row]))
        mapped = sum(len(command.pages) for batch in mapper.batches[: mapper.done] for command in batch)
        assert mapped * block >= end + TILE_TOKENS - 1
        tokens = end


def test_steady_decoding_asks_for_a_page_32_steps_before_it_may_be_read(mapper, gpu_steps):
    steps = gpu_steps(256)
    run(steps, output(new=[("a", range(1, 3), 0, 256)]))
    run(steps, output(cached=[("a", [3], 256, 1)]))  # 257 + 256 tokens need a third
    for tokens in range(257, 288):
        run(steps, output(cached=[("a", None, tokens, 1)]))
    assert mapper.waited == [1]
    run(steps, output(cached=[("a", None, 288, 1)]))  # 289 + 224
    assert mapper.waited == [1, 2]


@pytest.mark.parametrize("special", [{"sinks": torch.zeros(8)}, {"sliding_window": 128}])
def test_attention_that_the_kernels_are_not_told_of_is_refused(special):
    with pytest.raises(SettingsError, match="plain causal attention"):
        SlotAttentionImpl(8, 64, 0.1, 8, **special)
