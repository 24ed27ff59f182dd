"""How much room the engine core's requests leave each other in its pages: counted there, asked for by the front."""

from typing import Any

from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from shared.engine.interface import EngineRoom
from shared.room.answers import AnswerLengths
from shared.room.growth import Need


def note_answer(answers: AnswerLengths, request: Request) -> None:
    """The request is over."""
    answers.note(request.num_output_tokens, ended=request.status == RequestStatus.FINISHED_STOPPED)


def room_of(scheduler: Any) -> dict[str, Any]:
    """What room_from() takes. Cost: O(requests), on the engine core's thread."""
    pages, manager, block_tokens = scheduler.pages, scheduler.kv_cache_manager, scheduler.block_size
    answers: AnswerLengths = scheduler.answers
    held: list[int] = []
    more: list[int] = []
    for name, request in scheduler.requests.items():
        lease = len(scheduler.leases[name][1]) if name in scheduler.leases else 0
        have = len(manager.get_blocks(name).blocks[0])
        tail = int(not have and lease > 0)  # the handed-over last block is copied
        answer = answers.expected(request.max_tokens, request.num_output_tokens)
        whole = -(-min(request.num_prompt_tokens + answer, scheduler.max_model_len) // block_tokens)
        held.append(have or lease)
        more.append(max(0, whole + tail - held[-1]))
    unused = len(pages.stock) + pages.free_block_queue.num_free_blocks
    own = pages.num_owned - unused
    granted = pages.quota.num_granted  # an engine without a step, a new one above all, has not taken them in
    return {
        "unused": unused + granted, "own": own, "in_use": pages.num_in_use(),
        "held": held, "more": more, "answer_tokens": answers.expected(scheduler.max_model_len),
    }  # fmt: skip


def room_from(said: dict[str, Any]) -> EngineRoom:
    """At the front."""
    needs = [Need(*each) for each in zip(said["held"], said["more"], strict=True)]
    return EngineRoom(said["unused"], said["own"], said["in_use"], needs, said["answer_tokens"])


def _room(core: EngineCore) -> dict[str, Any]:
    return room_of(core.scheduler)


def _pages_in_use(core: EngineCore) -> int:
    return core.scheduler.pages.num_in_use()


def install() -> None:
    """Before an engine core is made in this process, or in one that is forked from it: `quire_room` and
    `quire_pages_in_use` may be asked.
    """
    EngineCore.quire_room = _room
    EngineCore.quire_pages_in_use = _pages_in_use
