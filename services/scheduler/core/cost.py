"""The `cost` policy: of all ways to run a request, the one that is predicted to take least. No I/O.

    ways: every prefill instance with its best decode instance; every instance alone (conditional disaggregation)
    cost: queue + fetch + compute + hand-off + decode's steps + what those that decode there lose   (predict.py)
        + what its new pages push out                                                            (pressure.py)

MemServe's eq 1 and eq 2 with three brakes. Panic: an instance with too long a queue is avoided whatever it holds.
Roles: a prefill or decode instance runs a whole request only if that is cheaper by a margin, by default any.
Hysteresis: the holder of the longest prefix is not left for a small gain, which would scatter a session's prefix.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter

from msgspec import Struct

from services.scheduler.core.instances import PoolKey, SpaceKey
from services.scheduler.core.policies import Candidate
from services.scheduler.core.predict import CostSettings, DecodeStage, FirstStage, Predictor
from services.scheduler.core.request import Stage
from services.scheduler.core.shortlist import Shortlist, tried
from services.scheduler.core.standing import Field
from shared.wire.placement import Alternative, Predicted

MAX_PAIRED = 6  # first stages that are paired, each with its best decode instance

# what ways are compared by: total, whether it breaks roles, when its first instance was chosen, that one's name; then
# whether it is a pair, its stages, hand-off, drawing the first token again
Ranked = tuple[float, bool, int, str, bool, FirstStage, DecodeStage, float, float]
_local_tokens = attrgetter("local_tokens")
Place = tuple[str, PoolKey | None, SpaceKey | None]  # where an instance's KV is


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
            evict_ms=_round(self.first.evict_ms),
            total_ms=_round(self.total_ms),
        )


class Decision(Struct, frozen=True):
    """The way taken, why, and those that were not."""

    way: Way
    reason: str
    alternatives: list[Alternative]


def decide(predictor: Predictor, field: Field, *, must_colocate: bool) -> Decision | None:
    """The best way over the field, in which all have a model. None: nobody is there.

    Cost: a shortlist, then at most 4 * (MAX_LIKELY + MAX_IDLE) predictions, however many there are.
    """
    settings = predictor.settings
    calm = field.calm(settings.panic_queue_ms)
    ways = _ways(predictor, calm, must_colocate=must_colocate)
    lacks_pair = settings.disaggregation == "always" and not must_colocate and not any(w[4] for w in ways)
    in_panic: list[Candidate] = []
    if calm is not field:
        if not ways or lacks_pair:
            ways = _ways(predictor, field, must_colocate=must_colocate)
        else:
            in_panic = field.beyond(settings.panic_queue_ms)
    if not ways:
        return None
    ways.sort()
    taken, why = _with_roles(ways, settings)
    taken, why = _with_hysteresis(ways, taken, why, settings)
    chosen = _way(taken)
    reason = f"{_describe(chosen)}{why}"
    most = settings.max_alternatives if predictor.request.explain else 0
    return Decision(chosen, reason, _alternatives(map(_way, ways), chosen, in_panic, most) if most else [])


def predict_way(predictor: Predictor, first: Candidate, decode: Candidate) -> Way:
    """What another policy's choice is expected to take."""
    stage, then = predictor.first(first), predictor.decode(decode)
    if first is not decode:
        return _way(_pair(stage, then, *_between(predictor, stage, then)))
    return _way(_alone(stage, then))


def _way(ranked: Ranked) -> Way:
    total_ms, breaks_roles, _, _, is_pair, first, decode, handoff_ms, again_ms = ranked
    return Way(first, decode, is_pair, handoff_ms, again_ms, total_ms, not breaks_roles)


def _pair(first: FirstStage, decode: DecodeStage, handoff_ms: float, again_ms: float) -> Ranked:
    before_ms = first.latency_ms + first.slowdown_ms + first.evict_ms
    total_ms = before_ms + handoff_ms + again_ms + decode.decode_ms + decode.slowdown_ms
    chosen_at, name = first.candidate.known.chosen_at, first.candidate.name
    return total_ms, False, chosen_at, name, True, first, decode, handoff_ms, again_ms


def _alone(first: FirstStage, decode: DecodeStage) -> Ranked:
    candidate = first.candidate
    known = candidate.known
    before_ms = first.latency_ms + first.slowdown_ms + first.evict_ms
    total_ms = before_ms + decode.decode_ms + decode.slowdown_ms
    breaks_roles = known.role != "colocated"
    return total_ms, breaks_roles, known.chosen_at, candidate.name, False, first, decode, 0.0, 0.0


def _ways(predictor: Predictor, field: Field, *, must_colocate: bool) -> list[Ranked]:
    settings = predictor.settings
    shortlist = Shortlist(predictor, field)
    pairs: list[Ranked] = []
    if not must_colocate and settings.disaggregation != "never":
        families = field.pairs()
        if families:
            firsts = _first_stages(predictor.firsts(shortlist.likely(("prefill",), families)))
            pairs = _pairs(predictor, shortlist, firsts)
    if settings.disaggregation == "always" and pairs and not must_colocate:
        return pairs
    alone = shortlist.likely(("colocated",)) + shortlist.likely(("prefill", "decode"))
    return pairs + list(map(_alone, predictor.firsts(alone), predictor.decodes(alone)))


def _first_stages(found: Sequence[FirstStage]) -> list[FirstStage]:
    """The first MAX_PAIRED, and among them the one that holds most."""
    ranked = [
        (f.latency_ms + f.slowdown_ms + f.evict_ms, f.candidate.known.chosen_at, f.candidate.name, f)
        for f in found
    ]
    ranked.sort()
    out = [row[3] for row in ranked]
    if len(out) > MAX_PAIRED:
        longest = max(out, key=_local_tokens)
        if longest.local_tokens > max(map(_local_tokens, out[:MAX_PAIRED])):  # hysteresis may want it
            out.insert(0, longest)
    return out[:MAX_PAIRED]


def _pairs(predictor: Predictor, shortlist: Shortlist, firsts: Sequence[FirstStage]) -> list[Ranked]:
    """Each first stage with its best decode instance, which is the same for those whose KV is in one place."""
    stages = [
        (d.decode_ms + d.slowdown_ms, -d.local_tokens, d.candidate.known.chosen_at, d.candidate.name, d)
        for d in predictor.decodes(shortlist.likely_decodes(firsts))
    ]
    stages.sort()
    by_family: dict[str, list[DecodeStage]] = {}
    for *_, stage in stages:
        by_family.setdefault(stage.candidate.known.family_key, []).append(stage)
    best: dict[Place, DecodeStage | None] = {}
    out = []
    for first in firsts:
        known = first.candidate.known
        place = known.family_key, known.pool_key, known.space_key
        if place not in best:
            best[place] = _best_decode(predictor, first, by_family.get(known.family_key, ()))
        found = best[place]
        if found is not None:
            out.append(_pair(first, found, *_between(predictor, first, found)))
    return out


def _best_decode(
    predictor: Predictor, first: FirstStage, stages: Sequence[DecodeStage]
) -> DecodeStage | None:
    """For a first stage at this place; what was sent ahead of others there differs little. None: there is none."""
    least: tuple[float, int, str] | None = None
    best = None
    for decode in tried(first.candidate.known, stages):
        handoff_ms, again_ms = _between(predictor, first, decode)
        order = (
            handoff_ms + again_ms + decode.decode_ms + decode.slowdown_ms,
            decode.candidate.known.chosen_at,
            decode.candidate.name,
        )
        if least is None or order < least:
            least, best = order, decode
    return best


def _between(predictor: Predictor, first: FirstStage, decode: DecodeStage) -> tuple[float, float]:
    """(hand-off, drawing the first token again)."""
    again_ms = decode.step_ms if predictor.num_steps and not predictor.request.continues else 0.0
    return predictor.handoff_ms(first, decode), again_ms


def _with_roles(ways: Sequence[Ranked], settings: CostSettings) -> tuple[Ranked, str]:
    """The cheapest; against roles only by a margin."""
    best = ways[0]
    if not best[1]:
        return best, ""
    proper = next((way for way in ways if not way[1]), None)
    if proper is None:
        return best, ""
    gain_ms = proper[0] - best[0]
    if gain_ms < _margin_ms(proper, settings.role_margin_ms, settings.role_margin_share):
        return proper, f"; one instance would gain only {gain_ms:.1f} ms"
    return best, f"; one instance saves {gain_ms:.1f} ms"


def _with_hysteresis(
    ways: Sequence[Ranked], chosen: Ranked, why: str, settings: CostSettings
) -> tuple[Ranked, str]:
    breaks_roles, is_pair, held = chosen[1], chosen[4], chosen[5].local_tokens
    holder = chosen
    for way in ways:
        tokens = way[5].local_tokens
        if tokens > held and way[1] == breaks_roles and way[4] == is_pair:
            holder, held = way, tokens
    gain_ms = holder[0] - chosen[0]
    if holder is chosen or gain_ms >= _margin_ms(holder, settings.hysteresis_ms, settings.hysteresis_share):
        return chosen, why
    return holder, f"{why}; it holds {held} tokens, leaving it would gain only {gain_ms:.1f} ms"


def _margin_ms(ranked: Ranked, least_ms: float, share: float) -> float:
    """What a gain must reach, of the time until the way's first token."""
    return max(least_ms, share * _way(ranked).ttft_ms)


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
    if first.evict_ms >= 0.1:
        others += f", what it pushes out costs {first.evict_ms:.1f}"
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
        "pushes out": way.first.evict_ms - chosen.first.evict_ms,
    }  # fmt: skip
    name, more_ms = max(parts.items(), key=lambda item: item[1])
    return f"{name} {more_ms:.1f} ms more" if more_ms >= 0.05 else "as good; another's turn"


def _round(value: float) -> float:
    return round(value, 3)
