"""The launcher over kernels acted out on the CPU: float64's rows on every rank; wrong calls are refused."""

import ctypes

import pytest
import torch

from shared.errors import InvalidRequest, PeerTimeout
from shared.kernels.allreduce_rmsnorm.acted_driver import ActedDriver, ActedGroup
from shared.kernels.allreduce_rmsnorm.arenas import Arena
from shared.kernels.allreduce_rmsnorm.errors import FusedUnavailable, Phase, pack
from shared.kernels.allreduce_rmsnorm.fused import LATER_MS, CudaFused, FusedSettings
from shared.kernels.allreduce_rmsnorm.plan import Algorithm, Way, make_plan, times_from_rows
from shared.kernels.allreduce_rmsnorm.reference import reference
from shared.kernels.allreduce_rmsnorm.shapes import Engine, Launch

HIDDEN, MOST, EPS = 1032, 9, 1e-5
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    """Rows are short; threads of several test processes would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def open_group(world: int, **more) -> tuple[list[CudaFused], ActedGroup]:
    return opened(world, FusedSettings(HIDDEN, MOST, num_lanes=2, **{"whole_residual": True, **more}))


def opened(world: int, settings: FusedSettings) -> tuple[list[CudaFused], ActedGroup]:
    memories = [torch.zeros(settings.layout().num_bytes, dtype=torch.uint8) for _ in range(world)]
    bases = tuple(one.data_ptr() for one in memories)
    group = ActedGroup(world)
    arenas = [Arena(one, bases, 0, lambda: None) for one in memories]
    return [
        CudaFused(settings, arena, rank, CPU, driver=ActedDriver(group)) for rank, arena in enumerate(arenas)
    ], group


def tensors(world: int, num_tokens: int, seed: int):
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made).bfloat16()

    return [normal(num_tokens, HIDDEN) for _ in range(world)], normal(num_tokens, HIDDEN), normal(HIDDEN)


@pytest.mark.parametrize(
    ("algorithm", "engine"),
    [
        (Algorithm.ONE_SHOT, Engine.PLAIN),
        (Algorithm.ONE_SHOT, Engine.PUSH),
        (Algorithm.TWO_SHOT, Engine.PLAIN),
    ],
)
@pytest.mark.parametrize(("world", "num_tokens"), [(1, 1), (2, 1), (2, 9), (3, 2), (4, 7)])
@pytest.mark.parametrize(("whole", "gemma"), [(False, False), (True, True)])
def test_rows_of_every_rank_are_float64s_and_lanes_do_not_touch(
    algorithm, engine, world, num_tokens, whole, gemma
):
    fused, group = open_group(world)
    for lane in (0, 1):
        partials, residual, weight = tensors(world, num_tokens, lane)
        held = [residual.clone() for _ in range(world)]
        found = []
        for rank, one in enumerate(fused):
            plan = make_plan(algorithm, num_tokens, world, rank)
            more = {"lane": lane, "gemma": gemma, "whole_residual": whole}
            found.append(one.run_as(plan, engine, partials[rank], held[rank], weight, EPS, **more))
        want, want_residual = reference(partials, residual, weight, EPS, gemma=gemma)
        for rank, (normed, carried) in enumerate(found):
            assert torch.equal(normed, found[0][0])
            assert (normed.double() - want).abs().max() < 0.02 * want.abs().max()
            plan = make_plan(algorithm, num_tokens, world, rank)
            others = torch.ones(num_tokens, dtype=torch.bool)
            others[plan.start : plan.stop] = False
            assert torch.equal(held[rank][others], residual[others]), "rows of others stay"
            right = slice(None) if whole else slice(plan.start, plan.stop)
            assert torch.allclose(carried[right].double(), want_residual[right], rtol=0.01, atol=0.01)
        if lane == 1:
            assert torch.equal(fused[0].input(num_tokens, 1), partials[0])
            assert not torch.equal(fused[0].input(num_tokens, 0), partials[0])
    assert {name for name, _ in group.launches} == {f"fused_{engine}"}


def test_few_rows_are_pushed_unless_reading_was_measured_to_be_shorter_and_more_than_slots_hold_are_read():
    fused, group = opened(2, FusedSettings(16384, 300))
    push, plain = Way(Engine.PUSH), Way(Engine.PLAIN)
    assert fused[0].push_tokens == 64
    assert [fused[0].way(Algorithm.ONE_SHOT, count) for count in (1, 64, 65)] == [push, push, plain]
    assert fused[0].way(Algorithm.ONE_SHOT, 1, num_sms=3) == Way(Engine.PUSH, 3)
    assert fused[0].engine(Algorithm.ONE_SHOT) is Engine.PLAIN, "of any number of rows"
    rows = [(16384 * 2 * count, {plain: us, push: 1.0}) for count, us in ((1, 2.0), (8, 0.9), (256, 2.0))]
    times = times_from_rows([(1, {Algorithm.TWO_SHOT: 2.0})], (), rows)
    weight = torch.ones(16384, dtype=torch.bfloat16)
    held = [torch.zeros(2, 16384, dtype=torch.bfloat16) for _ in fused]
    for rank, one in enumerate(fused):
        one.use(times)
        assert [one.way(Algorithm.ONE_SHOT, count).engine for count in (2, 9, 64, 65)] == [
            Engine.PUSH, Engine.PLAIN, Engine.PUSH, Engine.PLAIN,
        ]  # fmt: skip
        one.run(one.input(2), held[rank], weight, EPS, num_sms=1)
        for plan in (make_plan(Algorithm.ONE_SHOT, 65, 2, rank), make_plan(Algorithm.TWO_SHOT, 2, 2, rank)):
            given = one.input(plan.num_tokens)
            with pytest.raises(InvalidRequest, match="one-shot sums of up to 64 tokens"):
                one.run_as(plan, Engine.PUSH, given, given, weight, EPS)
    assert group.launches == [("fused_push", Launch(1, 1024, 0))] * 2


def test_the_input_view_is_not_copied_and_gathered_residuals_are_whole():
    fused, group = open_group(
        2, times=times_from_rows([(1, {Algorithm.ONE_SHOT: 2.0, Algorithm.TWO_SHOT: 1.0})])
    )
    partials, residual, weight = tensors(2, 5, 7)
    held = [residual.clone() for _ in fused]
    for rank, one in enumerate(fused):
        one.input(5).copy_(partials[rank])
        one.run(one.input(5), held[rank], weight, EPS, num_sms=2)
    gathered = [one.gather_residual(held[rank]) for rank, one in enumerate(fused)]
    _, want = reference(partials, residual, weight, EPS)
    assert torch.equal(gathered[0], gathered[1])
    assert torch.allclose(gathered[0].double(), want, rtol=0.01, atol=0.01)
    assert [name for name, _ in group.launches] == ["fused_plain"] * 2 + ["gather_rows"] * 2
    assert all(launch.ctas == 2 for name, launch in group.launches if name == "fused_plain")
    for one in fused:
        one.close()


def test_add_norm_is_the_same_without_a_sum():
    fused, _ = open_group(1)
    (rows,), residual, weight = tensors(1, 4, 3)
    want, want_residual = reference([rows], residual, weight, EPS)
    fused[0].add_norm(rows, residual, weight, EPS)
    assert torch.allclose(rows.double(), want, rtol=0.02, atol=0.02)
    assert torch.allclose(residual.double(), want_residual, rtol=0.01, atol=0.01)


def test_long_rows_of_many_tokens_go_to_the_bulk_engine_and_short_ones_to_registers():
    fused, _ = open_group(2)
    assert fused[0].engine(Algorithm.TWO_SHOT) is Engine.PLAIN
    (one, _), _ = opened(2, FusedSettings(8192, 4))
    assert one.engine(Algorithm.TWO_SHOT) is Engine.BULK
    assert one.way(Algorithm.TWO_SHOT, 1) == Way(Engine.BULK), "nothing was measured"


def test_rows_on_all_sms_go_the_way_that_was_measured_to_be_shorter_and_a_budget_goes_to_bulk_copies():
    (one, _), _ = opened(2, FusedSettings(8192, 4))
    plain, bulk = Way(Engine.PLAIN), Way(Engine.BULK)
    one.use(
        times_from_rows(
            [(1, {Algorithm.ONE_SHOT: 3.0})],
            [(8192 * 2, {plain: 1.0, bulk: 2.0}), (3 * 8192 * 2, {plain: 2.0, bulk: 1.0})],
        )
    )
    assert one.way(Algorithm.TWO_SHOT, 1) == plain
    assert one.way(Algorithm.TWO_SHOT, 3) == one.way(Algorithm.TWO_SHOT, 4) == bulk
    assert one.way(Algorithm.TWO_SHOT, 1, num_sms=16) == Way(Engine.BULK, 16)
    assert one.engine(Algorithm.TWO_SHOT) is Engine.BULK


def test_a_sum_that_was_fastest_with_few_ctas_has_so_many_and_a_callers_budget_stays_the_callers():
    fused, group = open_group(2)
    few, plain = Way(Engine.PLAIN, 2), Way(Engine.PLAIN)
    times = times_from_rows([(1, {Algorithm.ONE_SHOT: 2.0})], [(1, {plain: 1.0, few: 0.9})])
    elsewhere = times_from_rows(
        [(1, {Algorithm.ONE_SHOT: 2.0})],
        [(1, {plain: 1.0, Way(Engine.BULK): 0.5, Way(Engine.BULK, 2): 0.4})],
    )
    partials, residual, weight = tensors(2, 8, 7)
    held = [residual.clone() for _ in fused]
    for one in fused:
        one.driver.capability = (8, 0)  # no bulk copies: what was measured elsewhere does not count
        one.use(elsewhere)
    for num_sms in (0, 3):
        for rank, one in enumerate(fused):
            one.run(partials[rank], held[rank], weight, EPS, num_sms=num_sms)
    assert [launch.ctas for _, launch in group.launches] == [4, 4, 3, 3]
    fused, group = opened(2, FusedSettings(2048, 8))
    rows, weight = torch.ones(8, 2048, dtype=torch.bfloat16), torch.ones(2048, dtype=torch.bfloat16)
    held = [rows.clone() for _ in fused]
    for rank, one in enumerate(fused):
        assert one.few_sms == 0
        one.use(times)
        assert one.few_sms == 2
        one.run(rows, held[rank], weight, EPS)
    assert group.launches == [("fused_plain", group.launches[0][1])] * 2
    assert group.launches[0][1].ctas == 2


def test_wrong_tensors_are_refused_before_anything_starts():
    fused, group = open_group(2, whole_residual=False)
    partials, residual, weight = tensors(2, 4, 1)
    for wrong in (
        (partials[0].half(), residual, weight), (partials[0][:, :1024], residual, weight),
        (partials[0], residual[:3], weight), (partials[0], residual.t().contiguous().t(), weight),
        (partials[0], residual, weight[:8]), (partials[0], residual, weight.float()),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest):
            fused[0].run(*wrong, EPS)
    plan = make_plan(Algorithm.TWO_SHOT, 4, 2, 0)
    with pytest.raises(InvalidRequest, match="whole_residual"):
        fused[0].run_as(plan, Engine.PLAIN, partials[0], residual, weight, EPS, whole_residual=True)
    with pytest.raises(FusedUnavailable, match="multicast"):
        open_group(2, use_multicast=True)
    assert not group.launches


def test_the_rank_whose_output_leaves_gives_up_first_and_each_says_how_long_it_waited():
    """Else a peer that came in between would let it hand on what another rank computed in vain."""
    fused, _ = open_group(3, timeout_ms=50)
    waits_ms = [{params.timeout_ns / 1e6 for params in one._params} for one in fused]
    assert waits_ms == [{50}, {50 + LATER_MS}, {50 + LATER_MS}]
    word = ctypes.c_uint32.from_address(fused[2]._report.address)
    word.value = pack(Phase.LEAVE, 1, 0)
    with pytest.raises(PeerTimeout, match=f"rank 2 waited {50 + LATER_MS} ms for rank 1"):
        fused[2].check()


def test_a_peer_that_did_not_come_is_named_by_check_and_by_every_later_call():
    fused, _ = open_group(2)
    fused[0].check()
    partials, residual, weight = tensors(2, 4, 1)
    word = ctypes.c_uint32.from_address(fused[0]._report.address)
    word.value = pack(Phase.ARRIVE, 1, 0)
    for _ in range(2):
        with pytest.raises(PeerTimeout, match="for rank 1"):
            fused[0].check()
    with pytest.raises(PeerTimeout):
        fused[0].run(partials[0], residual, weight, EPS)
    with pytest.raises(PeerTimeout):
        fused[0].gather_residual(residual)


def test_no_call_has_more_ctas_than_the_group_may_use():
    fused, group = opened(2, FusedSettings(2048, 64, max_ctas=4))
    weight = torch.ones(2048).bfloat16()
    held = [torch.zeros(64, 2048).bfloat16() for _ in fused]  # the last rank's launch writes the others' too
    times = times_from_rows(
        [(1, {Algorithm.ONE_SHOT: 9.0})], [(1, {Way(Engine.BULK): 2.0, Way(Engine.BULK, 32): 1.0})]
    )
    for measured in (None, times):
        for num_sms in (0, 2, 16):
            for rank, one in enumerate(fused):
                if measured is not None:
                    one.use(measured)
                one.run(one.input(64), held[rank], weight, EPS, num_sms=num_sms)
            assert group.launches[-1][1].ctas == min(num_sms or 4, 4)


def test_the_norm_of_no_rows_launches_nothing():
    (fused,), group = open_group(1)
    none = torch.zeros(0, HIDDEN).bfloat16()
    fused.add_norm(none, none.clone(), torch.ones(HIDDEN).bfloat16(), EPS)
    assert not group.launches
