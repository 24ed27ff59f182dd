"""Fetches that were given up: what the worker's rates say of their link, and that eq 2 computes then."""

import json

import msgspec
import pytest
from prometheus_client import REGISTRY

from shared.costmodel.transfer import LinkRates, should_fetch
from shared.engine import worker_pages
from shared.engine.worker_config import WorkerSettings
from shared.engine.worker_links import MeasuredLinks
from shared.engine.worker_pages import PromptPages
from shared.engine.worker_shell import WorkerShell
from shared.errors import PeerGone
from shared.ids import Epoch, HandoffId, InstanceId, LeaseId
from shared.kv.block_hash import chain_seed, pack_tokens
from shared.kv.words import u32_bytes, u64_bytes
from shared.testing.mock_engine import MockEngine
from shared.wire.handoff import HandoffState
from shared.wire.mempool import Acquired
from shared.wire.requests import KvPlan

SEED, PROMPT = chain_seed("f", ""), pack_tokens(range(13))  # three blocks and a token
BLOCK_BYTES = 4 << 20
FAR = "tcp://far"
PLAN = KvPlan(reach="remote", source=InstanceId("p1"), tokens=12, path="remote", source_mempool=FAR)


class Clock:
    """Time passes where a pool takes it."""

    now_s = 0.0

    def perf_counter(self):
        return self.now_s


class Pool:
    """A mempool's client that answers as it is told."""

    memory_id = boot_generation = Epoch(1)
    peer_address = "tcp://here"
    crosses_hosts = True
    connected = True
    num_blocks = 0
    error: Exception | None = None
    takes_s = 0.0001
    says: dict[str, int] = {}

    def __init__(self, clock):
        self.clock = clock

    def release(self, lease_id): ...

    def drop_handoff(self, handoff_id): ...

    def keep_handoff(self, handoff_id, ttl_ms): ...

    async def status(self): ...

    async def acquire(self, hashes, **_):
        self.clock.now_s += self.takes_s
        if self.error is not None:
            raise self.error
        n = self.num_blocks
        answer = Acquired(
            call_id=1,
            lease_id=LeaseId("l" if n else ""),
            fencing_token=Epoch(1),
            num_blocks=n,
            pages=u32_bytes(range(n)),
            epochs=u64_bytes([5] * n),
        )
        return msgspec.structs.replace(answer, **self.says)


class Rig:
    def __init__(self, model_dir, **options):
        settings = WorkerSettings(
            engine="mock", model_dir=model_dir, model_name="m", block_tokens=4, **options
        )
        self.layout = msgspec.structs.replace(MockEngine(settings).description, block_bytes=BLOCK_BYTES)
        self.pool = Pool(clock := worker_pages.time)  # a Clock in the tests below
        self.pages = PromptPages(self.pool, self.layout, settings)
        self.pages._links = MeasuredLinks(clock.perf_counter)

    async def fetch(self, times=1, plan=PLAN, num_blocks=0, **says):
        self.pool.num_blocks, self.pool.says = num_blocks, says
        for _ in range(times):
            await self.pages.for_prompt(SEED, PROMPT, "", plan)

    async def open_path(self):
        """And a few fast transfers: 12 MB in no time."""
        await self.fetch(6, num_blocks=3, blocks_remote=3)
        assert self.fetch_ms < 50.0

    def handoff(self, source_mempool):
        return HandoffState(
            handoff_id=HandoffId("h"),
            source=InstanceId("p1"),
            description=self.layout,
            valid_tokens=13,
            source_mempool=source_mempool,
        )

    @property
    def fetch_ms(self):
        """Of the three blocks, as the scheduler predicts it."""
        return LinkRates(self.pages.links).transfer_ms("remote", 3 * BLOCK_BYTES)


@pytest.fixture(autouse=True)
def time_stands_still(monkeypatch):
    monkeypatch.setattr(worker_pages, "time", Clock())


@pytest.fixture
def model_dir(tmp_path):
    config = {"vocab_size": 1000, "eos_token_id": 2, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize("num_blocks", [0, 1])
async def test_eq_2_computes_after_three_fetches_that_did_not_come_in_time(model_dir, num_blocks):
    """The mempool answered with what it had; each such request waited its second and computed anyway."""
    rig = Rig(model_dir)
    await rig.open_path()
    assert should_fetch(rig.fetch_ms, 300.0, 100.0)
    await rig.fetch(3, num_blocks=num_blocks, blocks_late=3 - num_blocks, late_us=990_000)
    assert not should_fetch(rig.fetch_ms, 300.0, 100.0)
    assert rig.fetch_ms >= 980.0


async def test_hand_offs_that_did_not_come_in_time_are_measured(model_dir):
    rig = Rig(model_dir)
    await rig.open_path()
    rig.pool.num_blocks, rig.pool.says = 0, {"blocks_late": 4, "late_us": 1_990_000}
    for _ in range(3):
        await rig.pages.for_handoff(SEED, PROMPT, rig.handoff(FAR), "")
    assert rig.fetch_ms > 1_000.0


async def test_a_hand_off_of_less_than_nothing_asks_for_nothing(model_dir):
    rig = Rig(model_dir)
    rig.pool.num_blocks = 3
    assert await rig.pages.for_handoff(SEED, PROMPT, rig.handoff(FAR), "") is not None
    less = msgspec.structs.replace(rig.handoff(FAR), valid_tokens=-1)
    assert await rig.pages.for_handoff(SEED, PROMPT, less, "") is None


async def test_an_answer_without_blocks_says_nothing_of_a_link(model_dir):
    """The holder had none, refused, or its prompt was not done: at once or when the time was over."""
    rig = Rig(model_dir)
    await rig.open_path()
    before = rig.pages.links
    await rig.fetch(3)
    rig.pool.takes_s = 0.002
    await rig.fetch(3, num_blocks=1)
    assert rig.pages.links == before


async def test_a_mempool_that_does_not_answer_in_the_time_of_a_fetch_gave_it_up(model_dir):
    rig = Rig(model_dir, fetch_wait_ms=4, handoff_wait_ms=4)
    await rig.open_path()
    quick_ms, rig.pool.error = rig.fetch_ms, TimeoutError()
    await rig.fetch(3)
    rig.pool.error, rig.pool.takes_s = PeerGone("restarted"), 0.005
    await rig.fetch(3)
    rig.pool.error = TimeoutError()
    await rig.fetch(3, plan=KvPlan(reach="host", source=InstanceId("p1"), tokens=12, path="peer"))
    for _ in range(3):
        await rig.pages.for_handoff(SEED, PROMPT, rig.handoff(Pool.peer_address), "")
    assert rig.fetch_ms == quick_ms, "it ended sooner, or it went to no other host"
    await rig.fetch(3)
    assert rig.fetch_ms > quick_ms
    assert set(rig.pages.links) == {"remote"}


async def test_a_worker_shows_what_it_measured_of_its_links_in_its_status_and_its_metrics(model_dir):
    settings = WorkerSettings(
        engine="mock", model_dir=model_dir, model_name="m", block_tokens=4, role="prefill", instance="p0",
        listen="tcp://127.0.0.1:1", admin_listen="127.0.0.1:1",
    )  # fmt: skip
    shell = WorkerShell(settings, MockEngine(settings), Pool(Clock()), 1_000)
    shell.pages = (rig := Rig(model_dir)).pages
    await rig.fetch(num_blocks=3, blocks_peer=3, blocks_timed=3, timed_us=1_000)
    shown = shell.status()["links"]
    assert shown["peer"]["num_measured"] == 1
    assert shown["peer"]["gb_per_s"] == pytest.approx(3 * BLOCK_BYTES / 1e6, rel=1e-3)
    shell._update_gauges()
    assert REGISTRY.get_sample_value("quire_worker_link_gb_per_s", {"path": "peer"}) == pytest.approx(
        3 * BLOCK_BYTES / 1e6
    )
    shell.pages = PromptPages(None, rig.layout, settings)
    assert shell.status()["links"] == {}


def test_a_worker_shows_the_settings_that_a_simulation_of_it_needs(model_dir):
    settings = WorkerSettings(
        engine="mock", model_dir=model_dir, model_name="m", block_tokens=4, role="decode", instance="d0",
        listen="tcp://127.0.0.1:1", admin_listen="127.0.0.1:1", max_num_seqs=7, pd_caching="2",
    )  # fmt: skip
    shown = WorkerShell(settings, MockEngine(settings), None, 1_000).status()
    assert (shown["max_num_seqs"], shown["pd_caching"]) == (7, "2")
