"""What an attempt says and counts, however it ends: by itself, by a stop string, by the engine's word."""

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from shared.engine.interface import EngineDelta, HeldPages, KvUse
from shared.engine.worker_attempt import Attempt, AttemptContext
from shared.engine.worker_pages import NOTHING_BROUGHT
from shared.ids import BlockHash, Epoch, HandoffId, InstanceId, PageId, RequestId
from shared.kv.block_hash import pack_tokens
from shared.wire.handoff import HandoffState
from shared.wire.requests import Failed, Finished, Generate, SamplingSpec, StructuredSpec
from tests.support.control_plane import description
from tests.unit.mempool_harness import DESCRIPTION

PROMPT = list(range(1, 11))
USE = KvUse(tokens_engine=1, tokens_pool=5, tokens_computed=4, blocks_moved=2, bytes_moved=128, queue_ms=3.0)
COUNTED = {
    ("quire_worker_prompt_tokens_total", "source", "engine"): 1,
    ("quire_worker_prompt_tokens_total", "source", "pool"): 5,
    ("quire_worker_prompt_tokens_total", "source", "computed"): 4,
    ("quire_worker_kv_blocks_total", "what", "moved"): 2,
}
STRUCTURED = StructuredSpec(kind="regex", value=r"<tool_call>\{.{0,5}\}</tool_call>")


class Engine:
    """Says these deltas, then nothing more."""

    device, keeps_leases = "mock", False
    description = SimpleNamespace(fingerprint="f")

    def __init__(self, *deltas: EngineDelta) -> None:
        self.deltas = deltas
        self.asked: list[Any] = []
        self.early: list[Any] = []
        self.dropped: list[str] = []

    def send_early(self, request: Any) -> None:
        self.early.append(request)

    def drop_early(self, engine_request_id: str) -> None:
        self.dropped.append(engine_request_id)

    async def generate(self, request: Any):
        self.asked.append(request)
        for delta in self.deltas:
            yield delta
        await asyncio.Event().wait()


class Outbox:
    """Keeps all."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.came = asyncio.Event()

    def chunk(self, identity: bytes, message: Any) -> None:
        self.said.append(message)
        self.came.set()

    terminal = chunk


async def run(*deltas: EngineDelta, stops: bool = False, **sampling: Any) -> list[Any]:
    """What the attempt says. `stops`: the gateway has enough with the first word of it."""
    return await run_in(Engine(*deltas), stops=stops, **sampling)


async def run_in(
    engine: Engine,
    *,
    stops: bool = False,
    handoff: HandoffState | None = None,
    pages: Any = None,
    **sampling: Any,
) -> list[Any]:
    """In this engine. `handoff`: with which a decode stage begins. `pages`: none by default."""
    outbox = Outbox()

    async def nothing_held(*_: Any) -> None:
        return None

    pages = pages or SimpleNamespace(
        usable=True, peer_address="", for_prompt=nothing_held, for_handoff=nothing_held
    )
    context = AttemptContext(
        instance=InstanceId("w"), settings=SimpleNamespace(max_deadline_ms=60_000), engine=engine,
        pages=pages, outbox=outbox, on_engine_died=pytest.fail, on_invariant_broken=pytest.fail,
    )  # type: ignore[arg-type]  # fmt: skip
    message = Generate(
        request_id=RequestId("r"), attempt=1, stage="decode" if handoff else "colocated",
        instance_epoch=Epoch(1), handoff=handoff,
        sampling=SamplingSpec(max_tokens=9, temperature=0, **sampling), deadline_ms=60_000,
    )  # fmt: skip
    task = asyncio.create_task(Attempt(context, b"gw", message, pack_tokens(PROMPT), PROMPT, 1).run())
    if stops:
        await outbox.came.wait()
        task.cancel()
    await task
    return outbox.said


async def test_a_hand_off_is_told_of_when_it_comes_however_long_it_waits_for_room():
    waits = asyncio.Event()

    async def enter(*_: Any) -> float:
        waits.set()
        return await asyncio.Event().wait() or 0.0

    context = AttemptContext(
        instance=InstanceId("w"), settings=SimpleNamespace(max_deadline_ms=60_000), engine=Engine(),
        pages=SimpleNamespace(usable=True, peer_address=""), outbox=Outbox(), on_engine_died=pytest.fail,
        on_invariant_broken=pytest.fail, room=SimpleNamespace(enter=enter, leave=lambda _: None),
    )  # type: ignore[arg-type]  # fmt: skip
    handoff = HandoffState(
        handoff_id=HandoffId("h"), source=InstanceId("p"), description=description(), valid_tokens=10
    )
    message = Generate(
        request_id=RequestId("r"), attempt=2, stage="decode", instance_epoch=Epoch(1), handoff=handoff,
        sampling=SamplingSpec(max_tokens=9, temperature=0), deadline_ms=60_000,
    )  # fmt: skip
    task = asyncio.create_task(Attempt(context, b"gw", message, pack_tokens(PROMPT), PROMPT, 1).run())
    await waits.wait()
    assert list(context.cost.arrived) == [("r", 2)]
    task.cancel()
    await task


def counts() -> dict[tuple[str, str, str], float]:
    return {
        key: REGISTRY.get_sample_value(key[0], {key[1]: key[2]}) or 0.0 for key in COUNTED
    } | {("bytes", "", ""): REGISTRY.get_sample_value("quire_worker_kv_bytes_moved_total") or 0.0}  # fmt: skip


def counted(before: dict[tuple[str, str, str], float]) -> dict[tuple[str, str, str], float]:
    return {key: value - before[key] for key, value in counts().items() if value > before[key]}


FIRST = EngineDelta(0, [7], kv_use=USE)
ALL = {**COUNTED, ("bytes", "", ""): 128}


async def test_a_request_that_a_stop_string_ended_counts_where_its_prompt_came_from():
    before = counts()
    first, *rest = await run(FIRST, stops=True)
    assert rest == []
    assert counted(before) == ALL
    assert (first.receipt.blocks_moved, first.receipt.bytes_moved, first.receipt.path) == (2, 128, "memfd")


async def test_a_request_that_ended_by_itself_counts_it_once():
    before = counts()
    *_, end = await run(FIRST, EngineDelta(0, [8], "length", request_done=True, kv_use=USE))
    assert isinstance(end, Finished)
    assert counted(before) == ALL


async def test_each_choice_that_tells_more_of_its_kv_is_told_to_the_gateway():
    more = KvUse(tokens_pool=5, blocks_moved=3, bytes_moved=192)
    last = EngineDelta(1, [8], "length", request_done=True, kv_use=more)
    said = await run(FIRST, EngineDelta(1, [7], kv_use=more), EngineDelta(0, [8], "length"), last, n=2)
    told = [chunk.receipt.blocks_moved if chunk.receipt else None for chunk in said[:-1]]
    assert told == [2, 3, None, None]


@pytest.mark.parametrize("structured", [None, STRUCTURED])
async def test_a_request_that_the_engine_refuses_fails_for_good_and_says_why(structured):
    [failed] = await run(EngineDelta(0, [5], "error", request_done=True, kv_use=USE), structured=structured)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.retryable) == ("cluster.error", False)
    assert failed.message.startswith("The engine could not go on with this request.")
    assert ("special token" in failed.message) == (structured is not None)


async def test_a_request_that_the_engine_lets_go_may_be_tried_again():
    [failed] = await run(EngineDelta(0, [], "abort", request_done=True))
    assert isinstance(failed, Failed)
    assert (failed.code, failed.retryable) == ("resource.error", True)
    assert failed.message.endswith(".")


@pytest.mark.parametrize(("says", "handed"), [(6, 6), (10, 10), (37, 10)])
async def test_a_hand_off_hands_over_no_more_than_the_prompt(says, handed):
    """An engine looks for the hash of the block in which what was handed over ends."""
    handoff = HandoffState(
        handoff_id=HandoffId("h"), source=InstanceId("p"), description=DESCRIPTION, valid_tokens=says
    )
    engine = Engine(EngineDelta(0, [7], "length", request_done=True, kv_use=USE))
    await run_in(engine, handoff=handoff)
    assert [request.handed_tokens for request in engine.asked] == [handed]


async def test_the_engine_has_the_request_before_its_lease_and_nothing_else_of_it_changes():
    engine = Engine(FIRST, EngineDelta(0, [8], "length", request_done=True, kv_use=USE))
    pages: Any = SimpleNamespace(usable=True, peer_address="", release=lambda _: None)
    held = HeldPages(pages=[PageId(1)], epochs=[Epoch(1)], hashes=[BlockHash(b"h" * 32)], valid_tokens=8)
    seen: list[int] = []

    async def for_prompt(*_: Any) -> Any:
        seen.append(len(engine.early))
        return SimpleNamespace(held=held, brought=NOTHING_BROUGHT, lease_id="l")

    pages.for_prompt = for_prompt
    await run_in(engine, pages=pages)
    assert seen == [1]
    [early], [asked] = engine.early, engine.asked
    assert (early.held, asked.held) == (None, held)
    assert dataclasses.replace(asked, held=None, held_digest=b"") == early
    assert early.packed_prompt == pack_tokens(PROMPT)
    assert engine.dropped == [early.engine_request_id]


async def test_a_client_that_leaves_while_its_pages_come_leaves_nothing_with_the_engine():
    engine, waits = Engine(FIRST), asyncio.Event()

    async def for_prompt(*_: Any) -> Any:
        waits.set()
        await asyncio.Event().wait()

    pages: Any = SimpleNamespace(usable=True, peer_address="", for_prompt=for_prompt)
    task = asyncio.create_task(run_in(engine, pages=pages))
    await waits.wait()
    task.cancel()
    assert await task == []
    assert engine.asked == []
    assert engine.dropped == [request.engine_request_id for request in engine.early]
    assert len(engine.early) == 1


async def test_a_prompt_whose_log_probabilities_are_asked_for_waits_for_no_lease():
    engine = Engine(FIRST, EngineDelta(0, [8], "length", request_done=True, kv_use=USE))
    await run_in(engine, prompt_logprobs=1)
    assert (engine.early, len(engine.asked)) == ([], 1)
