"""The `cost` policy: of all ways to run a request, the one that is predicted to take least. No I/O.

    ways: every prefill instance with its best decode instance; every instance alone (conditional disaggregation)
    cost: queue + fetch + compute + hand-off + decode's steps + what those that decode there lose   (predict.py)

MemServe's eq 1 and eq 2 with three brakes. Panic: an instance with too long a queue is avoided whatever it holds.
Roles: a prefill or decode instance runs a whole request only if that is cheaper by a margin. Hysteresis: the holder
of the longest prefix is not left for a small gain, which would scatter a session's prefix.
"""

from collections.abc import Iterable, Sequence
from heapq import nlargest, nsmallest

from msgspec import Struct

from services.scheduler.core.policies import Candidate
from services.scheduler.core.predict import CostSettings, DecodeStage, FirstStage, Predictor, path_between
from services.scheduler.core.request import Stage
from shared.wire.placement import Alternative, Predicted

MAX_LIKELY = 6  # instances that a rough score finds, and
MAX_IDLE = 2  # those with the shortest queues: they may fetch; the others are not predicted
MAX_PAIRED = 6  # first stages that are paired,
MAX_DECODES = 4  # each with so many decode instances, and the nearest ones


class Way(Struct, frozen=True):
    """One way to run the request, predicted."""

    first: FirstStage
    decode: DecodeStage
    is_pair: bool
    handoff_ms: float
    again_ms: float  # decode draws the first token again (wire/handoff.py, "resample")

    @property
    def total_ms(self) -> float:
        """What is compared."""
        return (
            self.first.latency_ms
            + self.first.slowdown_ms
            + self.handoff_ms
            + self.again_ms
            + self.decode.decode_ms
            + self.decode.slowdown_ms
        )

    @property
    def ttft_ms(self) -> float:
        """Until the client's first token."""
        after_ms = self.handoff_ms + self.decode.wait_ms + self.again_ms
        return self.first.latency_ms + (after_ms if self.again_ms else 0.0)

    @property
    def stage(self) -> Stage:
        """Of its first instance."""
        return "prefill" if self.is_pair else "colocated"

    @property
    def keeps_roles(self) -> bool:
        """Whether no prefill or decode instance runs a whole request."""
        return self.is_pair or self.first.candidate.known.role == "colocated"

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
    calm = [c for c in candidates if c.view.queue_ms <= settings.panic_queue_ms]
    ways = _ways(predictor, calm, must_colocate=must_colocate) if calm else []
    in_panic = [c for c in candidates if c.view.queue_ms > settings.panic_queue_ms]
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
    return Decision(chosen, reason, _alternatives(ways, chosen, in_panic, settings.max_alternatives))


def predict_way(predictor: Predictor, first: Candidate, decode: Candidate) -> Way:
    """What another policy's choice is expected to take."""
    return _way(predictor, predictor.first(first), predictor.decode(decode), is_pair=first is not decode)


def _ways(predictor: Predictor, candidates: Sequence[Candidate], *, must_colocate: bool) -> list[Way]:
    settings = predictor.settings
    decodes = [c for c in candidates if c.known.role == "decode"]
    families = {c.known.family_key for c in decodes}
    prefills = [c for c in candidates if c.known.role == "prefill" and c.known.family_key in families]
    pairs: list[Way] = []
    if prefills and not must_colocate and settings.disaggregation != "never":
        pairs = _pairs(predictor, _first_stages(predictor, prefills)[:MAX_PAIRED], decodes)
    alone = _may_run_alone(candidates, bool(pairs), settings, must_colocate=must_colocate)
    meant_for_it = _likely(predictor, [c for c in alone if c.known.role == "colocated"])
    others = _likely(predictor, [c for c in alone if c.known.role != "colocated"])
    return pairs + [predict_way(predictor, c, c) for c in (*meant_for_it, *others)]


def _may_run_alone(
    candidates: Sequence[Candidate], has_pairs: bool, settings: CostSettings, *, must_colocate: bool
) -> Sequence[Candidate]:
    if settings.disaggregation == "always" and has_pairs and not must_colocate:
        return []
    return candidates


def _likely(predictor: Predictor, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that can win: by queue and what their own prefix leaves to compute, and the idlest."""
    if len(candidates) <= MAX_LIKELY + MAX_IDLE:
        return list(candidates)
    x = predictor.request.num_prompt_tokens
    token_ms = predictor.exec_ms(candidates[0].known, 0) / max(1, x)
    local = {c.name: predictor.holders.local(c.known) for c in candidates}

    def score(candidate: Candidate) -> tuple[float, int, str]:
        left = x - local[candidate.name]
        return candidate.view.queue_ms + left * token_ms, candidate.known.chosen_at, candidate.name

    def idle(candidate: Candidate) -> tuple[float, int, int, str]:
        view = candidate.view
        return view.queue_ms, view.num_decodes, candidate.known.chosen_at, candidate.name

    found = sorted(candidates, key=score)
    longest = max(candidates, key=lambda c: local[c.name])  # hysteresis may want it
    picked = found[:MAX_LIKELY]
    if local[longest.name] and all(c is not longest for c in picked):
        picked[-1] = longest
    names = {c.name for c in picked}
    return picked + nsmallest(MAX_IDLE, (c for c in found if c.name not in names), key=idle)


def _first_stages(predictor: Predictor, candidates: Sequence[Candidate]) -> list[FirstStage]:
    found = [predictor.first(c) for c in _likely(predictor, candidates)]
    found.sort(key=lambda f: (f.latency_ms + f.slowdown_ms, *_turn(f.candidate)))
    longest = max(found, key=lambda f: f.local_tokens)
    if longest.local_tokens and all(f is not longest for f in found[:MAX_PAIRED]):  # hysteresis may want it
        return [longest, *(f for f in found if f is not longest)]
    return found


def _pairs(predictor: Predictor, firsts: Sequence[FirstStage], decodes: Sequence[Candidate]) -> list[Way]:
    """Each first stage with its best decode instance."""
    stages = [predictor.decode(c) for c in _likely_decodes(predictor, firsts, decodes)]
    stages.sort(key=lambda d: (d.decode_ms + d.slowdown_ms, -d.local_tokens, *_turn(d.candidate)))
    out = []
    for first in firsts:
        known = first.candidate.known
        fitting = [d for d in stages if d.candidate.known.family_key == known.family_key]
        near = [next((d for d in fitting if path_between(d.candidate.known, known) == path), None)
                for path in ("alias", "peer")]  # fmt: skip
        tried = [*fitting[:MAX_DECODES], *(d for d in near if d is not None)]
        ways = [_way(predictor, first, d, is_pair=True) for d in tried]
        if ways:
            out.append(min(ways, key=lambda w: (w.total_ms, *_turn(w.decode.candidate))))
    return out


def _likely_decodes(
    predictor: Predictor, firsts: Sequence[FirstStage], decodes: Sequence[Candidate]
) -> list[Candidate]:
    """The least busy, those that hold most, and of each prefill's own host the least busy."""
    if len(decodes) <= MAX_LIKELY + MAX_IDLE:
        return list(decodes)

    def free(candidate: Candidate) -> tuple[float, int, str]:
        return (candidate.view.requests_share + candidate.view.kv_used_share, *_turn(candidate))

    local = predictor.holders.local
    picked = {c.name: c for c in nsmallest(MAX_LIKELY, decodes, key=free)}
    holding = nlargest(MAX_IDLE, (c for c in decodes if c.hit_tokens), key=lambda c: local(c.known))
    picked.update((c.name, c) for c in holding)
    for path in ("alias", "peer"):
        for pool in {f.candidate.known.pool: f.candidate.known for f in firsts}.values():
            near = [c for c in decodes if path_between(c.known, pool) == path]
            if near:
                best = min(near, key=free)
                picked[best.name] = best
    return list(picked.values())


def _way(predictor: Predictor, first: FirstStage, decode: DecodeStage, *, is_pair: bool) -> Way:
    if not is_pair or not predictor.num_steps:
        return Way(first, decode, is_pair, 0.0, 0.0)
    return Way(first, decode, is_pair, predictor.handoff_ms(first.candidate.known, decode), decode.step_ms)


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
