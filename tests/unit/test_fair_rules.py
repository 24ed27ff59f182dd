"""When slices pay, and what is moved for them."""

import pytest

from shared.fair.accounts import Accounts
from shared.fair.rules import FairRules, Room, switch_share
from shared.fair.slices import FairSlices

MIB = 1 << 20


def contended(room: Room, rules: FairRules | None = None) -> FairSlices:
    """Six requests that ran one after the other in four slots; each needs ten pages."""
    slices = FairSlices(rules or FairRules())
    for i in range(6):
        slices.add(f"r{i}", "t", 1.0, 1)
        slices.holds(f"r{i}", 10, 10 if i < 4 else 0)
    for i in range(4):
        slices.started(f"r{i}")
        slices.served(f"r{i}", 100, 0)
    return slices


def test_switching_costs_bytes_over_bandwidth_against_the_slice():
    room = Room(4, 64, pages=40, page_bytes=8 * MIB, swap_bytes_per_s=8 * MIB * 1_000.0, step_ms=10)
    assert switch_share(4, room, slice_steps=10) == pytest.approx(0.04)  # 4 ms of 100 ms
    assert switch_share(0, Room(4, 64), 10) == 0.0
    assert switch_share(1, Room(4, 64, pages=40, page_bytes=MIB), 10) == float("inf")


@pytest.mark.parametrize(
    ("rules", "turn_steps"),
    [
        (FairRules(slice_steps=5), 5), (FairRules(slice_steps=8, quantum_tokens=64), 64),
        (FairRules(slice_steps=8, quantum_tokens=1 << 20, patience_slices=128), 512),
        (FairRules(slice_steps=8, quantum_tokens=2), 8),
    ],
)  # fmt: skip
def test_a_turn_is_a_slice_or_a_unit_of_service_as_far_as_others_patience_goes(rules, turn_steps):
    assert rules.turn_steps == turn_steps


@pytest.mark.parametrize(("quantum_tokens", "is_fair"), [(1, False), (1 << 20, True)])
def test_moving_pages_is_weighed_against_the_time_for_which_memory_is_given(quantum_tokens, is_fair):
    """168 ms for pages that are given for 80 ms, or, until who gives them is overdue, for 20 s."""
    rules = FairRules(quantum_tokens=quantum_tokens, patience_slices=512)
    room = Room(4, 64, pages=40, page_bytes=8 * MIB, swap_bytes_per_s=1e9, step_ms=10)
    plan = contended(room, rules).plan(room)
    assert (plan.is_fair, bool(plan.park)) == (is_fair, is_fair)


def test_slots_alone_being_short_moves_no_page():
    slices = contended(Room(4, 64))
    plan = slices.plan(Room(4, 64, pages=1_000))
    assert plan.is_fair
    assert plan.moved_pages == 0
    assert plan.start == ["r4", "r5"]
    assert plan.park == ["r2", "r3"]


@pytest.mark.parametrize(("gbps", "is_fair"), [(1.0, False), (40.0, True)])
def test_pages_that_must_move_are_counted_and_slow_space_means_order_of_arrival(gbps, is_fair):
    room = Room(4, 64, pages=40, page_bytes=8 * MIB, swap_bytes_per_s=gbps * 1e9, step_ms=10)
    plan = contended(room).plan(room)
    assert plan.is_fair is is_fair
    assert (plan.moved_pages, plan.park) == ((20, ["r2", "r3"]) if is_fair else (0, []))


def test_slices_that_pay_go_on_a_little_longer_than_they_begin():
    rules = FairRules(slice_steps=1, max_switch_share=0.1, stay_ratio=2.0)
    page = 1_000_000
    fast = Room(4, 64, pages=40, page_bytes=page, swap_bytes_per_s=page * 20 / 0.1 / 0.01, step_ms=10)
    slower = Room(4, 64, pages=40, page_bytes=page, swap_bytes_per_s=fast.swap_bytes_per_s / 1.5, step_ms=10)
    assert not contended(slower, rules).plan(slower).is_fair
    slices = contended(fast, rules)
    assert slices.plan(fast).is_fair  # nothing of it was carried out: the next plan is the same
    assert slices.plan(slower).is_fair


def test_a_running_request_keeps_its_slot_against_one_that_is_hardly_behind():
    rules = FairRules(slice_steps=1, hysteresis_tokens=4)
    slices = FairSlices(rules)
    for i in range(2):
        slices.add(f"r{i}", "t", 1.0, 1)
        slices.served(f"r{i}", 1, 0)
    slices.started("r0")
    slices.served("r0", 4, 0)
    room = Room(1, 8)
    assert slices.plan(room).park == []
    slices.served("r0", 1, 0)
    plan = slices.plan(room)
    assert (plan.park, plan.start) == (["r0"], ["r1"])


def test_prompts_come_first_while_their_tokens_last_and_decodes_fill_the_rest():
    slices = FairSlices(FairRules())
    for i in range(6):
        slices.add(f"decode{i}", "t", 1.0, 1)
        slices.served(f"decode{i}", 1, 0)
    for i in range(3):
        slices.add(f"prompt{i}", "t", 1.0, 40)
    plan = slices.plan(Room(slots=4, step_tokens=64))
    assert plan.start == [
        "prompt0",
        "prompt1",
        "decode0",
        "decode1",
    ]  # p = 60: the second prompt takes the rest
    for name in [f"decode{i}" for i in range(6)]:
        slices.remove(name)
    for i in range(3, 6):
        slices.add(f"prompt{i}", "t", 1.0, 40)
    plan = FairSlices.plan(slices, Room(slots=4, step_tokens=64))
    assert len(plan.start) >= 4, "spare slots go to prompts"


def test_with_units_a_slice_takes_as_many_prompts_as_fit_into_all_of_its_steps():
    slices = FairSlices(FairRules(slice_steps=3, quantum_tokens=100))
    for i in range(2):
        slices.add(f"decode{i}", "t", 1.0, 1)
        slices.served(f"decode{i}", 1, 0)
    for i in range(6):
        slices.add(f"prompt{i}", "t", 1.0, 40)
    plan = slices.plan(
        Room(slots=6, step_tokens=56)
    )  # 50 a step, 150 in all: the fourth prompt takes the rest
    assert plan.start == ["prompt0", "prompt1", "prompt2", "prompt3", "decode0", "decode1"]


def waiting_prompts(**rules) -> FairSlices:
    """Four that decode in four slots, and 30 prompts of 100 tokens behind them."""
    slices = FairSlices(FairRules(slice_steps=4, quantum_tokens=1 << 20, **rules))
    for i in range(34):
        slices.add(f"r{i}", "t", 1.0, 1 if i < 4 else 100)
    for i in range(4):
        slices.served(f"r{i}", 1, 0)
        slices.started(f"r{i}")
    return slices


def test_prompts_that_wait_are_spread_over_the_time_that_is_given_for_them():
    room = Room(slots=4, step_tokens=512, step_ms=10.0)
    slices = waiting_prompts(spread_ms=100.0, chunk_tokens=32)
    assert slices.prompt_tokens(512, 10.0) == 512, "no turns were taken yet"
    assert slices.plan(room).is_fair
    assert slices.prompt_tokens(512, 10.0) == 300  # 3,000 tokens in ten steps
    for i in range(4, 32):
        slices.served(f"r{i}", 100, 0)
    slices.remove("r32")
    assert slices.prompt_tokens(512, 10.0) == 32  # 100 tokens are left: the least
    slices.calm_step()
    assert slices.prompt_tokens(512, 10.0) == 512


def test_prompts_are_computed_at_once_where_nothing_is_to_be_spread():
    slices = waiting_prompts()
    slices.plan(Room(slots=4, step_tokens=512, step_ms=10.0))
    assert slices.prompt_tokens(512, 10.0) == 512


def test_a_slice_takes_the_prompts_that_its_steps_are_given():
    slices = waiting_prompts(spread_ms=100.0, chunk_tokens=32)
    room = Room(slots=16, step_tokens=512, step_ms=10.0)
    slices.plan(room)
    for _ in range(3):
        slices.next_step(vacant=False)
    chosen = slices.plan(room).start  # 300 a step, four steps: twelve prompts of 100
    assert len([name for name in chosen if int(name[1:]) >= 4]) == 12


def test_within_a_unit_of_service_who_came_first_goes_first_and_a_whole_unit_ahead_gives_its_slot():
    slices = FairSlices(FairRules(slice_steps=1, quantum_tokens=8, patience_slices=1_000))
    for i in range(3):
        slices.add(f"r{i}", "t", 1.0, 1)
        slices.served(f"r{i}", 1, 0)
    room = Room(1, 8)
    assert slices.plan(room).start == ["r0"]
    slices.started("r0")
    slices.served("r0", 6, 0)
    assert slices.plan(room).park == []  # r1 and r2 were served less, but not by a unit
    slices.served("r0", 8, 0)
    plan = slices.plan(room)
    assert (plan.park, plan.start) == (["r0"], ["r1"])


def test_who_comes_gets_its_first_slice_at_once_and_then_waits_for_those_before_it():
    slices = FairSlices(FairRules(slice_steps=1, quantum_tokens=1_000, patience_slices=1_000))
    for i in range(2):
        slices.add(f"old{i}", "t", 1.0, 1)
        slices.served(f"old{i}", 1, 0)
        slices.started(f"old{i}")
    slices.add("new", "t", 1.0, 10)
    room = Room(2, 64)
    plan = slices.plan(room)
    assert (plan.park, plan.start) == (["old1"], ["new"])
    slices.parked("old1")
    slices.started("new")
    slices.served("new", 10, 0)
    plan = slices.plan(room)
    assert (plan.park, plan.start) == (["new"], ["old1"])


def test_who_comes_where_nobody_waited_does_not_wait_for_the_end_of_a_slice():
    slices = FairSlices(FairRules(slice_steps=8))
    room = Room(2, 64)
    for i in range(2):
        slices.add(f"old{i}", "t", 1.0, 1)
        slices.started(f"old{i}")
        slices.served(f"old{i}", 1, 0)
    assert slices.plan(room).park == []
    assert slices.is_calm
    slices.add("new", "t", 1.0, 10)
    plan = slices.plan(room)
    assert (plan.park, plan.start, plan.is_fair, slices.is_calm) == (["old1"], ["new"], True, False)
    slices.parked("old1")
    slices.started("new")
    slices.served("new", 10, 0)
    assert slices.plan(room).park == []  # others do: the slice goes on


def test_with_units_a_slot_without_its_pages_counts_as_waiting_and_who_came_last_gives_way():
    room = Room(slots=4, step_tokens=64, pages=10, page_bytes=1, swap_bytes_per_s=1e9, step_ms=10.0)
    for quantum, parked in ((100, ["r2"]), (1, [])):
        slices = FairSlices(FairRules(slice_steps=1, quantum_tokens=quantum))
        for i in range(3):
            slices.add(f"r{i}", "t", 1.0, 1)
            slices.served(f"r{i}", 1, 0)
            slices.started(f"r{i}")
            slices.holds(f"r{i}", 4, 1 if i == 1 else 4, 3 if i == 1 else 0)
        assert slices.plan(room).park == parked


def test_who_is_not_ready_gets_no_slot():
    slices = contended(Room(4, 64))
    slices.holds("r4", 1, 0, ready=False)
    assert slices.plan(Room(4, 64)).start == ["r5"]


def test_a_request_too_large_for_what_is_left_is_passed_over_until_it_is_overdue():
    rules = FairRules(slice_steps=1, patience_slices=2)
    slices = FairSlices(rules)
    for name, pages in (("small0", 4), ("large", 9), ("small1", 4)):
        slices.add(name, "t", 1.0, 1)
        slices.holds(name, pages, 0)
    room = Room(2, 64, pages=10, page_bytes=1, swap_bytes_per_s=1e9, step_ms=1)
    assert slices.plan(room).start == ["small0", "small1"]
    slices.started("small0")
    slices.started("small1")
    for _ in range(rules.patience_slices):
        plan = slices.plan(room)
    assert plan.start == ["large"]
    assert plan.park == ["small0", "small1"]


def test_what_an_overdue_request_lacks_is_saved_up_and_not_given_to_smaller_ones():
    rules = FairRules(slice_steps=1, patience_slices=1)
    slices = FairSlices(rules)
    for name, tenant, pages in (("first", "a", 4), ("large", "b", 8), ("small", "b", 2)):
        slices.add(name, tenant, 1.0, 1)
        slices.holds(name, pages, 0)
    room = Room(2, 64, pages=10, page_bytes=1, swap_bytes_per_s=1e9, step_ms=1)
    assert slices.plan(room).start == ["first", "small"]
    assert slices.plan(room).start == ["first"]


def test_a_newcomer_starts_level_with_the_least_served_of_those_that_run():
    slices = FairSlices(FairRules())
    for i, served in enumerate((50, 80)):
        slices.add(f"r{i}", "t", 1.0, 1)
        slices.started(f"r{i}")
        slices.served(f"r{i}", 1, 0)
        slices.served(f"r{i}", served, 0)
    slices.add("new", "t", 1.0, 1)
    slices.served("new", 1, 0)
    least = slices.accounts.requests["r0"].virtual
    assert slices.accounts.requests["new"].virtual == least
    slices.add("prompt", "t", 1.0, 100)
    slices.started("prompt")
    slices.served("prompt", 60, 40)
    slices.add("next", "t", 1.0, 100)
    assert slices.accounts.requests["next"].virtual == 60


def test_tenants_of_one_weight_get_the_same_slots_in_one_plan():
    slices = FairSlices(FairRules())
    for i in range(8):
        slices.add(f"r{i}", "ab"[i // 4], 1.0, 1)
        slices.served(f"r{i}", 1, 0)
    assert sorted(slices.plan(Room(4, 64)).start) == ["r0", "r1", "r4", "r5"]


def test_a_slot_that_falls_vacant_goes_to_the_least_served_that_is_ready():
    slices = contended(Room(4, 64))
    plan = slices.plan(Room(4, 64))
    for name in plan.park:
        slices.parked(name)
    for name in plan.start:
        slices.started(name)
    slices.remove("r4")
    slices.holds("r2", 1, 0, ready=False)
    plan = slices.plan(Room(4, 64))
    assert (plan.park, plan.start) == ([], ["r3"])


def test_tenants_that_left_owing_nothing_are_forgotten():
    accounts = Accounts()
    for i in range(10_000):
        accounts.add(f"r{i}", f"t{i}", 1.0, 1, 0)
        accounts.served(f"r{i}", i % 7, 0)
        accounts.remove(f"r{i}")
    assert len(accounts._idle) <= 4096
    assert not accounts.tenants


def test_where_nobody_waits_nobody_owes_anything_and_whoever_comes_starts_level():
    accounts = Accounts()
    for name in ("ahead", "stays"):
        accounts.add(name, name, 1.0, 1, 0)
    accounts.served("ahead", 9_000, 0)
    accounts.served("stays", 100, 0)
    accounts.remove("ahead")
    accounts.level(None)
    accounts.remove("stays")
    for name in ("ahead", "stays", "new"):
        accounts.add(name, name, 1.0, 1, 0)
    assert {tenant.virtual for tenant in accounts.tenants.values()} == {100.0}


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_weights_are_positive(weight):
    with pytest.raises(ValueError, match="weight"):
        FairSlices(FairRules()).add("r", "t", weight, 1)


def test_rules_are_checked():
    with pytest.raises(ValueError, match="slice_steps"):
        FairRules(slice_steps=0)
    with pytest.raises(ValueError, match="spread_ms"):
        FairRules(spread_ms=-1.0)
    with pytest.raises(ValueError, match="chunk_tokens"):
        FairRules(chunk_tokens=0)
    with pytest.raises(ValueError, match="share"):
        FairRules(max_switch_share=2.0)


def test_a_tenant_that_is_served_elsewhere_waits_here_but_not_without_end():
    rules = FairRules(slice_steps=1, patience_slices=4)
    slices = FairSlices(rules)
    for i in range(8):
        slices.add(f"r{i}", "ab"[i // 4], 1.0, 1)
        slices.served(f"r{i}", 1, 0)
    turns = []
    for _ in range(24):
        slices.accounts.served_elsewhere("b", 1_000)
        plan = slices.plan(Room(2, 64))
        for name in plan.park:
            slices.parked(name)
        for name in plan.start:
            slices.started(name)
        running = [a for a in slices.accounts.requests.values() if a.running]
        turns.append(any(a.tenant == "b" for a in running))
        for account in running:
            slices.served(account.request_id, 1, 0)
    longest = max(len(part) for part in "".join("-+"[turn] for turn in turns).split("+"))
    assert rules.patience_slices <= longest <= rules.patience_slices + 2
    assert sum(turns) < 8


def test_where_switching_does_not_pay_who_has_pages_goes_on_before_who_never_ran():
    slices = FairSlices(FairRules(slice_steps=1))
    for name, pages, resident in (("long", 9, 0), ("parked", 3, 2), ("new", 1, 0)):
        slices.add(name, "t", 1.0, 1)
        slices.holds(name, pages, resident)
    assert slices.plan(Room(4, 64, pages=10)).start == ["parked", "long", "new"]
