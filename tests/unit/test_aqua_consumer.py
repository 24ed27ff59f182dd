"""An Aqua gives its pages to whoever can use them: what nobody sees any more, and what fits."""

import asyncio
import dataclasses
import gc

import pytest
import torch

from shared.aqua import consumer as consumer_module
from shared.aqua.consumer import Aqua
from shared.aqua.tensor import AquaTensor
from tests.support.aqua_parts import PAGE_BYTES, SETTINGS, Parts


@pytest.fixture
def parts(monkeypatch):
    return Parts(monkeypatch)


def test_a_tensor_takes_the_pages_here_of_one_that_nobody_sees_any_more(parts):
    parts.most["hbm"] = 2
    with Aqua(SETTINGS) as aqua:
        with aqua.making(2 * PAGE_BYTES) as kept:
            pass
        with aqua.making(2 * PAGE_BYTES) as gone:
            pass
        tensor = AquaTensor(aqua, gone, (), None)
        aqua.fetch(gone)
        del tensor
        gc.collect()
        aqua.fetch(kept)
        assert kept.local
        assert not gone.local


def test_step_moves_the_smaller_tensors_where_one_does_not_fit(parts):
    parts.most["leased"] = 0
    with Aqua(dataclasses.replace(SETTINGS, every_ms=60_000)) as aqua:
        aqua._borrower = type("Borrower", (), {"give_back": lambda _: asyncio.sleep(0)})()
        sizes, tensors, asked = (4, 5, 1, 4, 2), [], []
        for count in sizes:
            with aqua.making(count * PAGE_BYTES) as placed:
                tensors.append(placed)
        aqua._tensors = dict.fromkeys(tensors)  # in this order
        parts.most["leased"] = 3
        parts.on_alloc = lambda: asked.append(1)
        events = aqua.step()
        assert [event.num_bytes for event in events] == [PAGE_BYTES, 2 * PAGE_BYTES]
        assert [aqua.location(placed) for placed in tensors] == ["dram", "dram", "peer", "dram", "peer"]
        assert len(asked) == 3, "as large as one that does not fit, or larger, is not asked for"

        assert not aqua.step()
        assert len(asked) == 4
        assert not aqua.step()
        assert len(asked) == 4, "nothing has moved: not before every_ms"


@pytest.mark.parametrize(("name", "found"), [("cuda", "cuda:3"), ("cuda:1", "cuda:1"), ("cpu", "cpu")])
def test_a_gpu_without_a_number_is_the_one_that_is_current_at_the_start_for_all_parts(
    monkeypatch, parts, name, found
):
    window, devices = consumer_module.open_window, []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(consumer_module, "mempool_device", lambda device, _: devices.append(device))
    monkeypatch.setattr(consumer_module, "open_window", lambda *of: devices.append(of[2]) or window(*of))
    monkeypatch.setattr(consumer_module, "LocalMemory", lambda made, device: devices.append(device) or made)
    Aqua(dataclasses.replace(SETTINGS, device=name)).close()
    assert devices == [torch.device(found)] * 3
