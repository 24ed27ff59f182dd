"""One client of several coordinators: which of them the next call goes to."""

import asyncio

import httpx
import pytest

from shared.errors import PeerGone
from shared.transport.coordinator_api import CoordinatorApi


@pytest.mark.parametrize("standby", [False, True])
async def test_two_calls_that_fail_at_one_coordinator_at_once_are_followed_by_calls_to_the_next(standby):
    api, both = CoordinatorApi("http://a,http://b", ""), asyncio.Barrier(2)
    await api.close()

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "b":
            return httpx.Response(200)
        await both.wait()
        if standby:
            return httpx.Response(503, json={"code": "market.standby"})
        raise httpx.ConnectError("gone")

    api._http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    failed = await asyncio.gather(*(api.request("GET", "/") for _ in range(2)), return_exceptions=True)
    assert [type(each) for each in failed] == [PeerGone] * 2
    assert (await asyncio.wait_for(api.request("GET", "/"), 5)).is_success
    await api.close()
