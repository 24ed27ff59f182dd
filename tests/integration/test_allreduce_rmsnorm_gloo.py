"""The fused all-reduce over gloo, two processes: near float64, the same bits everywhere, residual at its owner."""

import multiprocessing as mp
import os
from pathlib import Path

import pytest
import torch

WORLD, HIDDEN, WAIT_S = 2, 1024, 240.0
SHAPES = [(1, 0, False), (7, 0, False), (8, 1 << 30, True), (5, 0, True)]


def inputs(case: int, num_tokens: int, dtype: torch.dtype):
    """Partial sums of every rank, residual, weight: the same on every rank that asks."""
    made = torch.Generator().manual_seed(case)
    partials = [torch.randn(num_tokens, HIDDEN, generator=made).to(dtype) for _ in range(WORLD)]
    return partials, torch.randn(num_tokens, HIDDEN, generator=made).to(dtype), torch.randn(HIDDEN).to(dtype)


def rank_main(rank: int, folder: str) -> None:
    """One rank's calls, kept in a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch.distributed as dist

    from shared.kernels.allreduce_rmsnorm.gloo import GlooFused

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    kept = []
    for case, (num_tokens, one_shot_bytes, gemma) in enumerate(SHAPES):
        for dtype in (torch.bfloat16, torch.float32):
            fused = GlooFused(None, HIDDEN, 8, dtype, one_shot_bytes=one_shot_bytes, whole_residual=True)
            torch.manual_seed(case)
            partials, residual, weight = inputs(case, num_tokens, dtype)
            mine = fused.input(num_tokens)
            mine.copy_(partials[rank])
            before = residual.clone()
            out, carried = fused.run(mine, residual, weight, 1e-6, gemma=gemma)
            assert carried is residual
            plan = fused.plan(num_tokens)
            others = torch.ones(num_tokens, dtype=torch.bool)
            others[plan.start : plan.stop] = False
            assert torch.equal(residual[others], before[others]), "rows of others stay"
            fused.check()
            kept.append((out.clone(), fused.gather_residual(residual).clone()))
    torch.save(kept, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory):
    """What each rank had."""
    folder: Path = tmp_path_factory.mktemp("gloo")
    context = mp.get_context("spawn")
    children = [context.Process(target=rank_main, args=(rank, str(folder))) for rank in range(WORLD)]
    for child in children:
        child.start()
    for child in children:
        child.join(WAIT_S)
        if child.is_alive():
            child.kill()
    assert [child.exitcode for child in children] == [0] * WORLD
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD)]


def test_all_ranks_have_the_same_bits(answers):
    for mine, theirs in zip(*answers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_sums_and_norms_are_within_a_rounding_of_float64(answers):
    from shared.kernels.allreduce_rmsnorm.reference import reference

    got = iter(answers[0])
    for case, (num_tokens, _, gemma) in enumerate(SHAPES):
        for dtype in (torch.bfloat16, torch.float32):
            torch.manual_seed(case)
            partials, residual, weight = inputs(case, num_tokens, dtype)
            want, want_residual = reference(partials, residual, weight, 1e-6, gemma=gemma)
            out, whole = next(got)
            step = torch.finfo(dtype).eps
            assert (out.double() - want).abs().max() <= 2 * step * want.abs().max()
            assert (whole.double() - want_residual).abs().max() <= 2 * step * want_residual.abs().max()
