"""The `cost` policy: of all ways to run a request, the one that is predicted to take least. No I/O.

    ways: every prefill instance with its best decode instance; every instance alone (conditional disaggregation)
    cost: queue + fetch + compute + hand-off + decode's steps + what those that decode there lose   (predict.py)

MemServe's eq 1 and eq 2 with three brakes. Panic: an instance with too long a queue is avoided whatever it holds.
Roles: a prefill or decode instance runs a whole request only if that is cheaper by a margin. Hysteresis: the holder
of the longest prefix is not left for a small gain, which would scatter a session's prefix.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from operator import itemgetter

from msgspec import Struct

from services.scheduler.core.instances import Instance, PoolKey, SpaceKey
from services.scheduler.core.policies import Candidate
from services.scheduler.core.predict import CostSettings, DecodeStage, FirstStage, Predictor
from services.scheduler.core.request import Stage
from shared.wire.placement import Alternative, Predicted
from shared.wire.reports import Role

MAX_LIKELY = 6  # instances that a rough score finds, and
MAX_IDLE = 2  # those with the shortest queues: they may fetch; the others are not predicted
MAX_PAIRED = 6  # first stages that are paired,
MAX_DECODES = 4  # each with so many decode instances, and the nearest ones

Ranked = tuple[float, int, str, int, Candidate]  # rough score, last turn, name, tokens of its own space
_local = itemgetter(3)


class Way(Struct, frozen=True, gc=False):
    """One way to run the request, predicted."""

    first: FirstStage
    decode: DecodeStage
    is_pair: bool
    handoff_ms: float
    again_ms: float  # decode draws the first token again; 0: it goes on behind it (wire/handoff.py)
    total_ms: float  # what is compared
    keeps_roles: bool  # no prefill or decode instance runs a whole request

    @property
    def ttft_ms(self) -> float:
        """Until the client's first token."""
        after_ms = self.handoff_ms + self.decode.wait_ms + self.again_ms
        return self.first.latency_ms + (after_ms if self.again_ms else 0.0)

    @property
    def stage(self) -> Stage:
        """Of its first instance."""
        return "prefill" if self.is_pair else "colocated"

    def predicted(self) -> Predicted:
        """For the wire."""
        return Predicted(
            queue_ms=_round(self.first.queue_ms),
            fetch_ms=_round(self.first.fetch_ms),
            compute_ms=_round(self.first.compute_ms),
            transfer_ms=_round(self.handoff_ms),
            step_ms=_round(self.decode.step_ms),
            slowdown_ms=_round(self.first.slowdown_ms + self.decode.slowdown_ms),
            total_ms=_round(self.total_ms),
        )


class Decision(Struct, frozen=True):
    """The way taken, why, and those that were not."""

    way: Way
    reason: str
    alternatives: list[Alternative]


def decide(
    predictor: Predictor,
    candidates: Sequence[Candidate],
    *,
    must_colocate: bool,
) -> Decision:
    """The best way over these candidates, of which there is at least one, all with a model.

    Cost: a rough score of each, then at most 4 * (MAX_LIKELY + MAX_IDLE) predictions, whatever their number.
    """
    settings = predictor.settings
    most_ms = settings.panic_queue_ms
    in_panic = [c for c in candidates if c.view.queue_ms > most_ms]
    calm = [c for c in candidates if c.view.queue_ms <= most_ms] if in_panic else candidates
    ways = _ways(predictor, calm, must_colocate=must_colocate) if calm else []
    lacks_pair = (
        settings.disaggregation == "always" and not must_colocate and not any(w.is_pair for w in ways)
    )
    if not ways or (in_panic and lacks_pair):
        in_panic = []
        ways = _ways(predictor, candidates, must_colocate=must_colocate)
    ways.sort(key=_order)
    chosen, why = _with_roles(ways, settings)
    chosen, why = _with_hysteresis(ways, chosen, why, settings)
    reason = f"{_describe(chosen)}{why}"
    most = settings.max_alternatives if predictor.request.explain else 0
    return Decision(chosen, reason, _alternatives(ways, chosen, in_panic, most) if most else [])


def predict_way(predictor: Predictor, first: Candidate, decode: Candidate) -> Way:
    """What another policy's choice is expected to take."""
    stage, then = predictor.first(first), predictor.decode(decode)
    if first is not decode:
        return _pair(predictor, stage, then)
    total_ms = _total_ms(stage, 0.0, 0.0, then)
    return Way(stage, then, False, 0.0, 0.0, total_ms, first.known.role == "colocated")


def _ways(predictor: Predictor, candidates: Sequence[Candidate], *, must_colocate: bool) -> list[Way]:
    settings = predictor.settings
    ranked = _ranked(predictor, candidates)
    decodes, prefills, colocated = ranked["decode"], ranked["prefill"], ranked["colocated"]
    pairs: list[Way] = []
    if prefills and decodes and not must_colocate and settings.disaggregation != "never":
        families = {row[-1].known.family_key for row in decodes}
        paired = [row for row in prefills if row[-1].known.family_key in families]
        if paired:
            firsts = _first_stages(predictor, paired)[:MAX_PAIRED]
            pairs = _pairs(predictor, firsts, [row[-1] for row in decodes])
    if settings.disaggregation == "always" and pairs and not must_colocate:
        return pairs
    others = sorted(prefills + decodes)
    return pairs + [predict_way(predictor, c, c) for c in (*_likely(colocated), *_likely(others))]


def _ranked(predictor: Predictor, candidates: Sequence[Candidate]) -> dict[Role, list[Ranked]]:
    """By role, by queue and what their own prefix leaves to compute. Cost: grows with the cluster, so short."""
    x, held = predictor.request.num_prompt_tokens, predictor.holders.held(candidates)
    by_role: dict[Role, list[Candidate]] = {"prefill": [], "decode": [], "colocated": []}
    for candidate in candidates:
        by_role[candidate.known.role].append(candidate)
    out: dict[Role, list[Ranked]] = {}
    for role, found in by_role.items():
        token_ms = predictor.exec_ms(found[0].known, 0) / max(1, x) if found else 0.0
        rows = out[role] = []
        for candidate in found:
            tokens = held.get(name := candidate.name, 0)
            score_ms = candidate.view.queue_ms + (x - tokens) * token_ms
            rows.append((score_ms, candidate.known.chosen_at, name, tokens, candidate))
        rows.sort()
    return out


def _likely(rows: Sequence[Ranked]) -> list[Candidate]:
    """Those that can win: the first ones, and the idlest of the others."""
    if len(rows) <= MAX_LIKELY + MAX_IDLE:
        return [row[-1] for row in rows]
    picked, rest = list(rows[:MAX_LIKELY]), rows[MAX_LIKELY:]
    longest = max(rows, key=_local)  # hysteresis may want it
    if longest[3] and longest[3] > max(map(_local, picked)):
        picked[-1] = longest
        rest = [row for row in rows[MAX_LIKELY - 1 :] if row is not longest]
    idle = [(c.view.queue_ms, c.view.num_decodes, turn, name, c) for _, turn, name, _, c in rest]
    idle.sort()
    return [row[-1] for row in (*picked, *idle[:MAX_IDLE])]


def _first_stages(predictor: Predictor, rows: Sequence[Ranked]) -> list[FirstStage]:
    found = [predictor.first(c) for c in _likely(rows)]
    found.sort(key=lambda f: (f.latency_ms + f.slowdown_ms, *_turn(f.candidate)))
    longest = max(found, key=lambda f: f.local_tokens)
    if longest.local_tokens and all(f is not longest for f in found[:MAX_PAIRED]):  # hysteresis may want it
        return [longest, *(f for f in found if f is not longest)]
    return found


def _pairs(predictor: Predictor, firsts: Sequence[FirstStage], decodes: Sequence[Candidate]) -> list[Way]:
    """Each first stage with its best decode instance."""
    stages = [predictor.decode(c) for c in _likely_decodes(predictor, firsts, decodes)]
    stages.sort(key=lambda d: (d.decode_ms + d.slowdown_ms, -d.local_tokens, *_turn(d.candidate)))
    by_family: dict[str, list[DecodeStage]] = {}
    for stage in stages:
        by_family.setdefault(stage.candidate.known.family_key, []).append(stage)
    out = []
    for first in firsts:
        fitting = by_family.get(first.candidate.known.family_key, [])
        best: Way | None = None
        for decode in _tried(first.candidate.known, fitting):
            way = _pair(predictor, first, decode)
            if best is None or way.total_ms < best.total_ms or (
                way.total_ms == best.total_ms and _turn(decode.candidate) < _turn(best.decode.candidate)
            ):  # fmt: skip
                best = way
        if best is not None:
            out.append(best)
    return out


def _tried(prefill: Instance, stages: Sequence[DecodeStage]) -> list[DecodeStage]:
    """The first ones, the first in the same memory, and the first in the same mempool's other memory."""
    out = list(stages[:MAX_DECODES])
    pool, space = prefill.pool_key, prefill.space_key
    if pool is None:
        return out
    here = [d for d in stages if d.candidate.known.pool_key == pool]
    near = _nearest(space, [d.candidate for d in here])
    return out + [d for d in here if any(d.candidate is c for c in near) and all(d is not o for o in out)]


def _nearest(space: SpaceKey | None, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Of those of the same mempool, the first that works in this memory of it, and the first that does not."""
    same = (c for c in candidates if space is not None and c.known.space_key == space)
    other = (c for c in candidates if space is None or c.known.space_key != space)
    return [*islice(same, 1), *islice(other, 1)]


def _likely_decodes(
    predictor: Predictor, firsts: Sequence[FirstStage], decodes: Sequence[Candidate]
) -> list[Candidate]:
    """The least busy, those that hold most, and of each prefill's own host the least busy."""
    if len(decodes) <= MAX_LIKELY + MAX_IDLE:
        return list(decodes)
    free = sorted(
        [
            (c.view.requests_share + c.view.kv_used_share, c.known.chosen_at, c.known.instance, c)
            for c in decodes
        ]
    )
    picked = {row[2]: row[3] for row in free[:MAX_LIKELY]}
    local = predictor.holders.local
    holding = sorted([c for c in decodes if c.hit_tokens], key=lambda c: -local(c.known))
    picked.update((c.name, c) for c in holding[:MAX_IDLE])
    pools: dict[PoolKey | None, list[Candidate]] = {f.candidate.known.pool_key: [] for f in firsts}
    pools.pop(None, None)
    if pools:
        for _, _, _, candidate in free:
            if (here := pools.get(candidate.known.pool_key)) is not None:
                here.append(candidate)
    for pool, space in {(f.candidate.known.pool_key, f.candidate.known.space_key) for f in firsts}:
        picked.update((c.name, c) for c in _nearest(space, pools.get(pool, ())))
    return list(picked.values())


def _pair(predictor: Predictor, first: FirstStage, decode: DecodeStage) -> Way:
    handoff_ms = predictor.handoff_ms(first.candidate.known, decode)
    again_ms = decode.step_ms if predictor.num_steps and not predictor.request.continues else 0.0
    return Way(
        first, decode, True, handoff_ms, again_ms, _total_ms(first, handoff_ms, again_ms, decode), True
    )


def _total_ms(first: FirstStage, handoff_ms: float, again_ms: float, decode: DecodeStage) -> float:
    return (
        first.latency_ms + first.slowdown_ms + handoff_ms + again_ms + decode.decode_ms + decode.slowdown_ms
    )


def _with_roles(ways: Sequence[Way], settings: CostSettings) -> tuple[Way, str]:
    """The cheapest; against roles only by a margin."""
    best = ways[0]
    proper = next((w for w in ways if w.keeps_roles), None)
    if best.keeps_roles or proper is None:
        return best, ""
    gain_ms = proper.total_ms - best.total_ms
    if gain_ms < _margin_ms(proper, settings.role_margin_ms, settings.role_margin_share):
        return proper, f"; one instance would gain only {gain_ms:.1f} ms"
    return best, f"; one instance saves {gain_ms:.1f} ms"


def _with_hysteresis(ways: Sequence[Way], chosen: Way, why: str, settings: CostSettings) -> tuple[Way, str]:
    like = [w for w in ways if w.keeps_roles == chosen.keeps_roles and w.is_pair == chosen.is_pair]
    holder = max(like, key=lambda w: w.first.local_tokens)
    gain_ms = holder.total_ms - chosen.total_ms
    if holder.first.local_tokens <= chosen.first.local_tokens or gain_ms >= _margin_ms(
        holder, settings.hysteresis_ms, settings.hysteresis_share
    ):
        return chosen, why
    kept = f"; it holds {holder.first.local_tokens} tokens, leaving it would gain only {gain_ms:.1f} ms"
    return holder, why + kept


def _margin_ms(way: Way, least_ms: float, share: float) -> float:
    """What a gain must reach, of the time until the way's first token."""
    return max(least_ms, share * way.ttft_ms)


def _turn(candidate: Candidate) -> tuple[int, str]:
    """Equals take turns."""
    return candidate.known.chosen_at, candidate.name


def _order(way: Way) -> tuple[float, bool, int, str]:
    return way.total_ms, not way.keeps_roles, *_turn(way.first.candidate)


def _describe(way: Way) -> str:
    first, decode = way.first, way.decode
    parts = [f"queue {first.queue_ms:.1f}"] if first.queue_ms else []
    if first.fetch_ms and first.kv is not None:
        parts.append(f"fetch {first.fetch_ms:.1f} ({first.kv.tokens} tokens of {first.kv.source})")
    parts.append(f"compute {first.compute_ms:.1f}")
    if way.is_pair:
        parts.append(f"hand-off {way.handoff_ms + way.again_ms:.1f}")
    where = (
        f"{first.candidate.name} and {decode.candidate.name}"
        if way.is_pair
        else f"{first.candidate.name} alone"
    )
    slower = first.slowdown_ms + decode.slowdown_ms
    others = f", others lose {slower:.1f}" if slower >= 0.1 else ""
    return f"{where}: {' + '.join(parts)} ms, then {decode.step_ms:.1f} a token{others}"


def _alternatives(
    ways: Iterable[Way], chosen: Way, in_panic: Sequence[Candidate], most: int
) -> list[Alternative]:
    """Of every instance, its best way."""
    out: list[Alternative] = []
    seen = {(chosen.first.candidate.name, chosen.stage)}
    for way in ways:
        key = (way.first.candidate.name, way.stage)
        if len(out) >= most:
            return out
        if key in seen:
            continue
        seen.add(key)
        out.append(
            Alternative(key[0], key[1], way.first.cached_tokens, _round(way.total_ms), _why_not(way, chosen))
        )
    for candidate in in_panic[: most - len(out)]:
        why = f"its queue of {candidate.view.queue_ms:.0f} ms is too long whatever it holds"
        out.append(Alternative(candidate.name, candidate.known.role, candidate.hit_tokens, None, why))
    return out


def _why_not(way: Way, chosen: Way) -> str:
    """The part in which it loses most."""
    if way.total_ms < chosen.total_ms:
        return "cheaper by less than the margin"
    parts = {
        "queue": way.first.queue_ms - chosen.first.queue_ms,
        "compute": way.first.compute_ms + way.first.fetch_ms - chosen.first.compute_ms - chosen.first.fetch_ms,
        "hand-off": way.handoff_ms + way.again_ms - chosen.handoff_ms - chosen.again_ms,
        "decode": way.decode.decode_ms - chosen.decode.decode_ms,
        "slows others": way.first.slowdown_ms + way.decode.slowdown_ms
        - chosen.first.slowdown_ms - chosen.decode.slowdown_ms,
    }  # fmt: skip
    name, more_ms = max(parts.items(), key=lambda item: item[1])
    return f"{name} {more_ms:.1f} ms more" if more_ms >= 0.05 else "as good; another's turn"


def _round(value: float) -> float:
    return round(value, 3)
