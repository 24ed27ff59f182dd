"""What running requests need is not lent, and comes home when they need more."""

import math

import pytest

from shared.ids import Epoch
from shared.wire.lending_limits import MAX_COUNT, check_range
from shared.wire.mempool_lending import ReportLoad
from tests.unit.test_mempool_desk import Rig
from tests.unit.test_mempool_lending import SELLER


def test_running_requests_take_back_what_they_need_and_the_rest_stays_on_offer():
    rig = Rig()
    rig.step(12)
    memory = rig.core.pools[rig.producer].memory
    assert memory is not None
    (engine,) = memory.engines.attached.values()
    rig.load[SELLER] = ReportLoad(
        instance_epoch=Epoch(1), kv_used_share=1.0
    )  # of the two pages that it has left
    assert engine.num_pages == 2
    rig.step(1)
    assert rig.leased() == 4


def test_no_offer_reaches_into_prompts_that_leases_pin_for_running_requests():
    """They are none of the engine's own pages, of which none is used."""
    rig = Rig()
    rig.load[SELLER] = ReportLoad(instance_epoch=Epoch(1), num_pages_in_use=3)
    rig.step(12)
    assert rig.leased() == 3, "but for the prompts and the reserve"
    rig.load[SELLER] = ReportLoad(instance_epoch=Epoch(1), num_pages_in_use=5)
    rig.step(1)
    assert rig.leased() == 1


@pytest.mark.parametrize(("share", "like"), [(math.nan, 0.0), (math.inf, 1.0), (-math.inf, 0.0), (7.5, 1.0)])
def test_a_share_that_no_front_can_have_meant_ends_nothing(share, like):
    leased = []
    for said in (share, like):
        rig = Rig()
        rig.step(12)
        rig.load[SELLER] = ReportLoad(instance_epoch=Epoch(1), kv_used_share=said)
        rig.step(3)
        leased.append(rig.leased())
    assert leased[0] == leased[1]


@pytest.mark.parametrize("said", [-(1 << 63), (1 << 64) - 1])
def test_counts_that_no_front_can_have_meant_end_nothing(said):
    rig = Rig()
    counts = (
        "num_running",
        "num_waiting",
        "num_arrived",
        "num_preempted",
        "num_pages_in_use",
        "instance_epoch",
    )
    rig.load[SELLER] = ReportLoad(**dict.fromkeys(counts, said))
    rig.step(12)
    for wish in rig.said:
        check_range("producer_epoch", wish.body.producer_epoch, 0, MAX_COUNT)
    rig.load[SELLER] = ReportLoad(instance_epoch=Epoch(MAX_COUNT))
    rig.step(12)
    assert rig.leased() > 0
