"""Fair schedulers in tests: what the slices were told of requests in passing is what a look at all of them finds."""

from typing import Any


class ToldSlices:
    """Before one of FairSchedulerMixin's classes."""

    def _tell_slices(self: Any, may_come: bool) -> None:
        super()._tell_slices(may_come)  # pyright: ignore[reportAttributeAccessIssue]
        accounts = self.slices.accounts
        assert accounts.requests.keys() == self.requests.keys()
        for request_id, request in self.requests.items():
            told, away = accounts.requests[request_id], self.swapper.absences.num_away(request_id)
            have = len(self._tables.get(request_id, ())) - away
            ahead = self.slices.rules.slice_steps + self.kv_cache_manager.ahead_tokens
            tokens = min(request.num_tokens + ahead, self.max_model_len)
            need = max(-(-tokens // self.block_size), have + away)
            blocked = self._is_blocked_waiting_status(request.status) or request.is_finished()
            ready = not (blocked or self._in_flight(request)) and (may_come or have + away > 0)
            found = (need, have, self.swapper.absences.num_elsewhere(request_id), ready)
            assert found == (told.pages, told.resident, told.away, told.ready), (request_id, found, told)
        assert accounts.pages == sum(a.pages for a in accounts.requests.values())
        assert accounts.resident == sum(a.resident for a in accounts.requests.values())
