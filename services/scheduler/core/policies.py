"""Which of several instances: least_load, session, prompt_tree. Each choice comes with its reason. For `cost`: cost.py.

Costs are in engine steps and shares of an instance's limits, so that unequal instances compare.
"""

import hashlib
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from services.scheduler.core.instances import Instance
from services.scheduler.core.load import LoadView
from services.scheduler.core.rates import Rates
from services.scheduler.core.request import PlacementRequest, Stage
from shared.ids import InstanceId

PolicyName = Literal["cost", "prompt_tree", "least_load", "session"]
GUARD_SHARE = 0.25  # of an instance's running requests: how much fuller the holder of a prefix may be
GUARD_STEPS = 1.0  # of prefill queue that a prefix hit may cost beyond the steps it saves


class Candidate(Struct, frozen=True, gc=False):
    """An instance that could take this stage of this request now.

    gc=False here and in what is predicted from it: hundreds are made for a request, and none is part of a cycle.
    """

    known: Instance
    view: LoadView
    hit_tokens: int
    name: InstanceId  # of the instance: read more often than anything else
    rates: Rates | None  # None: it sent no coefficients


class Choice(Struct, frozen=True):
    """The chosen instance and one clause that says why."""

    candidate: Candidate
    reason: str


def choose(
    policy: PolicyName, stage: Stage, request: PlacementRequest, candidates: Sequence[Candidate]
) -> Choice:
    """One of the candidates, of which there is at least one. Deterministic in its arguments."""
    assert candidates, "the caller checks"
    if policy == "session" and request.session:
        return _session(stage, request, candidates)
    if policy in ("prompt_tree", "cost"):  # cost comes here only where there is nothing to predict with
        return _prompt_tree(stage, candidates)
    return _least_load(stage, candidates)


def cost(stage: Stage, view: LoadView) -> float:
    """How long a request of this stage would wait or slow others down; dimensionless, 0 when idle."""
    if stage == "prefill":
        return view.prefill_share + view.requests_share
    if stage == "decode":
        return view.requests_share + view.kv_used_share
    return view.prefill_share + view.requests_share + view.kv_used_share


def _order(stage: Stage, candidate: Candidate) -> tuple[float, int, str]:
    """Sorts by cost; equals take turns."""
    return cost(stage, candidate.view), candidate.known.chosen_at, candidate.name


def _least_load(stage: Stage, candidates: Sequence[Candidate]) -> Choice:
    if len(candidates) == 1:
        return Choice(candidates[0], f"{candidates[0].name} is the only one for {stage}")
    best = min(candidates, key=lambda c: _order(stage, c))
    return Choice(best, f"{best.name} has the least load for {stage} ({cost(stage, best.view):.2f})")


def _session(stage: Stage, request: PlacementRequest, candidates: Sequence[Candidate]) -> Choice:
    """Highest random weight: a session moves only when its own instance comes or goes."""
    key = request.session.encode()

    def weight(candidate: Candidate) -> tuple[bytes, str]:
        name = candidate.name.encode()
        digest = hashlib.blake2b(key + b"\0" + name, digest_size=8).digest()
        return digest, candidate.name

    best = max(candidates, key=weight)
    return Choice(best, f"the session's {stage} instance is {best.name}")


def _prompt_tree(stage: Stage, candidates: Sequence[Candidate]) -> Choice:
    """Longest prefix first; a holder that is too much busier than the least loaded is passed over."""
    if not any(candidate.hit_tokens for candidate in candidates):
        found = _least_load(stage, candidates)
        return Choice(found.candidate, f"no cached prefix; {found.reason}")
    if len(candidates) == 1:
        return Choice(candidates[0], _held(candidates[0]))
    idlest = min(candidates, key=lambda c: _order(stage, c))
    by_hits = sorted(candidates, key=lambda c: (-c.hit_tokens, *_order(stage, c)))
    for candidate in by_hits:
        if candidate is idlest or _worth_it(stage, candidate, idlest):
            break
    else:
        candidate = idlest
    passed_over = "" if candidate is by_hits[0] else f"{by_hits[0].name} holds more but is too busy; "
    return Choice(candidate, passed_over + _held(candidate))


def _held(candidate: Candidate) -> str:
    return f"{candidate.name} holds {candidate.hit_tokens} prompt tokens"


def _worth_it(stage: Stage, holder: Candidate, idlest: Candidate) -> bool:
    """Whether the prefix saves more than the longer queue costs."""
    if stage != "prefill" and holder.view.requests_share - idlest.view.requests_share > GUARD_SHARE:
        return False
    if stage == "decode":
        return True
    saved_steps = (holder.hit_tokens - idlest.hit_tokens) / holder.known.load.max_batched_tokens
    return holder.view.prefill_share - idlest.view.prefill_share <= saved_steps + GUARD_STEPS
