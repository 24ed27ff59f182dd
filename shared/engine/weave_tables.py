"""Block tables as a rank hears of them: whether a step reads, as a prefix, blocks that it writes itself.

A prompt's full blocks are prefix hits as soon as they are scheduled, so who begins in the same step may find blocks
that another request computes in it: a prompt asked twice, or n choices. That is right where each layer writes all keys
and values before its attention. A step in two parts does not, and whoever computes little comes first in vLLM's second
runner: it would read what the second part writes after it.
"""

from typing import Any


class StepTables:
    """Of one rank, for both of vLLM's runners. Args: block_tokens: of the one group of blocks."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        # Entries that change later (far_tables.py) are not heard of: nobody writes those blocks
        self._tables: dict[str, list[int]] = {}

    def reads_own_blocks(self, output: Any) -> bool:
        """To be asked of every step (vLLM's SchedulerOutput) in turn, before anything changes it.

        Only who begins, or goes on after a pause, is looked at: who runs has in its table what earlier steps wrote.
        Cost: O(requests of the step); where one has a prefix, of its blocks and those that the step writes, too.
        """
        tables, cached, size = self._tables, output.scheduled_cached_reqs, self._block_tokens
        for request_id in output.finished_req_ids:
            tables.pop(request_id, None)
        starts: dict[str, int] = {}
        begun: list[str] = []
        for new in output.scheduled_new_reqs:
            tables[new.req_id] = list(new.block_ids[0])
            starts[new.req_id] = new.num_computed_tokens
            begun.append(new.req_id)
        resumed = cached.resumed_req_ids
        for request_id, blocks, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            starts[request_id] = start
            if request_id in resumed:
                tables[request_id] = []
                begun.append(request_id)
            if blocks:
                tables[request_id] += blocks[0]
        found = {block for one in begun for block in tables[one][: starts[one] // size]}
        if not found:
            return False
        for request_id, count in output.num_scheduled_tokens.items():
            start = starts[request_id]
            if not found.isdisjoint(tables[request_id][start // size : -(-(start + count) // size)]):
                return True
        return False
