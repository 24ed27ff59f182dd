"""Transfers between the same memory: no byte travels, and they are in flight no longer than their check takes."""

import pytest

from shared.transfer.alias import AliasLink
from shared.transfer.errors import TransferFailed
from shared.transfer.interface import MAX_IN_FLIGHT, Region, RegionKind
from tests.unit.test_links_in_doubt import PAGE, common


def test_a_check_that_raises_fails_its_transfer_and_is_not_in_flight_any_more():
    """After MAX_IN_FLIGHT of them every further one would be refused."""
    link = AliasLink(**common(None, mine=Region("mine", RegionKind.HOST, 0, PAGE, 64, "t")))

    def check() -> list[int]:
        raise KeyError("page")

    for _ in range(MAX_IN_FLIGHT + 1):
        failed = link.pull("theirs", [3], "mine", [3], timeout_ms=1_000, check=check)
        with pytest.raises(TransferFailed, match="page"):
            failed.result(0)
    assert link.pull("theirs", [3], "mine", [3], timeout_ms=1_000, check=lambda: [1]).result(0).stale == (1,)
