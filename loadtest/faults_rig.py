"""For bench_faults.py: who is killed or stopped and when, and clients that ask on whatever happens."""

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from loadtest import exactness_shares as shares
from loadtest.processes import family

KILL, STOP = "kill", "stop"
WORKERS = ("prefill", "decode", "colocated")
OTHERS = ("mempool", "keeper", "scheduler", "coordinator", "redis", "gateway")
STOPPED_S = (0.5, 4.0)  # a process stands still for so long
REQUEST_S = 150.0
AGAIN_S = 0.3  # a client that got no answer asks again so much later


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to a process. part: "" for the service itself, "core" for an engine core."""

    how: str
    service: str
    part: str
    stopped_s: float


def plan(rng: random.Random, ready: Sequence[str]) -> Fault | None:
    """The next fault. Workers half of the time, the last ready one never killed; None: nobody to touch."""
    workers = [name for name in ready if name.startswith(WORKERS)]
    others = [name for name in ready if name in OTHERS]
    pool = workers if workers and (rng.random() < 0.5 or not others) else others
    if not pool:
        return None
    service = rng.choice(pool)
    part = rng.choice(["", "core"]) if service in workers else ""
    how = rng.choice([KILL, KILL, STOP])
    if how == KILL and service in workers and len(workers) < 2:
        how = STOP
    return Fault(how, service, part, round(rng.uniform(*STOPPED_S), 2) if how == STOP else 0.0)


def engine_core_of(pid: int) -> int | None:
    """The engine core among a worker's processes."""
    for each in family(pid):
        with suppress(OSError):
            if b"EngineCore" in Path(f"/proc/{each}/cmdline").read_bytes():
                return each
    return None


async def do(fault: Fault, pid: int) -> bool:
    """Whether there was somebody to do it to. Returns behind the stop."""
    target = engine_core_of(pid) if fault.part else pid
    if target is None:
        return False
    # a gateway's processes share its address: while the first stands still, the others serve on
    targets = family(target) if fault.service == "gateway" else [target]
    if fault.how == KILL:
        return _signal(targets, signal.SIGKILL)
    try:
        if not _signal(targets, signal.SIGSTOP):
            return False
        await asyncio.sleep(fault.stopped_s)
    finally:
        is_there = _signal(targets, signal.SIGCONT)
    return is_there


def _signal(targets: Sequence[int], number: signal.Signals) -> bool:
    """To each that is there; whether the first was."""
    found = []
    for pid in targets:
        try:
            os.kill(pid, number)
            found.append(pid)
        except ProcessLookupError:
            continue
    return found[:1] == list(targets[:1])


@dataclass(slots=True)
class Heard:
    """What came of one request. ended: with an answer's end, not cut off or by an error."""

    choices: dict[int, list[int]] = field(default_factory=dict)
    ended: bool = False
    status: int = 0
    why: str = ""
    placement: str = ""


async def ask(client: httpx.AsyncClient, body: Mapping[str, Any]) -> Heard:
    """One request. Never fails: what went wrong is in `why`."""
    heard = Heard()
    try:
        if body["stream"]:
            await _stream(client, body, heard)
        else:
            answer = await client.post("/v1/completions", json=body)
            heard.status = answer.status_code
            _take(heard, answer.json() if answer.status_code == 200 else {}, answer.text)
            heard.ended = heard.status == 200
    except (httpx.HTTPError, ValueError) as error:
        heard.why = type(error).__name__
    return heard


async def _stream(client: httpx.AsyncClient, body: Mapping[str, Any], heard: Heard) -> None:
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        heard.status = answer.status_code
        if heard.status != 200:
            heard.why = (await answer.aread()).decode(errors="replace")[:200]
            return
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                heard.ended = not heard.why
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                _take(heard, event, json.dumps(event.get("error", "")) if "error" in event else "")


def _take(heard: Heard, answer: Mapping[str, Any], text: str) -> None:
    for choice in answer.get("choices", []):
        heard.choices.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
    heard.placement = (answer.get("quire_receipt") or {}).get("placement", heard.placement)
    if "choices" not in answer and text:
        heard.why = text[:200]


def judge(case: Mapping[str, Any], heard: Heard, stock: Mapping[str, Any]) -> dict[str, Any] | None:
    """`compared()` of an answer, of what was heard of one that did not end; None: nothing was heard of it. One that
    ended without a token is an answer.
    """
    if not (heard.choices or heard.ended):
        return None
    count = max(heard.choices, default=0) + 1
    ours = [heard.choices.get(i, []) for i in range(count)]
    if heard.ended:
        return shares.compared(case, ours, stock)
    begun = {}
    for name in ("choices", "cached_choices"):
        pairs = zip(stock[name], ours, strict=False)
        begun[name] = [{**choice, "token_ids": choice["token_ids"][: len(mine)]} for choice, mine in pairs]
    return shares.compared(case, ours, begun)


class Clients:
    """So many at a time, each one case after another in an order of its own, until `stop`.

    answers: a row each. unlike: rows of `compared()` that are like neither of stock's, one of each kind.
    """

    def __init__(
        self, url: str, cases: Sequence[Mapping[str, Any]], stock: Mapping[str, Any], seed: int
    ) -> None:
        self._url, self._cases, self._stock, self._seed = url, list(cases), stock, seed
        self.answers: list[dict[str, Any]] = []
        self.unlike: dict[str, dict[str, Any]] = {}
        self.stop = asyncio.Event()
        self._begun_s = time.monotonic()

    async def run(self, count: int) -> None:
        """Until told to stop, and every request has ended."""
        await asyncio.gather(*(self._client(number) for number in range(count)))

    async def once(self) -> None:
        """Every case, one after another."""
        async with self._http() as client:
            for case in self._cases:
                await self._one(client, case, stream=False)

    def _http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._url, timeout=REQUEST_S, trust_env=False)

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        async with self._http() as client:
            while not self.stop.is_set():
                for case in rng.sample(self._cases, len(self._cases)):
                    if self.stop.is_set():
                        return
                    # what was drawn is not drawn again for the rest of a stream: such answers are asked for whole
                    is_plain = shares.is_plain(case) and "stop" not in case["params"]
                    if not await self._one(client, case, stream=is_plain and rng.random() < 0.7):
                        await asyncio.sleep(AGAIN_S)

    async def _one(self, client: httpx.AsyncClient, case: Mapping[str, Any], *, stream: bool) -> bool:
        from tests.gpu.compare_with_stock import body_of

        begun_s = time.monotonic()
        stock = self._stock[case["id"]]
        heard = await ask(client, {**body_of(case, stock), "stream": stream})
        found = judge(case, heard, stock)
        row = {
            "kind": "answer", "case": case["id"], "at_s": round(begun_s - self._begun_s, 2),
            "took_s": round(time.monotonic() - begun_s, 3), "stream": stream, "status": heard.status,
            "ended": heard.ended, "placement": heard.placement, "why": heard.why,
            "found": "nothing" if found is None else "equal" if found["equal"] else "unlike" if found["unlike_either"]
            else "like_cached",
        }  # fmt: skip
        if found is not None and row["found"] == "unlike":
            key = f"{case['id']}:{json.dumps(found['ours'])}"
            self.unlike.setdefault(key, found)
            row["which"] = list(self.unlike).index(key)
        self.answers.append(row)
        return heard.ended
