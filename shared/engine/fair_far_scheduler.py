"""Fair slices (fair_scheduler.py) in an engine whose blocks may lie outside its memory (far_scheduler.py).

Far places count as memory, and are the swap space: requests take turns as long as all of them fit into the engine's
memory and far places together. Blocks of parked requests leave like those of running ones, and stay there: who takes
its turn reads them in place, and nothing has to come back first. Where even that is short the order is that of arrival,
as it is without swap space.
"""

from itertools import islice

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from shared.engine.fair_scheduler import FairSchedulerMixin
from shared.engine.far_scheduler import FarSchedulerMixin
from shared.engine.swap_scheduler import STUCK_S
from shared.fair.far import PATIENCE_S


class FairFarSchedulerMixin(FairSchedulerMixin, FarSchedulerMixin):
    """Fair slices decide who runs, far places where its blocks are."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # pyright: ignore[reportArgumentType]
        self._swaps = False
        self._limits_parked = True  # the last block of each stays in this engine's own memory
        self._losing: list[
            Request
        ] = []  # bytes of them are nowhere; a step under way reads them where they were

    # -- whose pages are wanted, and whose leave --------------------------------------------------------

    def _next(self) -> list[Request]:
        """And those that are to start, as far as there are slots."""
        vacant = self.max_num_running_reqs - len(self.running)
        return [*self.running, *islice(self.waiting, max(0, vacant))]

    def _givers(self) -> list[Request]:
        """And those that are parked."""
        return [*self.running, *self._parked.values()]

    def _num_on_the_way(self) -> int:
        assert self.far is not None
        fenced = sum(len(blocks) for _, blocks in self._fenced)
        return super()._num_on_the_way() + fenced + self.far.num_asked

    # -- pages are short --------------------------------------------------------------------------------

    def _schedule(self, *args: object, **kwargs: object) -> SchedulerOutput:
        for request in list(self._losing):
            if request.request_id not in self._parked:  # it got its slot in the step in which that was heard
                super()._lose(request)
            elif not self._in_flight(request):
                self._drop(request)
        output = super()._schedule(*args, **kwargs)
        self._end_a_stall()
        return output

    def _starved(self) -> list[Request]:
        """And where nobody runs, and no page comes for who is first: who has begun and needs none goes before it, since
        vLLM stops at the first that finds none. So it is where parked requests share most of what is here, which may
        not leave.
        """
        held = super()._starved()
        if self.waiting and self._is_stalled(0.0):
            stock, tokens = len(self.pages.stock), self.max_num_scheduled_tokens
            fit = [r for r in self.waiting if self._missing(r, tokens)[0] <= stock]
            if self.waiting.peek_request() not in fit:
                self._put_first([r.request_id for r in fit if r.request_id in self._parked])
        return held

    def _is_stalled(self, patience_s: float) -> bool:
        """Whether nobody runs, for so long, and no page is on its way."""
        assert self.far is not None
        now_s = self.pages.clock()
        if self.running or not self._idle_since_s or now_s - self._idle_since_s < patience_s:
            return False
        return not (self._fenced or self.pages.num_expected or self.far.is_worth_waiting(now_s))

    def _end_a_stall(self) -> None:
        """Nobody runs, and no page comes of itself: who is furthest from its turn gives its own up.

        Soon where this engine has as many pages as ever: else the others may come back. That is believed once.
        """
        if not self._is_stalled(STUCK_S if self.pages.num_owned >= self._most_owned else PATIENCE_S):
            return
        self._most_owned = self.pages.num_owned
        accounts = self.slices.accounts.requests
        parked = [r for r in self._parked.values() if not self._in_flight(r)]
        if len(parked) > 1:
            self._drop(max(parked, key=lambda r: self.slices.order_key(accounts[r.request_id])))
            self._idle_since_s = self.pages.clock()

    def _is_stuck(self, request: Request | None) -> bool:
        """Not while pages are on their way: two requests, each in its turn without them, would drop one another and
        compute the same prompts again and again.
        """
        assert self.far is not None
        now_s = self.pages.clock()
        may_come = self._num_on_the_way() > 0 or self.far.is_worth_waiting(now_s)
        if may_come and self._idle_since_s and now_s - self._idle_since_s < PATIENCE_S:
            return False
        return super()._is_stuck(request)

    def _lose(self, request: Request) -> None:
        if request.request_id in self._parked:
            self._losing.append(request)
        else:
            super()._lose(request)

    def _drop(self, request: Request) -> None:
        assert self.far is not None
        self._forget(request)
        super()._drop(request)
        self.pages.far_room = self.far.spare

    def _forget(self, request: Request) -> None:
        super()._forget(request)
        self._losing = [r for r in self._losing if r is not request]


class FairFarPageScheduler(FairFarSchedulerMixin, Scheduler):
    """One step at a time."""


class AsyncFairFarPageScheduler(FairFarSchedulerMixin, AsyncScheduler):
    """The next step is scheduled while one runs."""
