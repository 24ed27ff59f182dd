"""fused.cu itself on the CPU, threads in random orders: right rows in every way, nothing astray, dead peers named."""

import shutil
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

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
EPS = 1e-5
CPU = torch.device("cpu")
MULTICAST = 1 << 46  # an address of nothing else
GROUPS = [(2, 1032, torch.bfloat16), (3, 2560, torch.float16)]  # one segment of a row, and two
WAYS = [
    (Algorithm.ONE_SHOT, Engine.PLAIN),
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
