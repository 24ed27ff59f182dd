"""Entries of block tables that change between two steps, staged in the tables of vLLM's second runner itself.

Its buffers are memory that a GPU shares, and a kernel applies them: both are replaced here, all else is vLLM's.
"""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.worker.gpu import buffer_utils

from shared.engine.far_tables import TableChange, change_tables, make_room, runs

NUM_REQUESTS, NUM_BLOCKS, NUM_PLACES = 2, 40, 16


class Buffer:
    """Of a pool, in memory of this process alone."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.cpu = self.uva = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()


class Apply:
    """The kernel that writes what was staged."""

    def __getitem__(self, _grid: tuple[int]):
        return self.run

    @staticmethod
    def run(out, _stride, indices, starts, contents, ends, _groups, **_options) -> None:
        begin = 0
        for index, start, end in zip(indices.tolist(), starts.tolist(), ends.tolist(), strict=True):
            out[index, start : start + end - begin] = contents[begin:end]
            begin = end


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.setattr(buffer_utils, "UvaBuffer", Buffer)
    monkeypatch.setattr(buffer_utils, "_apply_write_kernel", Apply())
    table = buffer_utils.StagedWriteTensor((NUM_REQUESTS, NUM_BLOCKS), torch.int32, torch.device("cpu"))
    tables = SimpleNamespace(block_tables=[table], blocks_per_kv_block=[1])
    return SimpleNamespace(
        req_states=SimpleNamespace(req_id_to_index={"a": 0, "b": 1}), block_tables=tables, table=table
    )


OUTPUT = SimpleNamespace(finished_req_ids=(), preempted_req_ids=None)


def step(runner, changed: dict[int, int], new: list[int]) -> list[int]:
    """A step of request b that changes entries and adds blocks behind them. What its row says then."""
    have = int((runner.table.gpu[1] != 0).sum())
    change_tables(runner, OUTPUT, runs("b", changed), lambda block_id: block_id + 1000)
    runner.table.stage_write(1, have, new)
    runner.table.apply_write()
    return runner.table.gpu[1].tolist()


def test_a_step_may_change_as_many_runs_of_entries_as_there_are_places_whatever_room_there_is_for_requests(
    runner,
):
    make_room(runner, NUM_PLACES)
    step(runner, {}, list(range(1, 33)))
    changed = {2 * n: 100 + n for n in range(NUM_PLACES)}
    assert len(runs("b", changed)) == NUM_PLACES
    row = step(runner, changed, [33, 34])
    assert row[:32:2] == [1100 + n for n in range(NUM_PLACES)]
    assert row[1:32:2] == list(range(2, 33, 2))
    assert row[32:35] == [33, 34, 0]
    assert not runner.table.gpu[0].any()


def test_without_that_room_vllms_tables_refuse_two_runs_and_new_blocks_of_two_requests(runner):
    """What make_room() is for: three writes for two rows."""
    step(runner, {}, list(range(1, 33)))
    with pytest.raises(ValueError, match="broadcast"):
        step(runner, {0: 100, 2: 101}, [33])


def test_requests_that_are_over_are_passed_over(runner):
    make_room(runner, NUM_PLACES)
    gone = SimpleNamespace(finished_req_ids={"b"}, preempted_req_ids={"a"})
    changes = [TableChange("a", 0, [1]), TableChange("b", 0, [2]), TableChange("c", 0, [3])]
    change_tables(runner, gone, changes, lambda block_id: block_id)
    change_tables(runner, OUTPUT, changes[2:], lambda block_id: block_id)
    runner.table.apply_write()
    assert not runner.table.gpu.any()


def test_a_runner_without_staged_writes_needs_no_room():
    make_room(SimpleNamespace(), NUM_PLACES)
