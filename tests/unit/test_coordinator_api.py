"""One client of several coordinators."""

import asyncio

import httpx

from shared.transport.coordinator_api import CoordinatorApi


async def test_calls_that_fail_together_turn_to_the_next_coordinator_once(monkeypatch):
    both = asyncio.Barrier(2)
    for answer in (httpx.ConnectError("gone"), httpx.Response(503, json={"code": "market.standby"})):
        api = CoordinatorApi("http://a,http://b", "")

        async def request(*_, answer=answer, **__):
            await both.wait()
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(api._http, "request", request)
        await asyncio.gather(*(api.request("GET", "/") for _ in range(2)), return_exceptions=True)
        assert api.url == "http://b"
        await api.close()
