"""The profiler's runs on a real cluster: load through its gateway, memory from its workers' status pages.

Workers say the bytes that requests use, not what is only cached, so the most of many readings is the KV that requests
needed; and the bytes that their engine may have, without what others lend it. A cluster with several instances is
profiled as one: its memory is that of the instances that hold contexts (decode and colocated ones), and the fullest of
them speaks for all.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.http_client import Client
from loadtest.open_loop import OpenLoop, Plan, verdict
from loadtest.outcomes import Outcome
from loadtest.profiler.runner import Observed, Spans, Told
from loadtest.workloads.request import Request
from loadtest.workloads.tokens import TokenRange
from shared import http_get
from shared.errors import ClusterError, PeerGone, SettingsError

FULL_SHARE = 0.9  # above it what waits waits for memory
GET_TIMEOUT_S = 5.0
GONE_LIMIT_S = 15.0  # without an answer a status page's worker is gone
MAX_REPLY_BYTES = 8 << 20
IDLE_LIMIT_S, IDLE_PAUSE_S = 120.0, 0.1
SAMPLES_LOST = 0.5  # of the readings of memory, at most

# as the load goes, whatever http_proxy says


class RunSaysNothing(ClusterError):
    """The load generator was the bottleneck, or memory could not be read: repeat it on a quieter machine."""

    code = "profile.run_says_nothing"


class RequestRefused(ClusterError):
    """The server would not serve such a request at any rate: see the reason that it gives."""

    code = "profile.request_refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """statuses: status pages of all workers. sample_ms: between two readings of memory."""

    url: str
    statuses: tuple[str, ...]
    bearer: str = ""
    model: str = ""
    ids: TokenRange = field(default_factory=TokenRange)
    max_in_flight: int = 4_096
    max_lag_ms: float = 100.0
    timeout_s: float = 600.0
    sample_ms: float = 200.0


@dataclass(frozen=True, slots=True)
class Holder:
    """An instance that holds contexts. Bytes are of one of its GPUs."""

    status_url: str
    model: str
    pool_bytes: int  # its KV memory
    block_tokens: int
    block_bytes: int
    tp: int


class LiveRunner:
    """context_tokens: of the served model; 0: the server does not say.

    Raises (constructor): PeerGone when gateway or workers do not answer, SettingsError when they are no workers.
    """

    def __init__(self, options: LiveOptions, *, tell: Told = lambda text: None) -> None:
        self._options, self._tell = options, tell
        pages = [(url, _read(url)) for url in options.statuses]
        holders = [one for url, page in pages if (one := _holder(url, page)) is not None]
        if not holders:
            raise SettingsError(
                f"none of {', '.join(options.statuses) or 'no status pages'} is of a decode worker"
            )
        self._holders = holders
        least = min(holders, key=lambda one: one.pool_bytes)
        self.model, self.context_tokens = _served(options)
        self.tp = least.tp
        # of a step with prompts in it; 0: they do not say
        steps = [page.get("max_batched_tokens") or 0 for _, page in pages if page.get("role") != "decode"]
        self.chunk_tokens = min(steps, default=0)
        self.num_instances = len(holders)
        self.pool_bytes = least.pool_bytes
        self.bytes_per_token = least.block_bytes / least.block_tokens / len(holders)
        self.words = f"measured at {options.url}, {len(holders)} instance{'s' * (len(holders) > 1)}"
        self.is_calibrated = True

    def run(self, requests: Sequence[Request]) -> Observed:
        """See Runner. Raises: RunSaysNothing, RequestRefused, PeerGone."""
        return asyncio.run(self._run(requests))

    async def _run(self, requests: Sequence[Request]) -> Observed:
        options = self._options
        await self._wait_idle()
        plan = Plan(
            model=self.model,
            token_ids=True,
            receipts=False,
            ids=options.ids,
            max_in_flight=options.max_in_flight,
            timeout_s=options.timeout_s,
            max_lag_ms=options.max_lag_ms,
        )
        client = Client(options.url, bearer=options.bearer)
        loop = OpenLoop(client, plan, progress=lambda *_: self._stop_in_vain(loop, sending))
        sending = asyncio.create_task(loop.run(requests))
        watch = _Watch(self._holders, options.sample_ms)
        watching = asyncio.create_task(watch.run())
        try:
            outcomes = await sending
        except asyncio.CancelledError:
            self._check(loop)
            raise
        finally:
            client.close()
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        self._check(loop)
        if any(one.error for one in outcomes):
            await asyncio.to_thread(self._check_all_answer)
        if why := verdict(outcomes, plan):
            raise RunSaysNothing(f"the client was the bottleneck: {why}")
        watch.check()
        for text in sorted({one.error for one in outcomes if one.error})[:3]:
            self._tell(f"  error: {text[:200]}")
        gaps = [(gap_ms, 1.0) for gap_ms in loop.gaps_ms]
        return Observed(outcomes, gaps, max(watch.peaks), watch.full.spans)

    @staticmethod
    def _stop_in_vain(loop: OpenLoop, sending: "asyncio.Task[list[Outcome]]") -> None:
        """The rest of a run is not sent where the first answers decide it."""
        if (loop.refused or loop.unreached) and not sending.cancelling():
            sending.cancel()

    def _check(self, loop: OpenLoop) -> None:
        """Raises: RequestRefused, PeerGone."""
        if loop.refused:
            raise RequestRefused(f"{self._options.url} refuses what it is asked: {loop.refused}")
        if loop.unreached:
            raise PeerGone(f"{self._options.url} does not answer any more: {loop.unreached}")

    def _check_all_answer(self) -> None:
        """Whether what failed is what the load did, and not that somebody is gone. Raises: PeerGone."""
        _read(f"{self._options.url}/v1/models", self._options.bearer)
        for url in self._options.statuses:
            _read(url)

    async def _wait_idle(self) -> None:
        """What the run before left must not be seen as this one's. Raises: PeerGone, RunSaysNothing."""
        heard_s = time.monotonic()
        until_s = heard_s + IDLE_LIMIT_S
        while True:
            found = await _read_all(self._holders)
            silent = [one.status_url for one, page in zip(self._holders, found, strict=True) if page is None]
            if not silent:
                heard_s = time.monotonic()
            elif time.monotonic() > heard_s + GONE_LIMIT_S:
                raise PeerGone(f"{silent[0]} does not answer any more: its worker is gone")
            if all(one is not None and not one["num_running"] + one["num_waiting"] for one in found):
                return
            if time.monotonic() > until_s:
                raise RunSaysNothing(
                    f"the cluster was not idle within {IDLE_LIMIT_S:g} s: something else uses it"
                )
            await asyncio.sleep(IDLE_PAUSE_S)


class _Watch:
    """Reads all holders again and again until it is cancelled."""

    def __init__(self, holders: Sequence[Holder], sample_ms: float) -> None:
        self._holders, self._pause_s = holders, sample_ms / 1000
        self.peaks = [0] * len(holders)  # bytes
        self.full = Spans()
        self._num_read = self._num_lost = 0

    async def run(self) -> None:
        began_s = time.monotonic()
        was_ms = 0.0
        while True:
            found = await _read_all(self._holders)
            now_ms = (time.monotonic() - began_s) * 1000
            holds = False
            for place, one in enumerate(found):
                self._num_read += 1
                if one is None:
                    self._num_lost += 1
                    continue
                used_bytes = int(one["kv_used_bytes"])
                self.peaks[place] = max(self.peaks[place], used_bytes)
                share = max(float(one["kv_used_share"]), used_bytes / self._holders[place].pool_bytes)
                holds = holds or (share >= FULL_SHARE and bool(one["num_waiting"]))
            self.full.note(was_ms, now_ms, holds=holds)
            was_ms = now_ms
            await asyncio.sleep(self._pause_s)

    def check(self) -> None:
        """Raises: RunSaysNothing when too few readings came back, PeerGone when none did."""
        if self._num_lost == self._num_read > 0:
            raise PeerGone(f"{self._holders[0].status_url} does not answer any more: its worker is gone")
        if self._num_lost > SAMPLES_LOST * self._num_read:
            raise RunSaysNothing(
                f"{self._num_lost} of {self._num_read} readings of the workers' memory failed"
            )


async def _read_all(holders: Sequence[Holder]) -> list[dict[str, Any] | None]:
    reads = (asyncio.to_thread(_read_or_none, one.status_url) for one in holders)
    return list(await asyncio.gather(*reads))


def _read_or_none(url: str) -> dict[str, Any] | None:
    try:
        return _read(url)
    except PeerGone:
        return None


def _read(url: str, bearer: str = "") -> dict[str, Any]:
    """A JSON object by GET. Raises: PeerGone."""
    headers = {"authorization": f"Bearer {bearer}"} if bearer else {}
    try:
        with http_get.open_directly(url, timeout_s=GET_TIMEOUT_S, headers=headers) as reply:
            found = json.loads(reply.read(MAX_REPLY_BYTES))
    except http_get.NO_ANSWER as error:
        raise PeerGone(f"{url} does not answer: {error}") from error
    return found if isinstance(found, dict) else {}


def _holder(url: str, found: dict[str, Any]) -> Holder | None:
    """None: an instance that prefills only, so that no context stays there. Raises: SettingsError."""
    if found.get("role") == "prefill":
        return None
    try:
        holder = Holder(
            url,
            str(found["model"]),
            int(found["kv_pool_bytes"]),
            int(found["block_tokens"]),
            int(found["block_bytes"]),
            int(found["tensor_parallel"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SettingsError(f"{url} is no status page of a worker: it lacks {error}") from error
    if holder.pool_bytes <= 0 or holder.block_tokens <= 0:
        raise SettingsError(f"{url} does not say how large the engine's KV memory is")
    return holder


def _served(options: LiveOptions) -> tuple[str, int]:
    """(model, tokens of its context; 0: not said). Raises: PeerGone, SettingsError."""
    listed = _read(f"{options.url}/v1/models", options.bearer).get("data") or []
    found = [one for one in listed if not options.model or one["id"] == options.model]
    if not found and not options.model:
        raise SettingsError(f"{options.url} lists no model")
    tokens = found[0].get("max_model_len") if found else None
    return options.model or str(found[0]["id"]), tokens if isinstance(tokens, int) else 0
