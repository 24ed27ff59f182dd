"""A long prompt goes to the engine core while its pages come; the lease that pins them follows.

Until the core's scheduler knows a prompt of 100K ids, vLLM checks each of them, encodes and decodes them, makes lists
of them and hashes them: 8 ms and more, in which the GPU has nothing to do. Of a request whose pages are fetched all of
this is done meanwhile: vLLM's add_request() runs at once, the core keeps the request aside (EarlyRequests), and
`quire_lease_came` makes it one that waits for its turn. An abort ends it wherever it is: both go the same way, one
behind the other.
"""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from shared.engine.block_hasher import given
from shared.engine.long_lists import TokenIds
from shared.observe import metrics

logger = logging.getLogger(__name__)

EXIT_LEASE_LOST = 4  # of the engine core
EARLY_KEY, PACKED = "early", "packed"  # among what the front sends along
TURN_S = 0.0002  # that a thread of the core keeps the interpreter, while a long prompt is taken in


# -- the front ------------------------------------------------------------------------------------------


class EarlyStream:
    """What vLLM's generate() yields, begun before anybody waits for it.

    Args: make: calls generate(). It is called when the caller gives the loop away, which has told the mempool by then
        what is wanted.
    """

    def __init__(self, make: Callable[[], AsyncGenerator[RequestOutput, None]]) -> None:
        self._stream: AsyncGenerator[RequestOutput, None] | None = None
        self._first: asyncio.Future[RequestOutput] | None = asyncio.ensure_future(self._begun(make))
        self.sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_first(self, callback: Callable[[], Any]) -> None:
        """Called when there is an output, or when there will be none."""
        assert self._first is not None
        self._first.add_done_callback(lambda _: callback())

    async def _begun(self, make: Callable[[], AsyncGenerator[RequestOutput, None]]) -> RequestOutput:
        self._stream = make()
        return await anext(self._stream)

    async def is_sent(self) -> bool:
        """Waits until it is; False if it never will be: then the first output is an error."""
        if self._first is not None:
            await asyncio.wait((self.sent, self._first), return_when=asyncio.FIRST_COMPLETED)
        return self.sent.done()

    def __aiter__(self) -> "EarlyStream":
        return self

    async def __anext__(self) -> RequestOutput:
        if self._first is None:
            assert self._stream is not None
            return await anext(self._stream)
        output = await self._first
        self._first = None
        return output

    async def aclose(self) -> None:
        """End the request, if it has not ended."""
        first, self._first = self._first, None
        if first is not None:
            first.cancel()
            await asyncio.wait((first,))
            if not first.cancelled():
                first.exception()  # nobody else asks
        if self._stream is not None:
            await self._stream.aclose()


class EarlyStreams:
    """Of one engine's front, on its loop: requests that the core has, or will have at once, before their leases.

    Args: engine_core: vLLM's client of it. From now on it sends requests with PACKED without their lists.
    """

    def __init__(self, engine_core: Any) -> None:
        self._begun: dict[str, EarlyStream] = {}
        self._sending: dict[str, EarlyStream] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._total = metrics.counter(
            "quire_worker_early_requests_total",
            "Long prompts that went to the engine core before their leases.",
        )
        self._stock_send = engine_core.add_request_async
        engine_core.add_request_async = self._send

    def begin(self, key: str, make: Callable[[], AsyncGenerator[RequestOutput, None]]) -> None:
        """Send it. Args: key: told to the core as EARLY_KEY; make: see EarlyStream."""
        early = self._begun[key] = self._sending[key] = EarlyStream(make)
        early.on_first(lambda: self._sending.pop(key, None))
        self._total.inc()

    def take(self, key: str) -> EarlyStream | None:
        """The caller closes it. None: it was not begun early."""
        return self._begun.pop(key, None)

    def drop(self, key: str) -> None:
        """Nobody will take it. Unknown keys, and those that were taken, are ignored."""
        if (stream := self._begun.pop(key, None)) is not None:
            task = asyncio.get_running_loop().create_task(stream.aclose())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _send(self, request: EngineCoreRequest) -> None:
        brought = given(request)
        if PACKED in brought:
            request.prompt_token_ids = []  # the front's own state has the list already
        await self._stock_send(request)
        if (stream := self._sending.pop(brought.get(EARLY_KEY), None)) is not None and not stream.sent.done():
            stream.sent.set_result(None)


# -- the engine core ------------------------------------------------------------------------------------


class EarlyRequests:
    """Part of the scheduler: requests whose leases are to come, in none of vLLM's queues."""

    _early: dict[str, Request]
    _early_keys: dict[str, str]  # by vLLM's id of the request

    def keep_early(self, request: Request) -> bool:
        """Whether it is one: then it waits for lease_came()."""
        key = given(request).get(EARLY_KEY)
        if not key:
            return False
        self._early[key], self._early_keys[request.request_id] = request, key
        return True

    def take_early(self, key: str, params: dict[str, Any]) -> Request | None:
        """The request, complete. None: it was aborted; whoever has the lease asks whether this engine knows it."""
        if (request := self._early.pop(key, None)) is not None:
            del self._early_keys[request.request_id]
            del given(request)[EARLY_KEY]
            given(request).update(params)
        return request

    def finish_early(self, request_ids: Any, status: RequestStatus) -> list[Request]:
        """Those among them, ended. Args: request_ids: as Scheduler.finish_requests() has it."""
        if not self._early:
            return []
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        ids = list(self._early_keys if ids is None else ids)
        ended = [self._early.pop(self._early_keys.pop(i)) for i in ids if i in self._early_keys]
        for request in ended:
            request.status = status
        return ended


@contextmanager
def _short_turns() -> Iterator[None]:
    """Threads that ask for the interpreter get it after TURN_S instead of Python's 5 ms: the one that gives the mempool
    its pages back (pool_watch.py) is asked for those of this very prompt meanwhile. One thread at a time is here.
    """
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(min(usual_s, TURN_S))
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)


def _with_packed(stock: Callable[..., Any]) -> Callable[..., Any]:
    def preprocess_add_request(core: EngineCore, request: EngineCoreRequest) -> Any:
        """vLLM's, on the thread that reads what the front sends."""
        if (packed := given(request).pop(PACKED, None)) is None:
            return stock(core, request)
        with _short_turns():
            request.prompt_token_ids = TokenIds(packed)
            return stock(core, request)

    preprocess_add_request.knows_packed = True  # type: ignore[attr-defined]
    return preprocess_add_request


def _lease_came(core: EngineCore, key: str, params: dict[str, Any]) -> None:
    try:
        core.scheduler.lease_came(key, params)
    except Exception:
        # as one in add_request() would: what was half taken over must not serve anybody
        logger.critical("a lease could not be taken over: the engine begins anew", exc_info=True)
        os._exit(EXIT_LEASE_LOST)


def install() -> None:
    """Before an engine core is made in this process, or in one forked from it. A second call changes nothing."""
    if not getattr(EngineCore.preprocess_add_request, "knows_packed", False):
        EngineCore.preprocess_add_request = _with_packed(EngineCore.preprocess_add_request)
    EngineCore.quire_lease_came = _lease_came
