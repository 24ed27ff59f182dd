"""Tensors of a PyTorch process between its own memory, a peer's and the host's: real mempool, coordinator and Redis."""

import json
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
import torch

from shared.aqua.consumer import Aqua
from shared.aqua.errors import AquaClosed, TensorLost
from shared.aqua.lender import Lender
from shared.aqua.tensor import AquaTensor
from shared.errors import InvalidRequest, OutOfPages, Overloaded, PeerGone
from tests.integration.keeper_rig import KeeperProcess
from tests.integration.mempool_rig import ROOT, until
from tests.support.aqua_rig import NUM_PAGES, PAGE_BYTES, AquaRig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LIMIT_S = 120.0
LENDS = """
import json, sys, time
from shared.aqua.lender import Lender, LenderSettings
from shared.errors import Overloaded, PeerGone
lender = Lender(LenderSettings(**json.loads(sys.argv[1])))
while True:
    try:
        lender.lend(8 * lender._settings.page_bytes)
        break
    except (Overloaded, PeerGone):
        time.sleep(0.05)
print("lent", flush=True)
time.sleep(3_600)
"""


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    made = AquaRig(tmp_path_factory.mktemp("aqua"))
    yield made
    made.close()


def lend(lender: Lender, num_bytes: int) -> int:
    """Once the coordinator has heard of the mempool."""
    end_s = time.monotonic() + LIMIT_S
    while True:
        try:
            return lender.lend(num_bytes)
        except (Overloaded, PeerGone):  # or of a mempool that stood still: nothing is lent then
            assert time.monotonic() < end_s
            time.sleep(0.05)


def step_until(aqua: Aqua, condition) -> list:
    events = []
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, events
        events += aqua.step()
        time.sleep(0.005)
    return events + aqua.step()


def test_tensors_go_to_a_peer_and_leave_it_when_it_wants_its_memory(rig):
    with Lender(rig.lender()) as lender, Aqua(rig.consumer()) as aqua:
        data = torch.arange(3 * PAGE_BYTES // 8 - 5, dtype=torch.float64)
        first = AquaTensor.from_tensor(data)
        assert first.location == "dram", "nobody lends yet"
        assert lend(lender, 20 * PAGE_BYTES) == 20 * PAGE_BYTES
        events = step_until(aqua, lambda: first.location == "peer")
        assert {event.kind for event in events} >= {"borrowed", "promoted"}

        second = AquaTensor.from_tensor(data[::2])
        assert second.location == "peer"
        x = first.to_compute()
        assert first.location == "local"
        assert x.data_ptr() == first.address
        assert torch.equal(x, data)
        x += 1
        first.offload()
        assert first.location == "peer"

        took_s = lender.reclaim(60_000)
        assert took_s < 60
        assert rig.mempool.counts().get("leased", 0) == 0
        end_s = time.monotonic() + LIMIT_S
        while not first.location == second.location == "dram":  # no step of the consumer is needed
            assert time.monotonic() < end_s, (first.location, second.location)
            time.sleep(0.005)
        events = aqua.step()
        assert sum(e.num_bytes for e in events if e.kind == "evacuated") == 5 * PAGE_BYTES
        with first.compute(changed=False) as x:
            assert x.data_ptr() == first.address, "its address stays"
            assert torch.equal(x, data + 1)
        with second.compute() as y:
            assert torch.equal(y, data[::2])

        assert lend(lender, 20 * PAGE_BYTES) > 0, "the memory comes again"
        step_until(aqua, lambda: first.location == second.location == "peer")
        assert torch.equal(first.to_compute(), data + 1)


def test_a_tensor_in_use_that_moves_to_a_peer_between_steps_keeps_its_bytes(rig):
    data = torch.arange(2 * PAGE_BYTES // 4, dtype=torch.float32)
    with Lender(rig.lender("late")) as lender, Aqua(rig.consumer("user")) as aqua:
        used = AquaTensor.from_tensor(data)
        x = used.to_compute()
        lend(lender, 20 * PAGE_BYTES)
        kinds: list[str] = []
        step_until(aqua, lambda: "promoted" in kinds or kinds.extend(e.kind for e in aqua.step()))
        assert used.location == "local"
        assert torch.equal(x, data)
        used.offload(changed=False)
        assert used.location == "peer"
        assert torch.equal(used.to_compute(), data)


def test_a_tensor_in_use_outlives_the_loss_of_its_bytes_elsewhere(rig):
    data = torch.arange(2 * PAGE_BYTES // 4, dtype=torch.float32)
    with Aqua(rig.consumer("holder", borrow_bytes=0)):
        for changed in (False, True):
            used = AquaTensor.from_tensor(data)
            x = used.to_compute()
            if changed:
                x += 1
            assert used._placed.away is not None
            used._placed.away.is_lost = True  # as Directory.hear does when a copy of a reclaim failed
            used.offload(changed=changed)
            assert torch.equal(used.to_compute(), data + changed)
        idle = AquaTensor.from_tensor(data)
        assert idle._placed.away is not None
        idle._placed.away.is_lost = True
        with pytest.raises(TensorLost):
            idle.to_compute()


def test_a_view_keeps_its_tensor_and_a_closed_tensors_addresses_are_not_the_next_ones(rig):
    data = torch.arange(2 * PAGE_BYTES // 4, dtype=torch.float32)
    with Aqua(rig.consumer("viewer", borrow_bytes=0, local_bytes=4 * PAGE_BYTES)):
        x = AquaTensor.from_tensor(data).to_compute()[1:]
        other = AquaTensor.from_tensor(-data)
        y = other.to_compute()
        assert torch.equal(x, data[1:]), "it is a view of its own tensor"
        with pytest.raises(OutOfPages, match="local_bytes"):
            AquaTensor.from_tensor(data)
        del x
        third = AquaTensor.from_tensor(data)  # in the memory of the one that nobody sees any more
        gone = other.address
        other.close()
        assert y.data_ptr() == gone
        assert AquaTensor.from_tensor(data).address != gone
        assert torch.equal(third.to_compute(), data), "what was closed has left its memory, views or not"


def test_what_cannot_be_is_refused_and_changes_nothing(rig):
    with Aqua(rig.consumer("small", borrow_bytes=0, local_bytes=4 * PAGE_BYTES)) as aqua:
        with pytest.raises(InvalidRequest):
            AquaTensor.from_tensor(torch.empty(0))
        with pytest.raises(OutOfPages, match="local_bytes"):
            AquaTensor.from_tensor(torch.zeros(5 * PAGE_BYTES, dtype=torch.uint8))
        one = AquaTensor.from_tensor(torch.full((4 * PAGE_BYTES,), 7, dtype=torch.uint8))
        two = AquaTensor.from_tensor(torch.full((PAGE_BYTES,), 9, dtype=torch.uint8))
        one.to_compute()
        with pytest.raises(OutOfPages, match="offload others"):
            two.to_compute()
        one.offload(changed=False)
        assert bool((two.to_compute() == 9).all())
        two.close()
        two.close()
        with pytest.raises(AquaClosed):
            two.to_compute()
        pair = torch.ones(2 * PAGE_BYTES, dtype=torch.uint8)
        many = [AquaTensor.from_tensor(pair) for _ in range((NUM_PAGES - 4) // 2)]
        with pytest.raises(OutOfPages):
            AquaTensor.from_tensor(pair)
        del many
        aqua.step()
        AquaTensor.from_tensor(pair).close()
        other = Aqua(rig.consumer("another", borrow_bytes=0))
        with pytest.raises(InvalidRequest, match="2 Aquas"):
            AquaTensor.from_tensor(torch.ones(1))
        other.close()
        assert bool((one.to_compute() == 7).all())
    with pytest.raises(AquaClosed):
        one.to_compute()


def test_a_name_that_was_used_with_another_size_is_refused_and_its_own_size_is_not(rig):
    for _ in range(2):
        Aqua(rig.consumer("sized", local_bytes=2 * PAGE_BYTES, borrow_bytes=0)).close()
    for count in (16, 1):
        with pytest.raises(InvalidRequest, match=f"{count} pages were asked for, .* has 2 "):
            Aqua(rig.consumer("sized", local_bytes=count * PAGE_BYTES, borrow_bytes=0))
    for _ in range(2):  # the mempool has no more for anybody
        Aqua(rig.consumer("capped", local_bytes=2 * NUM_PAGES * PAGE_BYTES, borrow_bytes=0)).close()
    for num_pages in (8, 4):  # of eight that were made
        with Lender(rig.lender("sized-lender", num_pages=num_pages)) as lender:
            assert lend(lender, num_pages * PAGE_BYTES) == num_pages * PAGE_BYTES
    with (
        Lender(rig.lender("sized-lender", num_pages=9)) as lender,
        pytest.raises(InvalidRequest, match="has 8 "),
    ):
        lend(lender, 9 * PAGE_BYTES)


def test_a_lender_refuses_what_it_cannot_do(rig):
    with Lender(rig.lender("other-lender")) as lender:
        assert lender.reclaim(10) < LIMIT_S, "nothing is lent"
        with pytest.raises(InvalidRequest):
            lender.lend(PAGE_BYTES // 2)
        lend(lender, 4 * PAGE_BYTES)
        with pytest.raises(InvalidRequest):
            lender.lend(PAGE_BYTES)
    with pytest.raises(AquaClosed):
        lender.lend(PAGE_BYTES)


def test_a_lender_lends_what_one_of_its_name_gave_back_before(rig):
    for _ in range(2):
        with Lender(rig.lender("again")) as lender:
            lend(lender, 4 * PAGE_BYTES)
            end_s = time.monotonic() + LIMIT_S
            while leased(rig, "again") < 4:
                assert time.monotonic() < end_s, "its pages are not there"
                time.sleep(0.05)
        assert leased(rig, "again") == 0


def test_a_name_that_another_lender_has_is_refused_until_that_one_has_closed(rig):
    with Lender(rig.lender()) as second:
        with Lender(rig.lender()) as first:
            lend(first, 8 * PAGE_BYTES)
            with pytest.raises(InvalidRequest, match="another process of this host lends as 'lender'"):
                second.lend(4 * PAGE_BYTES)
            assert first.still_offered_bytes() == 8 * PAGE_BYTES
        assert lend(second, 4 * PAGE_BYTES) == 4 * PAGE_BYTES


def test_what_a_killed_lender_lent_goes_to_host_memory_and_its_device_and_the_next_of_its_name_lends(rig):
    settings = json.dumps(asdict(rig.lender("killed")))
    data = torch.arange(3 * PAGE_BYTES // 4, dtype=torch.float32)
    process = subprocess.Popen([sys.executable, "-c", LENDS, settings], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"lent\n"
        with Aqua(rig.consumer("survivor")) as aqua:
            kept = AquaTensor.from_tensor(data)
            step_until(aqua, lambda: kept.location == "peer")
            process.kill()
            until(lambda: kept.location == "dram", "its tensor is in host memory")  # without a step
            until(lambda: pages(rig, "killed").get("released") == NUM_PAGES // 2, "its device has the memory")
            with Lender(rig.lender("killed")) as lender:
                lend(lender, 8 * PAGE_BYTES)
                step_until(aqua, lambda: kept.location == "peer")
                assert lender.reclaim(60_000) < 60
            assert torch.equal(kept.to_compute(), data)
    finally:
        process.kill()
        process.communicate()


def test_the_next_lender_of_a_name_takes_back_what_one_that_it_does_not_know_of_lent(rig):
    forgotten = Lender(rig.lender("twice"))
    lend(forgotten, 4 * PAGE_BYTES)
    until(lambda: leased(rig, "twice") == 4, "its pages are set aside")
    own, forgotten._own = forgotten._own, None
    own.close()  # as of a process that ended
    with Lender(rig.lender("twice")) as lender:
        lend(lender, 6 * PAGE_BYTES)
        until(lambda: leased(rig, "twice") == 6, "the others are back")
        assert lender.reclaim(60_000, keep_bytes=2 * PAGE_BYTES) < 60
        found = pages(rig, "twice")
        assert (found["leased"], found["released"]) == (2, NUM_PAGES // 2 - 2), "its device has the others"
        assert lender.reclaim(60_000) < 60
        assert leased(rig, "twice") == 0
    forgotten.close()


def leased(rig, name: str) -> int:
    """Pages of a lender that are set aside for consumers."""
    return pages(rig, name)["leased"]


def pages(rig, name: str) -> dict[str, int]:
    """Of a lender, by state."""
    (space,) = [s for s in rig.mempool.status()["spaces"] if s["devices"] == [f"cpu:{name}"]]
    return space["pages_by_state"]


def test_what_a_lender_lent_comes_home_from_the_mempool_that_took_over_and_is_lent_again(tmp_path):
    keeper = KeeperProcess(tmp_path)
    rig = AquaRig(tmp_path, **{"keeper-socket": keeper.socket})
    try:
        with Lender(rig.lender()) as lender:
            lend(lender, 8 * PAGE_BYTES)
            until(lambda: leased(rig, "lender") == 8, "its pages are set aside")
            rig.mempool.kill()
            rig.mempool.start()
            assert pages(rig, "lender")["quarantined"] == 8
            until(lambda: lender.still_offered_bytes() == 0, "the offer ended with its mempool")
            lender.reclaim(60_000, keep_bytes=4 * PAGE_BYTES)
            assert pages(rig, "lender")["released"] == NUM_PAGES // 2, "its device has the memory"
            assert lend(lender, 8 * PAGE_BYTES) == 8 * PAGE_BYTES
    finally:
        rig.close()
        keeper.stop()
