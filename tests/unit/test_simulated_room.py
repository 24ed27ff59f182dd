"""What simulated instances hand over: who waits for room in decode's pages, and what leaves before a prompt is done."""

import pytest

from loadtest.simulator.cluster import Simulation, simulate
from loadtest.simulator.links import Rate
from loadtest.simulator.prices import LinearPrices
from loadtest.simulator.request import SimRequest
from loadtest.simulator.spec import HANDOFF_ROOM_MS, ROOM_WAIT_MS, ClusterSpec, roles_of
from loadtest.simulator.task import EngineLimits
from services.scheduler import config
from services.scheduler.core.limits import PlacementLimits
from services.scheduler.core.predict import CostSettings
from shared.engine.worker_config import WorkerSettings
from tests.support.simulated import names, plain

PRICES = LinearPrices(
    step_base_ms=10.0, token_ms=0.1, context_ms=0.0, decode_ms_per_request=0.0, kv_bytes_per_token=1
)
ALWAYS = CostSettings(disaggregation="always")


def pressed(room_wait_ms: float, **more) -> ClusterSpec:
    """Decode has memory for three of the requests below as they begin, and for two as they end."""
    return ClusterSpec(
        roles_of(1, 1), block_tokens=16, memory_tokens=640, cost=ALWAYS, room_wait_ms=room_wait_ms, **more
    )


REQUESTS = [plain(n, n * 5.0, 160, 120) for n in range(8)]


def test_the_waits_are_those_of_the_services_by_default():
    assert config.SchedulerSettings().room_wait_ms == ROOM_WAIT_MS
    assert WorkerSettings(engine="mock", model_dir="x", model_name="m").handoff_room_ms == HANDOFF_ROOM_MS


def test_with_room_counted_nothing_that_was_handed_over_is_computed_again():
    blind, counted = (simulate(pressed(wait_ms), PRICES, REQUESTS) for wait_ms in (0.0, HANDOFF_ROOM_MS))
    assert blind.num_preempted > 0
    assert counted.num_preempted == 0
    assert all(record.ok for record in [*blind.outcomes, *counted.outcomes])


def test_who_has_no_room_is_held_by_the_scheduler_and_placed_when_there_is_some():
    found = simulate(pressed(HANDOFF_ROOM_MS), PRICES, REQUESTS)
    held = [record for record in found.outcomes if "for room in decode's pages" in record.reason]
    assert held
    assert all(record.ok for record in held)


def test_who_is_handed_over_without_room_waits_with_its_pages_where_it_was_computed():
    anyway = PlacementLimits(room_wait_ms=0)
    found = simulate(pressed(HANDOFF_ROOM_MS, placement=anyway), PRICES, REQUESTS)
    assert not any("for room in decode's pages" in record.reason for record in found.outcomes)
    assert found.num_preempted == 0
    impatient = simulate(pressed(1.0, placement=anyway), PRICES, REQUESTS)
    assert impatient.num_preempted > 0


def test_nobody_waits_for_room_where_nothing_is_handed_over():
    spec = ClusterSpec(roles_of(0, 0, 2), block_tokens=16, memory_tokens=640)
    simulation = Simulation(spec, PRICES, REQUESTS)
    simulation.run()
    assert [engine.told()["room"] for engine in simulation.engines] == [None, None]


def test_what_is_promised_and_what_may_still_grow_is_owed():
    simulation = Simulation(pressed(HANDOFF_ROOM_MS), PRICES, REQUESTS[:1])
    decode, seen = simulation.engines[1], []
    for at_ms in range(0, 1_200, 25):
        simulation._events.at(at_ms, lambda: seen.append(decode.told()["room"]))
    simulation.run()
    assert {room.num_blocks for room in seen} == {40}
    running = [room for room in seen if room.owed_blocks]
    assert len(running) > 1
    for room in running:  # 280 tokens at its end, however many are there by now
        assert room.free_blocks - room.owed_blocks == 40 - 18
    assert decode.told()["room"].owed_blocks == 0


def test_what_a_request_gives_up_before_others_have_grown_is_not_owed():
    simulation = Simulation(
        pressed(HANDOFF_ROOM_MS), PRICES, [plain(0, 0.0, 160, 40), plain(1, 0.0, 160, 300)]
    )
    decode, seen = simulation.engines[1], []
    for at_ms in range(0, 400, 10):
        simulation._events.at(at_ms, lambda: seen.append((decode.num_running, decode.told()["room"])))
    simulation.run()
    both = [room for num_running, room in seen if num_running == 2]
    assert both
    assert all(room.free_blocks - room.owed_blocks > 40 - 13 - 29 for room in both)


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_a_long_prompts_chunks_leave_while_the_rest_is_computed(num_chunks):
    limits = EngineLimits(max_batched_tokens=1_600 // num_chunks)
    jct_ms, moved = [], []
    for is_ahead in (False, True):
        spec = ClusterSpec(
            roles_of(1, 1), block_tokens=16, limits=limits, cost=ALWAYS, instances_per_host=2,
            peer=Rate(0.0, 16.0), handoff_ahead=is_ahead,
        )  # fmt: skip
        run = simulate(spec, PRICES, [plain(0, 0.0, 1_600, 4)])
        jct_ms.append(run.outcomes[0].jct_ms)
        moved.append(run.peer_bytes)
    assert moved[0] == moved[1]
    # 100 ms of transfers, of which the last chunk's alone lie behind the prompt: a chunk takes 50 ms, its bytes 25
    assert jct_ms[0] - jct_ms[1] == pytest.approx(100 - 100 / num_chunks)


def test_blocks_that_the_decode_side_has_are_not_sent_ahead():
    limits = EngineLimits(max_batched_tokens=400)
    spec = ClusterSpec(
        roles_of(1, 1),
        block_tokens=16,
        limits=limits,
        cost=ALWAYS,
        instances_per_host=2,
        peer=Rate(0.0, 16.0),
    )
    blocks = tuple(names(*range(100)))
    run = simulate(spec, PRICES, [SimRequest(n, 5_000.0 * n, 1_600, 4, blocks) for n in range(2)])
    assert run.outcomes[1].sources["engine"] > 0
    assert run.peer_bytes == 1_600
