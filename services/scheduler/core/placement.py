"""Where a request runs: disaggregated over a compatible pair, else colocated on whatever lives.

    1. live instances that serve the model, without those the request excludes
    2. a prefill and a decode instance whose raw KV fits together (equal content keys)
    3. no such pair: one full engine, role colocated before decode before prefill
    4. nothing left after the exclusions: again with them
    5. nothing at all: Rejected no_instance; only full ones: Rejected overloaded
Every worker is a full engine, so one live instance is enough to serve (architecture.md section 3).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.scheduler.core.instances import Instance, Instances
from services.scheduler.core.policies import Candidate, Choice, PolicyName, choose
from services.scheduler.core.request import AttemptKey, PlacementRequest, Stage, from_wire
from shared.errors import Overloaded
from shared.ids import HandoffId, InstanceId
from shared.wire.placement import Ended, Place, Placed, Rejected
from shared.wire.reports import Role

NO_INSTANCE = "no_instance"
COLOCATED_ORDER: tuple[Role, ...] = ("colocated", "decode", "prefill")


@dataclass(frozen=True, slots=True)
class PlacementLimits:
    """When an instance is full, and what is said then."""

    overload_factor: float = 4.0  # requests on an instance / requests in one step of it
    max_prefill_tokens: int = 1 << 20  # waiting on one instance
    overloaded_retry_ms: int = 250
    no_instance_retry_ms: int = 300
    max_open: int = 100_000  # attempts whose end is awaited


@dataclass(slots=True)
class Placer:
    """Places attempts and keeps account of them until they end.

    Args: boot: unlike that of any other life of any scheduler; handoff ids begin with it.
    """

    instances: Instances
    policy: PolicyName
    boot: str
    limits: PlacementLimits = field(default_factory=PlacementLimits)
    num_placed: int = 0
    _open: dict[AttemptKey, tuple[InstanceId, ...]] = field(default_factory=dict)

    @property
    def num_open(self) -> int:
        """Attempts placed and not ended."""
        return len(self._open)

    def place(self, place: Place, *, now_ms: int) -> Placed | Rejected:
        """Answer one Place. The same attempt again replaces its first placement."""
        request = from_wire(place)
        self._forget(request.key)
        live = self.instances.live(now_ms=now_ms)
        fitting = [i for i in live if not request.model or i.description.model == request.model]
        if not fitting:
            who = f"serves the model {request.model!r}" if live else "is alive"
            return self._no_instance(request, f"No instance {who} now.")
        wanted = [i for i in fitting if i.instance not in request.exclude] or fitting
        return self._place_on(request, wanted, now_ms)

    def ended(self, ended: Ended) -> None:
        """An attempt left its instances. Unknown ones are ignored."""
        self._forget((ended.request_id, ended.attempt))

    def _place_on(
        self, request: PlacementRequest, usable: Sequence[Instance], now_ms: int
    ) -> Placed | Rejected:
        free = [c for i in usable if not self._is_full(c := _candidate(request, i, now_ms))]
        if not request.must_colocate:
            if pair := self._choose_pair(request, free):
                return self._disaggregated(request, *pair, now_ms=now_ms)
            if _has_pair(usable):  # but its free half has nobody to work with
                free = [c for c in free if c.known.role == "colocated"]
        for role in COLOCATED_ORDER:
            candidates = [c for c in free if c.known.role == role]
            if candidates:
                why = _why_colocated(request, usable)
                choice = choose(self.policy, "colocated", request, candidates)
                return self._colocated(request, choice, why, now_ms=now_ms)
        return Rejected(
            request_id=request.key[0],
            attempt=request.key[1],
            code=Overloaded.code,
            reason="Every instance that could take the request is full.",
            retry_after_ms=self.limits.overloaded_retry_ms,
        )

    def _choose_pair(
        self, request: PlacementRequest, free: Sequence[Candidate]
    ) -> tuple[Choice, Choice] | None:
        decodes = [c for c in free if c.known.role == "decode"]
        keys = {c.known.family_key for c in decodes}
        prefills = [c for c in free if c.known.role == "prefill" and c.known.family_key in keys]
        if not prefills:
            return None
        prefill = choose(self.policy, "prefill", request, prefills)
        key = prefill.candidate.known.family_key
        partners = [c for c in decodes if c.known.family_key == key]
        return prefill, choose(self.policy, "decode", request, partners)

    def _disaggregated(
        self, request: PlacementRequest, prefill: Choice, decode: Choice, *, now_ms: int
    ) -> Placed:
        first, then = prefill.candidate, decode.candidate
        first.known.load.add_direct(
            request.key,
            prefill_tokens=request.num_prompt_tokens - first.hit_tokens,
            context_tokens=request.num_prompt_tokens,
            now_ms=now_ms,
        )
        then.known.load.add_handoff(request.key, context_tokens=request.num_prompt_tokens, now_ms=now_ms)
        self._note(request.key, first.known, then.known)
        return Placed(
            request_id=request.key[0],
            attempt=request.key[1],
            kind="disaggregated",
            decode=then.known.target,
            prefill=first.known.target,
            handoff_id=HandoffId(f"{self.boot}-{self.num_placed}"),
            policy=self.policy,
            reason=f"By {self.policy}: {prefill.reason}; {decode.reason}.",
            prefill_hit_tokens=first.hit_tokens,
            decode_hit_tokens=then.hit_tokens,
        )

    def _colocated(self, request: PlacementRequest, choice: Choice, why: str, *, now_ms: int) -> Placed:
        chosen = choice.candidate
        chosen.known.load.add_direct(
            request.key,
            prefill_tokens=request.num_prompt_tokens - chosen.hit_tokens,
            context_tokens=request.num_prompt_tokens,
            now_ms=now_ms,
        )
        self._note(request.key, chosen.known)
        return Placed(
            request_id=request.key[0],
            attempt=request.key[1],
            kind="colocated",
            decode=chosen.known.target,
            policy=self.policy,
            reason=f"By {self.policy}: {why}; {choice.reason}.",
            decode_hit_tokens=chosen.hit_tokens,
        )

    def _is_full(self, candidate: Candidate) -> bool:
        view, limits = candidate.view, self.limits
        return (
            view.requests_share >= limits.overload_factor or view.prefill_tokens >= limits.max_prefill_tokens
        )

    def _note(self, key: AttemptKey, *chosen: Instance) -> None:
        self.num_placed += 1
        for known in chosen:
            known.chosen_at = self.num_placed
        self._open[key] = tuple(known.instance for known in chosen)
        if len(self._open) > self.limits.max_open:
            self._forget(next(iter(self._open)))

    def _forget(self, key: AttemptKey) -> None:
        for instance in self._open.pop(key, ()):
            known = self.instances.get(instance)
            if known is not None:
                known.load.end(key)

    def _no_instance(self, request: PlacementRequest, reason: str) -> Rejected:
        return Rejected(
            request_id=request.key[0],
            attempt=request.key[1],
            code=NO_INSTANCE,
            reason=reason,
            retry_after_ms=self.limits.no_instance_retry_ms,
        )


def _candidate(request: PlacementRequest, known: Instance, now_ms: int) -> Candidate:
    return Candidate(known, known.view(now_ms=now_ms), request.hits_of(known.instance))


def _has_pair(usable: Sequence[Instance]) -> bool:
    decode_keys = {i.family_key for i in usable if i.role == "decode"}
    return any(i.role == "prefill" and i.family_key in decode_keys for i in usable)


def _why_colocated(request: PlacementRequest, usable: Sequence[Instance]) -> str:
    if request.must_colocate:
        return "the request asked for one instance"
    if _has_pair(usable):
        return "the prefill and decode instances are full"
    roles: set[Stage] = {i.role for i in usable}
    if "prefill" in roles and "decode" in roles:
        return "no prefill and decode instance hold KV alike"
    missing = (
        "prefill and decode" if roles == {"colocated"} else "prefill" if "prefill" not in roles else "decode"
    )
    return f"no {missing} instance to pair with"
