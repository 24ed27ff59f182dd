"""What a placement would choose if it looked at every instance: the standing orders are held against it."""

from unittest.mock import patch

from services.scheduler.core.placement import Placer
from services.scheduler.core.shortlist import MAX_IDLE, MAX_LIKELY, Shortlist


class FullShortlist(Shortlist):
    """Every instance scored and sorted."""

    def _all(self, roles, families):
        return [
            row for row in self.field.rows(*roles) if families is None or row.known.family_key in families
        ]

    def _turn(self, row):
        return row.known.chosen_at, row.known.instance

    def _local(self, row):
        return self._predictor.holders.local(row.known)

    def _view(self, row):
        return row.known.load.view(now_ms=self.field.now_ms)

    def _score(self, row):
        rows = self._all((row.known.role,), None)
        idlest = min(rows, key=lambda r: (self._view(r).queue_ms, *self._turn(r)))
        token_ms = self._predictor.exec_ms(idlest.known, 0) / max(1, self._num_tokens)
        left = self._num_tokens - self._local(row)
        return (self._view(row).queue_ms + left * token_ms, *self._turn(row))

    def likely(self, roles, families=None):
        rows = sorted(self._all(roles, families), key=self._score)
        if len(rows) > MAX_LIKELY + MAX_IDLE:
            picked = rows[:MAX_LIKELY]
            longest = max(rows, key=self._local)
            if self._local(longest) > max(map(self._local, picked)):
                picked[-1] = longest
            rest = [row for row in rows if row not in picked]
            rest.sort(key=lambda r: (self._view(r).queue_ms, self._view(r).num_decodes, *self._turn(r)))
            rows = picked + rest[:MAX_IDLE]
        return [self.field.candidate(row) for row in rows]

    def likely_decodes(self, firsts):
        rows = sorted(self._all(("decode",), None), key=self._load)
        if len(rows) <= MAX_LIKELY + MAX_IDLE:
            return [self.field.candidate(row) for row in rows]
        holding = [row for row in rows if self.field.reach.get(row.known.instance)]
        holding.sort(key=lambda r: (-self._local(r), self._view(r).queue_ms, *self._turn(r)))
        found = rows[:MAX_LIKELY] + holding[:MAX_IDLE]
        for first in firsts:
            here = [r for r in rows if r.known.pool_key == first.candidate.known.pool_key]
            if first.candidate.known.pool_key is not None:
                space = first.candidate.known.space_key
                same = [r for r in here if space is not None and r.known.space_key == space]
                found += same[:1] + [r for r in here if r not in same][:1]
        return [self.field.candidate(row) for row in dict.fromkeys(found)]

    def _load(self, row):
        view = self._view(row)
        return (view.requests_share + view.kv_used_share, *self._turn(row))


def _all_of_role(self, request, field, role, stage, families=None):
    del self, request, stage
    rows = [r for r in field.rows(role) if families is None or r.known.family_key in families]
    return [field.candidate(row) for row in sorted(rows, key=lambda row: row.known.instance)]


def place_by_full_scan(placer, place, *, now_ms):
    """The answer of a placer that has no standing orders yet and looks at everybody. Use a copy: it takes note."""
    placer._standing.clear()
    with (
        patch("services.scheduler.core.cost.Shortlist", FullShortlist),
        patch.object(Placer, "_considered", _all_of_role),
    ):
        return placer.place(place, now_ms=now_ms)
