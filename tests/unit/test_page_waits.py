"""A request waits for pages as long as computing them would take, and not less than its settings say."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.costmodel.model import CostModel
from shared.engine.page_waits import MOST_MS, PageWaits
from shared.engine.worker_config import WorkerSettings
from shared.engine.worker_cost import WorkerCost
from shared.engine.worker_pages import PromptPages
from shared.engine.worker_shell import WorkerShell
from shared.testing.mock_engine import MockEngine
from tests.support.cost_view import coefficients
from tests.unit.test_mempool_remote import ABC, PREFILL, TwoMempools
from tests.unit.test_worker_fetches import FAR, PLAN, PROMPT, SEED, Clock, Pool, Rig

SETTINGS = WorkerSettings(model_dir="m", model_name="m")
MS_PER_TOKEN = 0.05  # 3.3 s for 65,536, as an H200 takes for the 8B shape


def compute_ms(num_tokens, cached_tokens):
    return (num_tokens - cached_tokens) * MS_PER_TOKEN


@given(st.integers(1, 1 << 20), st.floats(0.0, 1.0))
def test_a_fetch_that_takes_less_than_it_saves_is_never_given_up(num_tokens, share):
    fetched = int(num_tokens * share)
    waits = PageWaits(SETTINGS, compute_ms)
    saved_ms = compute_ms(num_tokens, 0) - compute_ms(num_tokens, fetched)
    assert waits.fetch_ms(num_tokens, fetched) > min(MOST_MS, saved_ms) - 1
    assert waits.fetch_ms(num_tokens, fetched) <= max(SETTINGS.fetch_wait_ms, saved_ms)
    assert waits.handoff_ms(num_tokens) > min(MOST_MS, compute_ms(num_tokens, 0)) - 1
    assert SETTINGS.handoff_wait_ms <= waits.handoff_ms(num_tokens) <= MOST_MS


@pytest.mark.parametrize("settings", [{}, {"fetch_wait_ms": 40_000, "handoff_wait_ms": 40_000}])
def test_without_a_model_and_where_more_was_asked_for_the_settings_decide(settings):
    made = WorkerSettings(model_dir="m", model_name="m", **settings)
    for waits in (PageWaits(made), PageWaits(made, compute_ms)):
        assert waits.fetch_ms(1_000, 900) == made.fetch_wait_ms
        assert waits.handoff_ms(1_000) == made.handoff_wait_ms


def test_a_worker_says_what_its_corrected_model_says():
    cost = WorkerCost()
    assert cost.compute_ms(1_000, 0) == 0.0
    cost.use(coefficients())
    alone_ms = CostModel(coefficients()).prefill_ms(1_000, 0)
    assert cost.compute_ms(1_000, 0) == pytest.approx(alone_ms)
    for _ in range(20):
        cost.corrections["prefill"].observe(100.0, 200.0)
    assert cost.compute_ms(1_000, 0) == pytest.approx(2 * alone_ms)


@pytest.fixture
def model_dir(tmp_path):
    config = {"vocab_size": 1000, "eos_token_id": 2, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


class Asked(Pool):
    """A mempool's client that notes how long it is waited for."""

    def __init__(self):
        super().__init__(Clock())
        self.wait_ms = []

    async def acquire(self, hashes, *, wait_ms, **more):
        self.wait_ms.append(wait_ms)
        return await super().acquire(hashes)


async def test_the_mempool_is_asked_to_bring_pages_for_so_long(model_dir):
    settings = WorkerSettings(
        engine="mock", model_dir=model_dir, model_name="m", block_tokens=4, role="decode", instance="d0",
        listen="tcp://127.0.0.1:1", admin_listen="127.0.0.1:1", fetch_wait_ms=7, handoff_wait_ms=8,
    )  # fmt: skip
    shell = WorkerShell(settings, MockEngine(settings), asked := Asked(), 1_000)
    handoff = Rig(model_dir).handoff(FAR)
    pages = PromptPages(asked, handoff.description, settings, compute_ms=shell.cost.compute_ms)
    assert shell.pages._waits._compute_ms == shell.cost.compute_ms
    await pages.for_prompt(SEED, PROMPT, "", PLAN)
    await pages.for_handoff(SEED, PROMPT, handoff, "")
    shell.cost.use(coefficients(prefill_ms=1_000.0))
    await pages.for_prompt(SEED, PROMPT, "", PLAN)
    await pages.for_handoff(SEED, PROMPT, handoff, "")
    await pages.for_prompt(SEED, PROMPT, "")
    assert asked.wait_ms == [7, 8, 12_000, 13_000, 0]


@pytest.mark.parametrize(("wait_ms", "timeout_ms"), [(1_000, 5_000), (9_000, 9_000 - 200)])
def test_bytes_from_another_host_have_as_long_as_the_first_reader_waits(wait_ms, timeout_ms):
    two = TwoMempools()
    two.a.fill(PREFILL, 0, ABC, "abc")
    two.acquire(handoff_id="", wait_ms=wait_ms)
    two.b.advance(200)  # of asking
    two.deliver()
    assert [pull.timeout_ms for pull in two.b.remote_pulls] == [timeout_ms]
    two.b.advance(8_000)
    two.copy()
    two.deliver()
    (got,) = two.got()
    assert got.num_blocks == (3 if wait_ms > 8_200 else 0)
    two.acquire(call_id=2, handoff_id="", wait_ms=wait_ms)
    assert two.got()[-1].num_blocks == 3, "what came late is there for the next one"
