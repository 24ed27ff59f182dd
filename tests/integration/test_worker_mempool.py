"""Workers and a real mempool process: pages move between two mock engines, whose blocks prove themselves."""

import asyncio
import json
import shutil
import signal
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.engine.worker_attempt import AttemptContext
from shared.engine.worker_checks import WorkerLimits
from shared.engine.worker_config import WorkerSettings
from shared.engine.worker_front import WorkerFront
from shared.engine.worker_pages import PromptPages
from shared.free_ports import free_port
from shared.ids import Epoch, InstanceId
from shared.kv.block_hash import chain_seed, pack_tokens
from shared.mempool.client import MempoolClient
from shared.testing.mock_engine import MockEngine
from shared.testing.processes import ServiceProcess
from shared.testing.scripted_gateway import ScriptedGateway
from shared.wire.requests import Finished, Prefilled
from tests.integration.mempool_rig import PATIENCE_MS
from tests.integration.worker_rig import until

EPOCH = 7


@pytest.fixture
def model_dir(tmp_path):
    config = {"vocab_size": 1000, "eos_token_id": 2, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.fixture
def pool(tmp_path):
    folder = Path(tempfile.mkdtemp(prefix="quire-"))
    admin = free_port()
    flags = ["--socket", str(folder / "m.sock"), "--admin-listen", f"127.0.0.1:{admin}"]
    process = ServiceProcess.of_module(
        "services.mempool",
        [*flags, "--capacity-bytes", str(64 << 20)],
        name="mempool",
        log_dir=tmp_path,
        admin_url=f"http://127.0.0.1:{admin}",
    )
    with process:
        process.wait_ready()
        yield process, str(folder / "m.sock")
    shutil.rmtree(folder)


class Side:
    """One worker without its process."""

    def __init__(self, model_dir, socket, instance, **settings):
        patience = {"acquire_timeout_ms": PATIENCE_MS, "handoff_wait_ms": PATIENCE_MS}
        self.settings = WorkerSettings(
            engine="mock",
            model_dir=model_dir,
            model_name="m",
            instance=instance,
            mempool_socket=socket,
            mock_step_ms=1.0,
            block_tokens=4,
            **patience | settings,
        )
        self.engine = MockEngine(self.settings)
        self.client = MempoolClient(socket, InstanceId(instance))
        self.pages = PromptPages(self.client, self.engine.description, self.settings)
        self.died: list[str] = []
        self.front = WorkerFront("tcp://127.0.0.1:0", WorkerLimits(1000, 4096, 100), lambda: None)
        self.front.epoch = Epoch(EPOCH)

    async def start(self):
        self.client.start()
        await self.engine.start()
        context = AttemptContext(
            instance=InstanceId(self.settings.instance),
            settings=self.settings,
            engine=self.engine,
            pages=self.pages,
            outbox=self.front.outbox,
            on_engine_died=self.died.append,
            on_invariant_broken=self.died.append,
        )
        endpoint = await self.front.start(context)
        assert await self.client.wait_connected(30_000)
        await until(lambda: self.has_pages, "the engine's attachment and pages")
        return endpoint

    @property
    def has_pages(self):
        """Attached, and granted what it writes into: the grants come after the attachment."""
        return self.engine.pages_connected and len(self.engine._pages._attachment._stock) >= 64

    async def close(self):
        self.front.close()
        await self.client.close()
        await self.engine.close()


@asynccontextmanager
async def sides(model_dir, socket, **settings):
    made = [Side(model_dir, socket, name, **settings) for name in ("prefill-0", "decode-0")]
    try:
        ends = [await side.start() for side in made]
        async with ScriptedGateway(ends[0], EPOCH) as prefill, ScriptedGateway(ends[1], EPOCH) as decode:
            yield made, prefill, decode
    finally:
        for side in made:
            await side.close()


async def disaggregated(prefill, decode, name, prompt, max_tokens=6):
    """(prefill's receipt, decode's receipt, the output)."""
    prefill.generate(name, prompt, stage="prefill", max_tokens=max_tokens)
    first = await prefill.end_of(name)
    assert isinstance(first, Prefilled)
    assert first.handoff is not None
    decode.generate(name, prompt, stage="decode", handoff=first.handoff, max_tokens=max_tokens)
    last = await decode.end_of(name)
    assert isinstance(last, Finished)
    return first.receipt, last.receipt, decode.tokens[name, 0]


async def test_a_second_turn_moves_only_the_blocks_that_the_decode_side_lacks(model_dir, pool):
    async with sides(model_dir, pool[1]) as (made, prefill, decode):
        prompt = list(range(3, 45))  # 42 tokens: 10 full blocks of 4 and a tail of 2
        _, moved, output = await disaggregated(prefill, decode, "a", prompt)
        assert (moved.blocks_moved, moved.tokens_pool, moved.path) == (11, 41, "memfd")
        assert output == made[0].engine.vocabulary.tokens(prompt, 6)
        longer = prompt + output + list(range(100, 120))  # 68 tokens: 17 full blocks
        computed, again, _ = await disaggregated(prefill, decode, "b", longer)
        assert computed.tokens_engine == 40
        assert (again.blocks_reused, again.blocks_moved) == (10, 7)
        await until(lambda: not made[1].pages.num_leases, "leases released")
        assert made[0].died == made[1].died == []


async def test_a_prefills_pages_outlast_a_delete_of_all_until_decode_acquires_them(model_dir, pool):
    """The mock named the chain's seed for each of its blocks: the pool held nothing of a hand-off."""
    async with sides(model_dir, pool[1]) as (made, prefill, decode):
        prompt = list(range(3, 45))
        prefill.generate("a", prompt, stage="prefill", max_tokens=6)
        first = await prefill.end_of("a")
        assert isinstance(first, Prefilled)
        before = await made[0].client.status()
        assert (before.num_handoffs, before.num_indexed) == (1, 11)
        assert await made[0].client.delete() == 0
        decode.generate("a", prompt, stage="decode", handoff=first.handoff, max_tokens=6)
        last = await decode.end_of("a")
        assert (last.receipt.blocks_moved, last.receipt.tokens_pool) == (11, 41)
        await until(lambda: not made[1].pages.num_leases, "leases released")
        assert await made[0].client.delete() == 11, "nothing holds them any more"


async def test_requests_go_on_while_the_pool_is_killed_and_use_its_successor(model_dir, pool):
    process, socket = pool
    async with sides(model_dir, socket) as (made, prefill, decode):
        prompt = list(range(3, 45))
        await disaggregated(prefill, decode, "a", prompt)
        await asyncio.to_thread(process.kill)
        await until(lambda: not made[0].client.connected and not made[1].client.connected, "the loss")
        _, receipt, output = await disaggregated(prefill, decode, "b", [9, *prompt])
        assert receipt.blocks_moved == 0
        assert output == made[0].engine.vocabulary.tokens([9, *prompt], 6)
        process.start()
        await asyncio.to_thread(process.wait_ready)
        await until(lambda: all(side.has_pages and side.client.connected for side in made), "connected again")
        _, receipt, output = await disaggregated(prefill, decode, "c", [8, *prompt])
        assert receipt.blocks_moved == 11
        assert output == made[0].engine.vocabulary.tokens([8, *prompt], 6)


async def test_a_worker_waits_for_the_pools_answer_as_long_as_it_is_told_to(model_dir, pool):
    """The client's own second used to end it."""
    process, socket = pool
    async with sides(model_dir, socket, acquire_timeout_ms=60_000) as (made, prefill, decode):
        prompt = list(range(3, 45))
        await disaggregated(prefill, decode, "a", prompt)
        pages, seed = made[1].pages, chain_seed(made[1].engine.description.fingerprint, "")
        process.process.send_signal(signal.SIGSTOP)
        try:
            asked = asyncio.create_task(pages.for_prompt(seed, pack_tokens(prompt), ""))
            await asyncio.sleep(1.5)
            assert not asked.done()
        finally:
            process.process.send_signal(signal.SIGCONT)
        lease = await asked
        assert lease is not None
        pages.release(lease.lease_id)
