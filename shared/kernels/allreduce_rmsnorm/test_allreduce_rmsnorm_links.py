"""By links of what kind GPUs reach each other, as a stand-in of the driver says: kept times belong to them, too."""

import importlib
from types import SimpleNamespace

import pytest

from shared.kernels.allreduce_rmsnorm import driver
from shared.kernels.allreduce_rmsnorm.driver import NO_LINK, UNKNOWN_LINK, links_from

BRIDGES = {(0, 1), (2, 3)}  # NVLink between two pairs; the others reach each other over PCIe


class Driver:
    """cuda.bindings.driver of four GPUs."""

    CUdevice_P2PAttribute = SimpleNamespace(
        CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED="access",
        CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED="atomics",
        CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK="rank",
    )

    def __init__(self, *, without: str = "") -> None:
        self.without = without

    def cuInit(self, flags: int) -> tuple[int]:
        return (int(self.without == "driver"),)

    def cuDeviceGet(self, ordinal: int) -> tuple[int, str]:
        return int(ordinal > 3), f"gpu{ordinal}"

    def cuDeviceGetP2PAttribute(self, which: str, one: str, other: str) -> tuple[int, int]:
        assert one != other, "the driver refuses it"
        is_bridge = tuple(sorted((int(one[3:]), int(other[3:])))) in BRIDGES
        return int(self.without == which), {"access": 1, "atomics": is_bridge, "rank": not is_bridge}[which]


@pytest.fixture
def given(monkeypatch):
    """Puts a driver in the place of the bindings; None: there are none."""
    real = importlib.import_module

    def put(found: Driver | None) -> None:
        def import_module(name: str):
            if name != "cuda.bindings.driver":
                return real(name)
            if found is None:
                raise ModuleNotFoundError(name)
            return found

        monkeypatch.setattr(driver.importlib, "import_module", import_module)

    return put


def test_ranks_on_a_bridge_have_other_links_than_ranks_without_one(given):
    given(Driver())
    assert links_from(0, [0, 1]) == [NO_LINK, 3]
    assert links_from(1, [1, 2]) == [NO_LINK, 5]
    assert links_from(0, [0, 1]) == links_from(2, [2, 3])
    four = [links_from(place, [0, 1, 2, 3]) for place in range(4)]
    assert four == [[-1, 3, 5, 5], [3, -1, 5, 5], [5, 5, -1, 3], [5, 5, 3, -1]]


def test_links_that_nobody_tells_are_unknown_and_fail_no_start(given):
    given(Driver())
    assert links_from(0, [0, 7]) == [NO_LINK, UNKNOWN_LINK]
    for without in ("access", "atomics", "rank"):
        given(Driver(without=without))
        assert links_from(0, [0, 1]) == [NO_LINK, UNKNOWN_LINK]
    for found in (Driver(without="driver"), None):
        given(found)
        assert links_from(0, [0, 1]) == [UNKNOWN_LINK] * 2
