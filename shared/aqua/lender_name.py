"""One living process of a host lends under a name: a second one would take the first's offers for a dead one's."""

import asyncio
import time

from shared.errors import InvalidRequest
from shared.kv.layout import EngineDescription
from shared.mempool.client import MempoolClient

POLL_S = 0.01
LEAVES_S = 1.0  # for the mempool to see that a process has ended


async def check_name(client: MempoolClient, description: EngineDescription, num_own: int) -> None:
    """Args: description: of the lender's space, which has its name. num_own: how often this process is attached to it.

    Raises: InvalidRequest when others are, for LEAVES_S. A mempool that does not answer says nothing.
    """
    end_s = time.monotonic() + LEAVES_S
    while (status := await client.status()) is not None:
        same = [space for space in status.spaces if space.content_key == description.content_key]
        if sum(len(space.engines) for space in same) <= num_own:
            return
        if time.monotonic() >= end_s:
            name = description.fingerprint.removeprefix("aqua ")
            raise InvalidRequest(f"another process of this host lends as {name!r}: each needs its own name")
        await asyncio.sleep(POLL_S)
