"""Entries of block tables that change between two steps, in vLLM's runners: blocks that went far, or moved there.

What was there before and what comes instead hold the same bytes until the engine core has seen the step's output, so
it does not matter which of the two a step that is being prepared still reads.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class TableChange(NamedTuple):
    """`block_ids` from `position` on, in the block table of a request."""

    request_id: str
    position: int
    block_ids: list[int]


def runs(request_id: str, changed: dict[int, int]) -> list[TableChange]:
    """Changes of one request, block ids by position, as few as they can be."""
    out: list[TableChange] = []
    for position in sorted(changed):
        if out and position == out[-1].position + len(out[-1].block_ids):
            out[-1].block_ids.append(changed[position])
        else:
            out.append(TableChange(request_id, position, [changed[position]]))
    return out


def make_room(runner: Any, num_places: int) -> None:
    """Once a runner has its tables. vLLM's second one stages as many writes for a step as it serves requests, which is
    what vLLM itself needs; entries that change come on top: runs of them, at most one for each far place.
    """
    if not _is_v2(runner):
        return
    table = runner.block_tables.block_tables[0]
    for name in ("write_indices", "write_starts", "write_cu_lens"):
        pool = getattr(table, name)
        rows = table.num_rows + num_places
        setattr(table, name, type(pool)(rows, dtype=pool.dtype, max_concurrency=pool.max_concurrency))


def change_tables(
    runner: Any, output: Any, changes: Sequence[TableChange], block_of: Callable[[int], int]
) -> None:
    """Before the step. Both of vLLM's runners; requests that are not in the runner, or leave it, are passed over.

    Args: block_of: where a block id lies in this process's cache.
    """
    gone = set(output.finished_req_ids) | set(output.preempted_req_ids or ())
    is_v2 = _is_v2(runner)
    for change in changes:
        if change.request_id in gone:
            continue
        block_ids = [block_of(block_id) for block_id in change.block_ids]
        if is_v2:
            _change_v2(runner, change, block_ids)
        else:
            _change_v1(runner, change, block_ids)


def place_tables(output: Any, block_of: Callable[[int], int]) -> None:
    """Whole tables that a step brings: of requests that go on where they were, some of whose blocks may be far.

    Args: as of change_tables().
    """
    for new in output.scheduled_new_reqs:
        new.block_ids = _placed(new.block_ids, block_of)
    cached = output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        if request_id in cached.resumed_req_ids and cached.new_block_ids[index] is not None:
            cached.new_block_ids[index] = _placed(cached.new_block_ids[index], block_of)


def _is_v2(runner: Any) -> bool:
    return hasattr(runner, "req_states")


def _placed(groups: Sequence[Sequence[int]], block_of: Callable[[int], int]) -> tuple[list[int], ...]:
    return tuple([block_of(block_id) for block_id in group] for group in groups)


def _change_v2(runner: Any, change: TableChange, block_ids: list[int]) -> None:
    index = runner.req_states.req_id_to_index.get(change.request_id)
    if index is not None:
        each = runner.block_tables.blocks_per_kv_block[0]
        runner.block_tables.block_tables[0].stage_write(
            index, change.position * each, _kernel_blocks(block_ids, each)
        )


def _change_v1(runner: Any, change: TableChange, block_ids: list[int]) -> None:
    state = runner.requests.get(change.request_id)
    if state is None:
        return
    end = change.position + len(block_ids)
    state.block_ids[0][change.position : end] = block_ids
    row = runner.input_batch.req_id_to_index.get(change.request_id)
    if row is not None:
        table = runner.input_batch.block_table[0]
        each = table.blocks_per_kv_block
        columns = slice(change.position * each, end * each)
        table.block_table.np[row, columns] = _kernel_blocks(block_ids, each)


def _kernel_blocks(block_ids: list[int], each: int) -> list[int]:
    return [block_id * each + part for block_id in block_ids for part in range(each)]
