"""An engine that could lend and whose memory fits nobody says why, once."""

from types import SimpleNamespace

import pytest

from services.mempool.core.takers import Takers
from shared.ids import InstanceId
from shared.kv.page_fit import misfit
from tests.unit.mempool_harness import PAGE_BYTES
from tests.unit.test_mempool_desk import Rig
from tests.unit.test_mempool_lending import SELLER
from tests.unit.test_mempool_spaces import PREFILL


def space(num_ranks=1, page_bytes=PAGE_BYTES, *, is_behind=False):
    return SimpleNamespace(
        memory=SimpleNamespace(num_ranks=num_ranks, page_bytes=page_bytes, is_behind=is_behind)
    )


def takers(*pools, behind=(0, 1, 2, 3)):
    lending = SimpleNamespace(num_back=lambda number: 0 if number in behind else None)
    return Takers(dict(enumerate(pools)), lending, after_ms=100)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("others", "behind", "why"),
    [
        ([], (), "there is no other space of engines here"),
        ([space(is_behind=True)], (1,), "there is no other space of engines here"),
        ([space(2)], (1,), "space 1: its pages lie on 1 rank, the borrower's blocks on 2 ranks"),
        ([space(1, 2 * PAGE_BYTES)], (1,), "are smaller than the borrower's of"),
        ([space()], (), "space 1: no host memory is behind it"),
        ([space(2), space()], (1, 2), ""),
    ],
)
def test_a_space_lends_to_others_of_as_many_ranks_and_no_larger_pages_with_host_memory(others, behind, why):
    found = takers(space(), *others, behind=behind).why_none(0)
    assert (why in found) if why else not found


def test_the_log_says_once_why_nobody_fits_and_not_while_engines_still_come():
    pools = [space(), space(2)]
    one = takers(*pools)
    assert one.look(0, 0) is None
    assert one.look(0, 99) is None, "others may come"
    word = one.look(0, 100)
    assert word is not None
    assert word.event == "memory_fits_nobody"
    assert one.look(0, 10_000) is None
    pools[1].memory.num_ranks = 1
    assert one.look(0, 10_001) is None


def test_memory_that_fits_nobody_is_not_set_aside_and_the_status_says_why():
    rig = Rig()
    borrower = rig.core.space_of(InstanceId(f"i{PREFILL}"))
    rig.core.pools[borrower].memory.page_bytes *= 2
    rig.step(30)
    assert rig.leased() == 0
    assert "smaller than the borrower's" in rig.desk.status()[str(rig.producer)]["no_taker"]
    assert [word.event for word in rig.desk.words] == ["memory_fits_nobody"]
    fitting = Rig()
    fitting.step(30)
    assert fitting.desk.status()[str(fitting.producer)]["no_taker"] == ""
    assert "memory_fits_nobody" not in {word.event for word in fitting.desk.words}
    assert SELLER in fitting.told


def test_pages_whose_size_nobody_knows_fit():
    assert misfit(lender=(1, 0), borrower=(1, 4_096)) == misfit(lender=(1, 4_096), borrower=(1, 0)) == ""
    assert misfit(lender=(4, 0), borrower=(1, 0))
