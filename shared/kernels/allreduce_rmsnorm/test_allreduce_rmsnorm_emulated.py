"""fused.cu itself on the CPU, threads in random orders: right rows in every way, nothing astray, dead peers named."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.errors import PeerTimeout
from shared.kernels.allreduce_rmsnorm.arenas import Arena
from shared.kernels.allreduce_rmsnorm.emulated_driver import EmulatedDriver, EmulatedGroup
from shared.kernels.allreduce_rmsnorm.fused import CudaFused, FusedSettings
from shared.kernels.allreduce_rmsnorm.plan import Algorithm, make_plan, times_from_rows
from shared.kernels.allreduce_rmsnorm.reference import reference
from shared.kernels.allreduce_rmsnorm.shapes import Engine

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]
EPS = 1e-5
CPU = torch.device("cpu")
MULTICAST = 1 << 46  # an address of nothing else
GROUPS = [(2, 1032, torch.bfloat16), (3, 2560, torch.float16)]  # one segment of a row, and two
CUT = {"most_push_threads": 128, "in_flight": 2, "segment_vectors": 64, "max_stages": 2}  # into more pieces
WAYS = [
    (Algorithm.ONE_SHOT, Engine.PLAIN),
    (Algorithm.ONE_SHOT, Engine.PUSH),
    (Algorithm.TWO_SHOT, Engine.PLAIN),
    (Algorithm.TWO_SHOT, Engine.BULK),
    (Algorithm.MULTIMEM, Engine.MULTIMEM),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where libraries are kept."""
    return tmp_path_factory.mktemp("emulated")


def open_group(folder: Path, world: int, hidden: int, dtype: torch.dtype, seed: int, **more):
    settings = FusedSettings(
        hidden, 7, dtype, num_lanes=2, whole_residual=True, **{"use_multicast": True, **more}
    )
    memories = [torch.zeros(settings.layout().num_bytes, dtype=torch.uint8) for _ in range(world)]
    bases = tuple(one.data_ptr() for one in memories)
    arenas = [Arena(one, bases, MULTICAST, lambda: None) for one in memories]
    group = EmulatedGroup(arenas, folder, seed)
    made = [
        CudaFused(settings, arenas[rank], rank, CPU, driver=EmulatedDriver(group)) for rank in range(world)
    ]
    return made, group


def tensors(world: int, num_tokens: int, hidden: int, dtype: torch.dtype, seed: int):
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made).to(dtype)

    return [normal(num_tokens, hidden) for _ in range(world)], normal(num_tokens, hidden), normal(hidden)


def near(got: torch.Tensor, want: torch.Tensor, roundings: float, of_largest: float = 0.01) -> bool:
    """Element by element within so many roundings of its type, and of a share of the largest."""
    step = torch.finfo(got.dtype).eps / 2
    scale = want.abs() + of_largest * want.abs().max()
    return bool(((got.double() - want).abs() <= roundings * step * scale).all())


@pytest.mark.parametrize(("world", "hidden", "dtype"), GROUPS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way[0]}-{way[1]}")
def test_every_way_gives_float64s_rows_with_the_same_bits_everywhere(folder, world, hidden, dtype, way):
    algorithm, engine = way
    fused, _ = open_group(folder, world, hidden, dtype, seed=hidden)
    share = (
        1.0 if engine is Engine.MULTIMEM else 0.01
    )  # the switch rounds the sum before the residual is added
    for lane, (num_tokens, num_sms, whole) in enumerate([(7, 1, False), (1, 2, True)]):
        for again in range(2):  # flags and epochs go on
            partials, residual, weight = tensors(world, num_tokens, hidden, dtype, again)
            held = [residual.clone() for _ in fused]
            for rank, one in enumerate(fused):
                one.input(num_tokens, lane).copy_(partials[rank])
            found = [
                one.run_as(
                    make_plan(algorithm, num_tokens, world, rank), engine, one.input(num_tokens, lane), held[rank],
                    weight, EPS, lane=lane, num_sms=num_sms, gemma=whole, whole_residual=whole,
                )
                for rank, one in enumerate(fused)
            ]  # fmt: skip
            want, want_residual = reference(partials, residual, weight, EPS, gemma=whole)
            for rank, (normed, carried) in enumerate(found):
                plan = make_plan(algorithm, num_tokens, world, rank)
                rows = slice(None) if whole else slice(plan.start, plan.stop)
                assert torch.equal(normed, found[0][0])
                assert near(normed, want, 2.5, share)
                assert near(carried[rows], want_residual[rows], 1.2, share)


@pytest.mark.parametrize(("world", "hidden", "dtype"), GROUPS)
def test_rows_are_right_when_the_bulk_engines_stages_are_used_again_and_again(folder, world, hidden, dtype):
    """Short segments and few stages: each stage's two barriers turn several times in either sense."""
    fused, _ = open_group(folder, world, hidden, dtype, seed=9)
    for one in fused:
        one.shape = replace(one.shape, **CUT)
        assert one.shape.vectors > one.shape.stages * one.shape.segment, "each row goes around more than once"
    for again, num_tokens in enumerate((7, 6, 7)):  # a CTA has two to four rows one behind another
        partials, residual, weight = tensors(world, num_tokens, hidden, dtype, again)
        plans = [make_plan(Algorithm.TWO_SHOT, num_tokens, world, rank) for rank in range(world)]
        held = [residual.clone() for _ in fused]
        found = [
            one.run_as(plans[rank], Engine.BULK, partials[rank], held[rank], weight, EPS, num_sms=1)
            for rank, one in enumerate(fused)
        ]
        want, want_residual = reference(partials, residual, weight, EPS)
        for plan, (normed, carried) in zip(plans, found, strict=True):
            own = slice(plan.start, plan.stop)
            assert torch.equal(normed, found[0][0])
            assert near(normed, want, 2.5)
            assert near(carried[own], want_residual[own], 1.2)


@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize(("world", "hidden", "dtype"), GROUPS)
def test_pushed_rows_are_right_when_ranks_are_launches_apart_and_other_engines_go_between(
    folder, world, hidden, dtype, cut
):
    """A rank that is quick comes to the next push while another one still polls this one's rows."""
    draw = random.Random(hidden)
    fused, group = open_group(folder, world, hidden, dtype, seed=8)
    for one in fused:
        one.shape = replace(one.shape, **cut)
    wanted, carried, kept_alive, pushes = [], [], [], [0, 0]
    with group.apart() as outs:
        for number in range(24):
            algorithm, engine = WAYS[1] if draw.random() < 0.8 else draw.choice(WAYS[:4])
            num_tokens, lane, num_sms = draw.randint(1, 7), int(draw.random() < 0.2), draw.randint(1, 4)
            pushes[lane] += engine is Engine.PUSH
            partials, residual, weight = tensors(world, num_tokens, hidden, dtype, 100 + number)
            residual[:, 32:64] = -0.0
            for rank, rows in enumerate(partials):  # words of zeros, of either sign; halves of words; rows
                rows[:, : 96 + 32 * rank] = 0.0
                rows[:, 32:64] = -0.0 if rank else 0.0
                rows[:, 601 :: 3 + rank] = 0.0
            for rows in partials[draw.randrange(world) :]:
                rows[draw.randrange(num_tokens)] = 0.0
            held = [residual.clone() for _ in fused]
            kept_alive += [*held, weight]
            for rank, one in enumerate(fused):
                plan = make_plan(algorithm, num_tokens, world, rank)
                rows = partials[rank], held[rank]
                one.run_as(plan, engine, *rows, weight, EPS, lane=lane, num_sms=num_sms)
                carried.append((plan, held[rank], reference(partials, residual, weight, EPS)[1]))
            wanted.append(reference(partials, residual, weight, EPS)[0])
    for number, want in enumerate(wanted):
        found = [out.view(dtype)[: want.numel()].view(want.shape) for out in outs[number]]
        assert all(torch.equal(one.view(torch.int16), found[0].view(torch.int16)) for one in found)
        assert near(found[0], want, 2.5), number
    for plan, rows, want in carried:
        own = slice(plan.start, plan.stop)
        assert plan.start == plan.stop or near(rows[own], want[own], 1.2)
    for one in fused:
        for lane, where in enumerate(one._layout.lanes):
            assert not one._arena.own[where.slots : where.turns].any(), "rows are left in a slot"
            turns = one._arena.own[where.turns : where.turns + 8].view(torch.int32)
            assert turns.tolist() == [pushes[lane], 0]


def test_residuals_are_gathered_and_add_norm_needs_no_peer(folder):
    world, hidden, dtype = GROUPS[0]
    fused, group = open_group(folder, world, hidden, dtype, seed=5, use_multicast=False)
    (rows, _), residual, weight = tensors(world, 5, hidden, dtype, 3)
    plans = [make_plan(Algorithm.TWO_SHOT, 5, world, rank) for rank in range(world)]
    held = [torch.zeros_like(residual) for _ in fused]
    for rank, plan in enumerate(plans):
        held[rank][plan.start : plan.stop] = residual[plan.start : plan.stop]
        fused[rank].use(times_from_rows([(1, {Algorithm.ONE_SHOT: 2.0, Algorithm.TWO_SHOT: 1.0})]))
    gathered = [one.gather_residual(held[rank]) for rank, one in enumerate(fused)]
    assert all(torch.equal(one, residual) for one in gathered)
    want, want_residual = reference([rows], residual, weight, EPS)
    fused[1].add_norm(rows, residual, weight, EPS)
    assert near(rows, want, 2.5)
    assert near(residual, want_residual, 1.2)
    assert [name for name, _ in group.launches] == ["gather_rows"] * 2 + ["add_norm"]


def test_a_dead_peer_that_pushes_nothing_is_named_and_later_pushes_neither_wait_nor_send(folder):
    world, hidden, dtype = GROUPS[1]
    fused, group = open_group(folder, world, hidden, dtype, seed=7, timeout_ms=20)
    group.absent = {1}
    partials, residual, weight = tensors(world, 4, hidden, dtype, 4)
    plan = make_plan(Algorithm.ONE_SHOT, 4, world, 0)
    held = {rank: residual.clone() for rank in (0, 2)}

    def push() -> None:
        for rank, rows in held.items():
            fused[rank]._failure = 0
            fused[rank]._report._word.value = 0  # the host forgets, the kernel does not
            fused[rank].run_as(plan, Engine.PUSH, partials[rank], rows, weight, EPS, num_sms=2)

    push()
    for rank in (0, 2):
        with pytest.raises(PeerTimeout, match=f"rank {rank} waited .* ms for rank 1, which never came"):
            fused[rank].check()
    where = fused[1]._layout.lanes[0]
    slots = fused[1]._arena.own[where.slots : where.turns]
    assert slots.any()
    slots.zero_()
    before = held[0].clone()
    push()
    assert not slots.any(), "what a rank computes that has lost another one is void"
    assert torch.equal(held[0], before)
    for rank in (0, 2):
        fused[rank].check()


def test_a_dead_peer_is_named_and_later_calls_return_at_once(folder):
    world, hidden, dtype = GROUPS[0]
    fused, group = open_group(folder, world, hidden, dtype, seed=6, timeout_ms=20)
    group.absent = {1}
    partials, residual, weight = tensors(world, 4, hidden, dtype, 4)
    plan = make_plan(Algorithm.TWO_SHOT, 4, world, 0)
    fused[0].run_as(plan, Engine.BULK, partials[0], residual.clone(), weight, EPS)
    with pytest.raises(PeerTimeout, match="rank 0 waited 20 ms for rank 1, which never came"):
        fused[0].check()
    fused[0]._failure = 0
    fused[0]._report._word.value = 0  # the host forgets, the kernel does not: it waits for nobody now
    fused[0].run_as(plan, Engine.PLAIN, partials[0], residual.clone(), weight, EPS)
    fused[0].check()
