"""Tenants that ask for more than there is: open loop through several gateways, tokens counted as they arrive."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, cycle
from typing import Any

from loadtest.http_client import Client, Reply
from loadtest.sse import shown_ids
from loadtest.workloads.request import content_id
from loadtest.workloads.tokens import TokenRange, pseudo_tokens

PATH = "/v1/completions"
TIMEOUT_S = 600.0
IDS = TokenRange()


@dataclass(frozen=True, slots=True)
class Tenant:
    """`weight`: at the gateways; `key`: its API key there."""

    name: str
    weight: float

    @property
    def key(self) -> str:
        """Of no secret."""
        return f"key-of-{self.name}"


@dataclass(slots=True)
class Tally:
    """What reached the clients. `tokens`: by (second since the start, tenant); a prompt counts with its first token."""

    tokens: Counter[tuple[int, str]] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)  # by tenant
    shed: Counter[str] = field(default_factory=Counter)  # answered by 503, after the gateway's own wait
    failed: Counter[str] = field(default_factory=Counter)
    late_s: float = 0.0  # the most that a request went out behind its time

    def rows(self, names: Sequence[str], first_s: int, end_s: int) -> list[dict[str, Any]]:
        """A row a second."""
        return [
            {"kind": "second", "at_s": at, "tokens": {name: self.tokens[at, name] for name in names}}
            for at in range(first_s, end_s)
        ]


class Crowd:
    """All clients of all tenants. Use once a run.

    Args: urls: of the gateways, which take turns; prompt_tokens, output_tokens: of each request.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        tenants: Sequence[Tenant],
        prompt_tokens: int,
        output_tokens: int,
    ) -> None:
        self._model, self._prompt_tokens, self._output_tokens = model, prompt_tokens, output_tokens
        self._all = {one.name: [Client(url, bearer=one.key) for url in urls] for one in tenants}
        self._clients = {name: cycle(mine) for name, mine in self._all.items()}
        self._numbers = count(time.time_ns() % 1_000_000_007)
        self._open: set[asyncio.Task[None]] = set()
        self.tally = Tally()
        self._began_s = 0.0

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s

    async def open_loop(self, rates: Mapping[str, float], seconds: float) -> Tally:
        """Each tenant's requests go out at its rate, evenly, whatever becomes of the others."""
        self.tally, self._began_s = Tally(), time.perf_counter()
        due = sorted((i / rate, name) for name, rate in rates.items() for i in range(int(rate * seconds)))
        for at_s, name in due:
            if (wait_s := at_s - self._now_s()) > 0:
                await asyncio.sleep(wait_s)
            self.tally.late_s = max(self.tally.late_s, self._now_s() - at_s)
            self._start(name)
        await asyncio.sleep(max(0.0, seconds - self._now_s()))
        await self._stop()
        return self.tally

    async def closed_loop(self, in_flight: int, seconds: float) -> Tally:
        """So many requests of each tenant are always on their way: what the cluster can do."""
        self.tally, self._began_s = Tally(), time.perf_counter()

        async def client(name: str) -> None:
            while True:
                await self._one(name)

        for name in self._clients:
            for _ in range(in_flight):
                self._keep(asyncio.create_task(client(name)))
        await asyncio.sleep(seconds)
        await self._stop()
        return self.tally

    def _start(self, name: str) -> None:
        self._keep(asyncio.create_task(self._one(name)))

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _stop(self) -> None:
        """Requests that are still on their way are given up; their gateways abort them."""
        waiting = list(self._open)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _one(self, name: str) -> None:
        client = next(self._clients[name])
        reply = _Counting(self, name, self._prompt_tokens)
        try:
            await client.post(client.request_bytes(PATH, self._body()), timeout_s=TIMEOUT_S, reply=reply)
        except (OSError, TimeoutError) as error:
            self.tally.failed[name] += 1
            client.complain(f"{type(error).__name__}: {error}")
            return
        if reply.status == 503:
            self.tally.shed[name] += 1
        elif reply.status != 200:
            self.tally.failed[name] += 1
            client.complain(f"status {reply.status}: {reply.body[:200]!r}")
        else:
            self.tally.ended[name] += 1

    def _body(self) -> dict[str, Any]:
        prompt = pseudo_tokens(content_id("fair", next(self._numbers)), self._prompt_tokens, IDS)
        return {
            "model": self._model, "prompt": prompt.tolist(), "max_tokens": self._output_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip

    def close(self) -> None:
        """Drop the connections."""
        for client in chain.from_iterable(self._all.values()):
            client.close()


class _Pieces(list[tuple[float, bytes]]):
    """Counts tokens as they come: at the end it would be too late for a window's bounds."""

    def __init__(self, crowd: Crowd, name: str, prompt_tokens: int) -> None:
        super().__init__()
        self._crowd, self._name, self._prompt_tokens = crowd, name, prompt_tokens
        self._rest = b""

    def append(self, piece: tuple[float, bytes]) -> None:
        super().append(piece)
        *lines, self._rest = (self._rest + piece[1]).split(b"\n\n")
        num_tokens = sum(_num_tokens(line) for line in lines)
        if num_tokens:
            tally = self._crowd.tally
            tally.tokens[int(piece[0] - self._crowd._began_s), self._name] += num_tokens + self._prompt_tokens
            self._prompt_tokens = 0


class _Counting(Reply):
    def __init__(self, crowd: Crowd, name: str, prompt_tokens: int) -> None:
        super().__init__(0.0, pieces=_Pieces(crowd, name, prompt_tokens))


def _num_tokens(event: bytes) -> int:
    data = event.strip().removeprefix(b"data: ")
    return len(shown_ids(json.loads(data))) if data.startswith(b'{"') else 0
