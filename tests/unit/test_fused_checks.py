"""What is asked of the fused all-reduce on GPUs, asked of kernels acted out on the CPU: a wrong row is found."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from shared.kernels.allreduce_rmsnorm import acted_driver
from shared.kernels.allreduce_rmsnorm.acted_driver import ActedDriver, ActedGroup
from shared.kernels.allreduce_rmsnorm.arenas import Arena
from shared.kernels.allreduce_rmsnorm.fused import CudaFused, FusedSettings
from tests.gpu.fused_bed import Bed
from tests.gpu.fused_checks import Case, Opened, check_case, check_shapes

CPU = torch.device("cpu")
ELEMENTS = 16384 * 6  # six rows of the longest


class ActedBed(Bed):
    """All ranks here, without a GPU."""

    def arenas(self, num_bytes: int) -> dict[int, Arena]:
        made = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(self.world)]
        bases = tuple(one.data_ptr() for one in made)
        return {rank: Arena(one, bases, 0, lambda: None) for rank, one in enumerate(made)}

    def open(self, settings: FusedSettings, arenas: dict[int, Arena]) -> dict[int, CudaFused]:
        group = ActedGroup(self.world)
        settings = replace(settings, max_ctas=self.budget)
        return {
            rank: CudaFused(settings, arenas[rank], rank, CPU, driver=ActedDriver(group))
            for rank in self.local
        }

    def meet(self) -> None:
        pass

    def each(self, work: Any) -> dict[int, Any]:
        return {rank: work(rank) for rank in self.local}


def bed_of(world: int) -> ActedBed:
    return ActedBed(world, list(range(world)), CPU, 32, {}, True)


@pytest.fixture(autouse=True)
def one_thread():
    """Rows are short; threads of several test processes would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_right_kernels_pass_with_ranks_that_own_no_row():
    bed = bed_of(3)
    opened = Opened(bed, ELEMENTS)
    opened.change(1032, torch.float16)
    for number, num_tokens in enumerate((1, 2, 3, 7)):
        for whole in (False, True):
            case = Case(number, num_tokens, gemma=whole, whole=whole, sms=2, seed=number)
            assert check_case(bed, opened.fused, case) == []
    opened.close()


def test_random_shapes_of_right_kernels_pass(capsys):
    assert check_shapes(bed_of(2), 4, 1, ELEMENTS)
    assert "0 wrong here: ok" in capsys.readouterr().out


def test_a_kernel_that_forgets_one_rank_is_found(monkeypatch, capsys):
    right = acted_driver._act

    def forgets(shape, name, params):
        params.input[1] = params.input[0]
        right(shape, name, params)

    monkeypatch.setattr(acted_driver, "_act", forgets)
    assert not check_shapes(bed_of(2), 2, 1, ELEMENTS)
    assert "off by" in capsys.readouterr().out


def test_a_kernel_that_sends_to_one_rank_too_few_is_found(monkeypatch, capsys):
    right = acted_driver._act

    def short(shape, name, params):
        params.num_targets = max(1, params.num_targets - 1)
        right(shape, name, params)

    monkeypatch.setattr(acted_driver, "_act", short)
    assert not check_shapes(bed_of(3), 2, 4, ELEMENTS)
    assert "bits differ" in capsys.readouterr().out
