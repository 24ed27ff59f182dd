"""A PyTorch process with a tensor on a peer: python -m tests.integration.stopped_aqua SETTINGS STEP NUM_PAGES.

At STEP it stops by itself, once, as by SIGSTOP: a lease is "granted" and nothing lies there; the tensor's bytes are
"filling" lent pages for the first time, lie "away" there, are "fetching", shown and changed by "computing", "storing";
it is "told" that they were moved. When it goes on it compares every byte, says "right", and ends with its input.
SETTINGS: JSON of an AquaSettings.
"""

import asyncio
import json
import signal
import sys
import time
from typing import Any

import torch

from shared.aqua.consumer import Aqua
from shared.aqua.settings import AquaSettings
from shared.aqua.tensor import AquaTensor

POLL_S, TURNS_TO_SEND = 0.005, 3


def stop() -> None:
    signal.raise_signal(signal.SIGSTOP)  # to this thread: it does not get any further


def stop_in_transfer(aqua: Aqua) -> None:
    """Behind the words of its next copy, before their answer is read."""
    transfer: Any = aqua._api.transfer

    async def stopping(*args: Any, **kwargs: Any) -> Any:
        aqua._api.transfer = transfer
        under_way = asyncio.ensure_future(transfer(*args, **kwargs))
        for _ in range(TURNS_TO_SEND):
            await asyncio.sleep(0)
        stop()
        return await under_way

    aqua._api.transfer = stopping


def stop_when_told(aqua: Aqua) -> None:
    """The mempool has moved something, and nobody has looked at it yet."""
    append = aqua._heard.append

    def stopping(message: Any) -> None:
        append(message)
        stop()

    aqua._api._on_evacuated = stopping


def main(settings: str, step: str, num_pages: int) -> None:
    """See the module's docstring."""
    with Aqua(AquaSettings(**json.loads(settings))) as aqua:
        page_bytes = aqua._own.page_bytes
        expected = torch.arange(num_pages * page_bytes // 4, dtype=torch.int32)
        while not any(event.kind == "borrowed" for event in aqua.step()):
            time.sleep(POLL_S)
        if step == "granted":
            stop()
        if step == "filling":
            stop_in_transfer(aqua)
        tensor = AquaTensor.from_tensor(expected)
        if step == "told":
            stop_when_told(aqua)
            print("away", flush=True)
            while tensor.location == "peer":
                time.sleep(POLL_S)
        elif step == "away":
            stop()
        if step == "fetching":
            stop_in_transfer(aqua)
        x = tensor.to_compute()
        assert torch.equal(x, expected)
        x += 1
        expected += 1
        if step == "computing":
            stop()
        if step == "storing":
            stop_in_transfer(aqua)
        tensor.offload()
        for _ in range(2):
            with tensor.compute() as x:
                assert torch.equal(x, expected), "a byte is another"
            aqua.step()
        print("right", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
