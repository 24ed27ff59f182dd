"""A rank hears what its capacity comes to, though the pages of its name were made for another's before it."""

import pytest

from shared.ids import InstanceId
from shared.wire import mempool as wire
from tests.unit.mempool_harness import DESCRIPTION, PAGE_BYTES, Harness


@pytest.mark.parametrize(("later_pages", "asked"), [(3, 3), (5, 5), (12, 8), (0, 8)])
def test_a_rank_hears_how_many_pages_its_capacity_would_have_been(later_pages, asked):
    """Of whole pages, and no more than the mempool's limit, 8 of them."""
    harness = Harness(8)
    for connection, capacity in ((1, 3 * PAGE_BYTES + 1), (2, later_pages * PAGE_BYTES)):
        rank = wire.Attach(
            kind="rank", instance=InstanceId("notebook"), description=DESCRIPTION, capacity_bytes=capacity
        )
        harness.run(harness.pool.on_attach(connection, connection, rank, 0))
    first, second = (harness.sent[connection][0] for connection in (1, 2))
    assert (first.num_pages, first.asked_pages) == (3, 3)
    assert (second.num_pages, second.asked_pages) == (3, asked)
