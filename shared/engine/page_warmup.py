"""vLLM's V2 runner warms up with requests whose block ids it makes up: they must not be pages of the pool."""

from typing import Any


def use_null_block(output: Any) -> None:
    """Let every request of a SchedulerOutput write the null block: whatever it computes is thrown away.

    The ids that vLLM makes up count from 1: the pool's first pages, which may hold other engines' sealed blocks.
    """
    for new in output.scheduled_new_reqs:
        new.block_ids = _nulls(new.block_ids)
    cached = output.scheduled_cached_reqs
    cached.new_block_ids = [None if ids is None else _nulls(ids) for ids in cached.new_block_ids]


def _nulls(groups: tuple[list[int], ...]) -> tuple[list[int], ...]:
    return tuple([0] * len(ids) for ids in groups)
