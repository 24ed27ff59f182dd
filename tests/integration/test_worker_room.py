"""A decode worker's door: handed-over prompts wait in order for room in the engine's pages; theirs are kept."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from shared.engine.interface import EngineRoom
from shared.engine.worker_attempt import AttemptContext
from shared.engine.worker_room import DecodeRoom
from shared.errors import PeerGone
from shared.ids import Epoch, HandoffId, InstanceId
from shared.room.growth import Need
from shared.testing.scripted_gateway import ScriptedGateway
from shared.wire.handoff import HandoffState
from shared.wire.mempool import PoolStatus, SpaceStatus
from shared.wire.reports import Room
from tests.integration.test_worker_front import EPOCH, FakePages, Rig, model_dir, until

__all__ = ["model_dir"]

NUM_PAGES = 100


class SmallPages(FakePages):
    """A mempool whose space is nearly full, or not, as the test says."""

    def __init__(self):
        super().__init__()
        self.free = 0
        self.ahead = 0
        self.kept = []

    async def acquire(self, hashes, **options):
        self.free = max(0, self.free - len(hashes))
        return await super().acquire(hashes, **options)

    def keep_handoff(self, handoff_id, ttl_ms):
        self.kept.append(handoff_id)

    async def status(self):
        granted = NUM_PAGES - self.free - self.ahead
        by_state = {"free": self.free, "sealed": self.ahead, "granted": granted, "withdrawn": 50}
        space = SpaceStatus(
            number=0, content_key="k", devices=["cpu"], num_pages=NUM_PAGES + 50, page_bytes=1, pages_by_state=by_state,
            num_indexed=3 + self.ahead, num_pinned=3 + self.ahead, num_ahead=self.ahead,
            engines=["engine decode-0: 7 of 100 pages"],
        )  # fmt: skip
        return PoolStatus(
            call_id=1, boot_generation=Epoch(1), num_pages=0, page_bytes=0, pages_by_state={}, num_indexed=0,
            num_pinned=0, num_leases=0, num_handoffs=0, attachments=[], counters={}, spaces=[space],
        )  # fmt: skip


@asynccontextmanager
async def door(model_dir, **settings):
    """(rig, pages, gateway) with an engine in which another request runs, and which says what it has room for."""
    pages = SmallPages()
    rig = Rig(model_dir, pages, **settings)
    rig.seen = EngineRoom(unused=0, own=20, in_use=20, needs=[Need(20, 4)], answer_tokens=64)

    rig.answers = asyncio.Event()
    rig.answers.set()

    async def room():
        await rig.answers.wait()
        if isinstance(rig.seen, Exception):
            raise rig.seen
        return rig.seen

    rig.engine.room = room
    await rig.engine.start()
    rig.room = DecodeRoom(rig.engine, rig.pages, rig.settings)
    context = AttemptContext(
        instance=InstanceId("decode-0"), settings=rig.settings, engine=rig.engine, pages=rig.pages,
        outbox=rig.front.outbox, on_engine_died=rig.died.append, on_invariant_broken=rig.died.append, room=rig.room,
    )  # fmt: skip
    rig.front.epoch = Epoch(EPOCH)
    endpoint = await rig.front.start(context)
    rig.room.open()
    try:
        await until(lambda: rig.room.now is not None or rig.seen is None)
        async with ScriptedGateway(endpoint, EPOCH) as gateway:
            yield rig, pages, gateway
    finally:
        rig.front.close()
        await rig.room.close()
        await rig.engine.close()


def hand_over(rig, gateway, name, num_tokens=40, max_tokens=8, source="prefill-0"):
    handoff = HandoffState(
        handoff_id=HandoffId(f"h-{name}"), source=InstanceId(source), description=rig.engine.description,
        valid_tokens=num_tokens, source_mempool=rig.client.peer_address,
    )  # fmt: skip
    gateway.generate(
        name, list(range(3, 3 + num_tokens)), stage="decode", handoff=handoff, max_tokens=max_tokens
    )


def asked(pages):
    return [handoff_id for _, handoff_id, _ in pages.calls]


async def test_prompts_wait_in_order_their_pages_kept_and_begin_as_room_comes(model_dir):
    async with door(model_dir, handoff_ttl_ms=300) as (rig, pages, gateway):
        pages.free = 4
        for name in "abc":  # 11 pages each and 2 for the answer, of 4 tokens; 4 for the one that runs
            hand_over(rig, gateway, name)
        await until(lambda: {"h-a", "h-b", "h-c"} <= set(pages.kept[3:]))
        assert asked(pages) == []
        assert rig.room.now == Room(num_blocks=100, free_blocks=4, owed_blocks=4 + 3 * 13, answer_tokens=64)
        pages.free = 17
        await until(lambda: asked(pages))
        await until(lambda: rig.room.now.owed_blocks == 4 + 2 * 13)
        assert asked(pages) == ["h-a"]
        pages.free = 100
        for name in "abc":
            await gateway.end_of(name)
        assert asked(pages) == ["h-a", "h-b", "h-c"]
        assert gateway.ends["c"].receipt.room_wait_ms > 0
        await until(lambda: rig.room.now.owed_blocks == 4)


async def test_a_prompt_whose_blocks_came_ahead_begins_in_the_room_that_they_take(model_dir):
    async with door(model_dir) as (rig, pages, gateway):
        pages.free, pages.ahead = 9, 8  # 4 for the one that runs, 11 and 2 for this one
        await until(lambda: rig.room.now.free_blocks == 17)
        hand_over(rig, gateway, "a")
        await gateway.end_of("a")
        # it may have to ask anew, but does not wait for its time's end
        assert gateway.ends["a"].receipt.room_wait_ms < 10_000


async def test_who_leaves_while_it_waits_makes_place_for_the_next(model_dir):
    async with door(model_dir) as (rig, pages, gateway):
        pages.free = 12
        await until(lambda: rig.room.now.free_blocks == 12)
        hand_over(rig, gateway, "large", num_tokens=200)
        hand_over(rig, gateway, "small", num_tokens=8)
        await until(lambda: rig.room.now.owed_blocks > 40)
        assert asked(pages) == []
        gateway.abort("large")
        await gateway.end_of("small")
        assert asked(pages) == ["h-small"]


@pytest.mark.parametrize("why", ["its time", "idle", "died", "cannot count", "silent", "same pages", "off"])
async def test_nobody_waits_for_ever_or_where_waiting_helps_nobody(model_dir, why):
    soon = {"handoff_room_ms": 100, "handoff_ttl_ms": 300}
    settings = {"its time": soon, "silent": soon, "off": {"handoff_room_ms": 0}}.get(why, {})
    async with door(model_dir, **settings) as (rig, pages, gateway):
        pages.free = 7  # enough for the answer, not for the prompt
        await until(lambda: rig.room.now.free_blocks == 7)
        hand_over(rig, gateway, "a", source="decode-0" if why == "same pages" else "prefill-0")
        if why == "idle":
            rig.seen = EngineRoom(unused=0, own=20, in_use=20, needs=[], answer_tokens=64)
        elif why == "died":
            rig.seen = PeerGone("the engine died")
        elif why == "cannot count":
            rig.seen = RuntimeError("Call to quire_room method failed")
        elif why == "silent":
            rig.answers.clear()
        await gateway.end_of("a")
        assert asked(pages) == ["h-a"]


@pytest.mark.parametrize(
    ("mode", "num_made", "waits"),
    [("continue", 1, True), ("continue", 5, False), ("resample", 0, True), ("resample", 1, False)],
)
async def test_a_stream_that_lost_its_instance_waits_for_nobody(model_dir, mode, num_made, waits):
    """Its next token is due in gateway.resume_deadline_ms; of a first attempt, prefill alone has made one, if that."""
    async with door(model_dir) as (rig, pages, gateway):
        handoff = HandoffState(
            handoff_id=HandoffId("h-a"), source=InstanceId("prefill-0"), description=rig.engine.description,
            valid_tokens=40, mode=mode, output_token_ids=[7],
        )  # fmt: skip
        gateway.generate(
            "a", list(range(3, 43)), stage="decode", handoff=handoff, max_tokens=8, num_output_tokens=num_made
        )
        await until(lambda: pages.kept if waits else asked(pages))
        assert (asked(pages), bool(pages.kept)) == (([], True) if waits else (["h-a"], False))
        pages.free = 100
        await gateway.end_of("a")


async def test_pages_that_another_hosts_mempool_holds_are_waited_for_within_their_time(model_dir):
    async with door(model_dir, handoff_ttl_ms=200) as (rig, pages, gateway):
        pages.peer_address = "tcp://b:1"
        handoff = HandoffState(
            handoff_id=HandoffId("h-a"), source=InstanceId("p"), description=rig.engine.description, valid_tokens=40,
            source_mempool="tcp://a:1",
        )  # fmt: skip
        began_s = asyncio.get_running_loop().time()
        gateway.generate("a", list(range(3, 43)), stage="decode", handoff=handoff, max_tokens=8)
        await gateway.end_of("a")
        assert asyncio.get_running_loop().time() - began_s >= 0.1
        assert (asked(pages), pages.kept) == (["h-a"], [])
