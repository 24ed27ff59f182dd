"""Which instances the `cost` policy predicts for a request: those that can win. No I/O.

Of a prompt that nobody holds, instances of a role differ by their queues, so the shortest queues come first; those
that hold some of the prompt are few and scored one by one. So a field's orders are walked a few steps, and the result
is that of scoring, and sorting, all instances.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from operator import itemgetter

from services.scheduler.core.instances import Instance, SpaceKey
from services.scheduler.core.policies import Candidate
from services.scheduler.core.predict import DecodeStage, FirstStage, Predictor
from services.scheduler.core.standing import Families, Field, Key, Row
from shared.ids import InstanceId
from shared.wire.reports import Role

MAX_LIKELY = 6  # instances that a rough score finds, and
MAX_IDLE = 2  # those with the shortest queues: they may fetch; the others are not predicted
MAX_DECODES = 4  # decode instances that a first stage is paired with, and the nearest ones

Scored = tuple[float, int, str, int, Row]  # rough score, last turn, name, tokens of its own space
_tokens_of = itemgetter(3)


class Shortlist:
    """Of one request. Cost: O((MAX_LIKELY + MAX_IDLE) * roles + holders of the prompt)."""

    def __init__(self, predictor: Predictor, field: Field) -> None:
        self.field = field
        self._predictor = predictor
        self._num_tokens = predictor.request.num_prompt_tokens
        self._held, self._holders = self._who_holds()
        self._all_scored: dict[Role, list[Scored]] = {}  # of all families

    def _who_holds(self) -> tuple[dict[InstanceId, int], dict[Role, list[Row]]]:
        """Tokens in their own space, and the rows, of those that hold any, or whose space is a holder's."""
        holders, field = self._predictor.holders, self.field
        rows = {row.known.instance: row for name in holders.tokens if (row := field.find(name)) is not None}
        for space in holders.spaces:
            rows.update((row.known.instance, row) for row in field.of_space(space))
        by_role: dict[Role, list[Row]] = {"prefill": [], "decode": [], "colocated": []}
        for row in rows.values():
            by_role[row.known.role].append(row)
        return {name: holders.local(row.known) for name, row in rows.items()}, by_role

    def likely(self, roles: Sequence[Role], families: Families | None = None) -> list[Candidate]:
        """Those that can win: the first ones by score, and the idlest of the others."""
        field = self.field
        if families is not None and all(len(families) == field.num_families(role) for role in roles):
            families = None  # all there are
        idle = field.idlest(roles, families, MAX_LIKELY + MAX_IDLE + 1)
        if len(idle) <= MAX_LIKELY + MAX_IDLE:
            return field.candidates([key[4] for key in idle])
        rows: list[Scored] = []
        num_holders = 0
        for role in roles:
            rows += self._scored(role, families)
            num_holders += len(self._holders[role])
        rows.sort()
        picked = rows[:MAX_LIKELY]
        if num_holders:
            longest = max(rows, key=_tokens_of)  # hysteresis may want it
            if longest[3] > max(map(_tokens_of, picked)):
                picked[-1] = longest
        found = [row[4] for row in picked]
        for key in idle:
            if key[4] not in found:
                found.append(key[4])
                if len(found) == MAX_LIKELY + MAX_IDLE:
                    break
        return field.candidates(found)

    def _scored(self, role: Role, families: Families | None) -> list[Scored]:
        """Holders, and the first MAX_LIKELY of the others."""
        if families is not None:
            return self._score(role, families)
        rows = self._all_scored.get(role)
        if rows is None:
            rows = self._all_scored[role] = self._score(role, None)
        return rows

    def _score(self, role: Role, families: Families | None) -> list[Scored]:
        x, held, field = self._num_tokens, self._held, self.field
        idlest = next(iter(field.by_queue(role)), None)
        if idlest is None:
            return []
        token_ms = self._predictor.exec_ms(idlest[3].known, 0) / max(1, x)
        token_ms += self._predictor.evict_ms_per_token
        whole_ms = x * token_ms
        walk = iter(field.by_queue(role, families))
        holders = self._holders[role]
        if not holders:
            return [(key[0] + whole_ms, key[1], key[2], 0, key[3]) for key in islice(walk, MAX_LIKELY)]
        rows: list[Scored] = []
        for row in holders:
            if families is None or row.known.family_key in families:
                name = row.known.instance
                score_ms = field.queue_ms(row) + (x - held[name]) * token_ms
                rows.append((score_ms, row.known.chosen_at, name, held[name], row))
        others = (key for key in walk if key[2] not in held)
        rows += [(key[0] + whole_ms, key[1], key[2], 0, key[3]) for key in islice(others, MAX_LIKELY)]
        return rows

    def likely_decodes(self, firsts: Iterable[FirstStage]) -> list[Candidate]:
        """The least busy, those that hold most, and of each prefill's own host the least busy."""
        field = self.field
        free = list(islice(field.by_load("decode"), MAX_LIKELY + MAX_IDLE + 1))
        if len(free) <= MAX_LIKELY + MAX_IDLE:
            return field.candidates([key[3] for key in free])
        found = [key[3] for key in free[:MAX_LIKELY]]
        holding = [row for row in self._holders["decode"] if field.reach.get(row.known.instance)]
        if holding:
            holding.sort(key=self._by_tokens)
            found += holding[:MAX_IDLE]
        for place in {(f.candidate.known.pool_key, f.candidate.known.space_key) for f in firsts}:
            found += _nearest(place[1], field.of_pool(place[0]))
        picked = {row.known.instance: row for row in found}
        return field.candidates(picked.values())

    def _by_tokens(self, row: Row) -> tuple[int, float, int, InstanceId]:
        known = row.known
        return -self._held[known.instance], self.field.queue_ms(row), known.chosen_at, known.instance


def _nearest(space: SpaceKey | None, rows: Iterable[Key]) -> list[Row]:
    """Of those of one mempool, the first that works in this memory of it, and the first that does not."""
    same = other = None
    for key in rows:
        row = key[-1]
        if space is not None and row.known.space_key == space:
            same = same or row
        else:
            other = other or row
        if other is not None and (same is not None or space is None):
            break
    return [row for row in (same, other) if row is not None]


def tried(prefill: Instance, stages: Sequence[DecodeStage]) -> list[DecodeStage]:
    """Of those that a prefill instance can hand over to, the first ones, and the first ones near to it.

    Near: in the same memory, and in the same mempool's other memory.
    """
    out = list(stages[:MAX_DECODES])
    pool, space = prefill.pool_key, prefill.space_key
    if pool is None:
        return out
    here = [stage for stage in stages if stage.candidate.known.pool_key == pool]
    same = [s for s in here if space is not None and s.candidate.known.space_key == space]
    other = [s for s in here if space is None or s.candidate.known.space_key != space]
    return out + [s for s in (*same[:1], *other[:1]) if all(s is not o for o in out)]
