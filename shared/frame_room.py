"""Room for Python's frames, so that no hot loop lives on the edge of a chunk.

CPython 3.11 and 3.12 keep the frames of a thread in chunks of 16 KiB, mapped when a call does not fit into the last
one and unmapped when it returns (push_chunk and _PyThreadState_PopFrame in Python/pystate.c). Whoever calls in a loop
at just that depth pays two system calls and a page fault each time: 4 us where a call takes 40 ns. Which loop it hits
hangs on all frames below it. In an engine core it was the one that launches a model's layers (decision 0043).
"""

from collections.abc import Callable
from types import FunctionType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# A frame that asks for more than 256 KiB gets a chunk of 512 KiB, the next power of two. What it leaves is for callees.
FRAME_BYTES = (256 << 10) + (4 << 10)
SLOT_BYTES = 8


def _call(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    return call(*args, **kwargs)


_call_in_a_large_frame = FunctionType(
    _call.__code__.replace(co_stacksize=FRAME_BYTES // SLOT_BYTES), {}, "with_frame_room"
)


def with_frame_room(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What call(...) returns or raises; its callees' frames, about 250 KiB of them, share one chunk while it runs.

    For the outermost call of a thread, once. What it forks keeps the room; threads and spawned processes do not. Costs
    512 KiB of address space, of which only what is used becomes memory.
    """
    return _call_in_a_large_frame(call, *args, **kwargs)
