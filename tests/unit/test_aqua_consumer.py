"""An Aqua gives its pages to whoever can use them: what nobody sees any more, and what fits."""

import gc

import pytest

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
