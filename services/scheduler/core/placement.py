"""Where a request runs. Policy `cost` compares all ways (cost.py); the others take a pair, else whatever lives:

    1. live instances that serve the model, without those the request excludes
    2. a prefill and a decode instance whose raw KV fits together (equal content keys)
    3. no such pair: one full engine, role colocated before decode before prefill
    4. nothing left after the exclusions: again with them
    5. only full ones: above the bound, where the tenant has less than its share of the places (tenants.py)
    6. nothing at all: Rejected no_instance; only full ones: Rejected overloaded
No prompt is handed to a decode instance without room in its pages while another way is left, or waiting helps: room.py.
Every worker is a full engine, so one live instance is enough to serve (ARCHITECTURE.md).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice

from msgspec import structs

from services.scheduler.core.attempts import OpenAttempt, OpenAttempts
from services.scheduler.core.colocated import claimed_of, has_pair, why_colocated
from services.scheduler.core.cost import Decision, Way, decide, predict_way
from services.scheduler.core.instances import Instance, Instances
from services.scheduler.core.limits import PlacementLimits
from services.scheduler.core.policies import Candidate, Choice, PolicyName, choose
from services.scheduler.core.predict import CostSettings, Holders, Predictor
from services.scheduler.core.pressure import Pressures
from services.scheduler.core.probes import kv_plan
from services.scheduler.core.request import AttemptKey, PlacementRequest, Stage, from_wire
from services.scheduler.core.room import Roomy, Waiter, WaitingRoom, need_blocks, with_room
from services.scheduler.core.standing import Families, Field, Standing
from services.scheduler.core.tenants import Tenants
from shared.errors import Overloaded
from shared.ids import HandoffId
from shared.wire.placement import Alternative, Ended, Held, Place, Placed, Rejected
from shared.wire.reports import Role

NO_INSTANCE = "no_instance"
SERVE_EVERY_MS = 10  # hundreds of instances report several times a second each
COLOCATED_ORDER: tuple[Role, ...] = ("colocated", "decode", "prefill")


@dataclass(slots=True)
class Placer:
    """Places attempts and keeps account of them until they end.

    Args: boot: unlike that of any other life of any scheduler; handoff ids begin with it.
    """

    instances: Instances
    policy: PolicyName
    boot: str
    limits: PlacementLimits = field(default_factory=PlacementLimits)
    cost: CostSettings = field(default_factory=CostSettings)
    num_placed: int = 0
    tenants: Tenants = field(default_factory=Tenants)
    pressures: Pressures = field(default_factory=Pressures)
    waiting: WaitingRoom = field(init=False)
    _served_at_ms: int = -SERVE_EVERY_MS
    _open: OpenAttempts = field(init=False)
    _standing: dict[str, tuple[Sequence[Instance], Standing]] = field(default_factory=dict)  # by model

    def __post_init__(self) -> None:
        self.waiting = WaitingRoom(self.limits.max_held)
        self._open = OpenAttempts(self.limits.max_open, self.limits.forget_ms)

    def keep_for(self, forget_ms: int) -> None:
        """Attempts whose end is not told are forgotten so late, or later, at their instances too."""
        self._open.forget_ms = max(self._open.forget_ms, forget_ms)
        self.instances.keep_for(forget_ms)

    @property
    def num_open(self) -> int:
        """Attempts placed and not ended."""
        return len(self._open)

    def place(self, place: Place, *, now_ms: int, gateway: str = "") -> Placed | Rejected | Held:
        """Answer one Place. The same attempt again replaces its first placement. `gateway`: who asks, see tick().

        Held: serve_held() answers later. Whose stream has begun, and stands still, is never held.
        """
        request = from_wire(place, gateway)
        self._forget(request.key)
        wait_ms = self.limits.room_wait_ms if not (place.begun or place.must_colocate) else 0
        queues = wait_ms > 0 and self.waiting.has(place.model)
        answer = None if queues else self._place_now(request, now_ms, may_wait=wait_ms > 0)
        if answer is None and not self.waiting.add(place, now_ms=now_ms, gateway=gateway):
            answer = self._place_now(request, now_ms, may_wait=False)
        if answer is not None:
            return answer
        why = "No decode instance has room in its pages now."
        return Held(request_id=place.request_id, attempt=place.attempt, wait_ms=wait_ms, reason=why)

    def serve_held(self, *, now_ms: int) -> list[Placed | Rejected]:
        """Answers for held requests that have room now, or whose time is over. After reports and ends, and with time.

        Cost: of one attempt for each model with held requests, and one for each answer; at most once in 10 ms.
        """
        if not self.waiting or 0 <= now_ms - self._served_at_ms < SERVE_EVERY_MS:
            return []
        self._served_at_ms = now_ms
        return list(self.waiting.serve(lambda waiter: self._place_held(waiter, now_ms)))

    def _place_held(self, waiter: Waiter, now_ms: int) -> Placed | Rejected | None:
        held_ms = now_ms - waiter.since_ms
        is_over = waiter.is_due or held_ms >= self.limits.room_wait_ms
        answer = self._place_now(from_wire(waiter.place, waiter.gateway), now_ms, may_wait=not is_over)
        if not isinstance(answer, Placed):
            return answer
        why = f"{answer.reason} It waited {held_ms} ms for room in decode's pages."
        return structs.replace(answer, reason=why, held_ms=float(held_ms))

    def _place_now(
        self, request: PlacementRequest, now_ms: int, *, may_wait: bool
    ) -> Placed | Rejected | None:
        """None: it may wait, and nobody has room."""
        fitting = self.instances.live(request.model, now_ms=now_ms)
        if not fitting:
            live = self.instances.live(now_ms=now_ms)
            who = f"serves the model {request.model!r}" if live else "is alive"
            return self._no_instance(request, f"No instance {who} now.")
        wanted = fitting
        if request.exclude:
            wanted = [i for i in fitting if i.instance not in request.exclude] or fitting
        field = self._field(request, fitting, wanted, now_ms)
        colocates = self.cost.disaggregation == "never"
        always = self.cost.disaggregation == "always"
        roomy = Roomy(field) if colocates else with_room(request, field, always_pairs=always)
        if roomy.field is None and may_wait:
            return None
        why = roomy.why if roomy.field is not None else "; nobody has room in their pages"
        left = [known for known in wanted if known.instance not in roomy.without] if roomy.without else wanted
        answer = self._place_on(request, left, roomy.field or field)
        if roomy.without and isinstance(answer, Rejected):  # a policy that uses none of those with room
            if may_wait:
                return None
            answer, why = self._place_on(request, wanted, field), "; without room in the pages"
        if why and isinstance(answer, Placed):
            answer = structs.replace(answer, reason=f"{answer.reason.rstrip('.')}{why}.")
        return answer

    def ended(self, ended: Ended) -> None:
        """An attempt left its instances. Unknown ones are ignored."""
        self._forget((ended.request_id, ended.attempt))

    def tick(self, *, now_ms: int, gone: Collection[str] = ()) -> int:
        """Forget attempts whose end nobody will tell: of gateways that are gone, and those too old. How many.

        Cost: see OpenAttempts.overdue().
        """
        num_open = len(self._open)
        for key in self._open.overdue(gone, now_ms=now_ms):
            self._forget(key)
        return num_open - len(self._open)

    def _field(
        self, request: PlacementRequest, fitting: Sequence[Instance], wanted: Sequence[Instance], now_ms: int
    ) -> Field:
        """Those that are wanted and not full."""
        standing = self._standing.get(request.model)
        if standing is None or standing[0] is not fitting:
            made = Standing(
                fitting,
                most_share=self.limits.overload_factor,
                most_tokens=self.limits.max_prefill_tokens,
            )
            self._standing = {
                name: old
                for name, old in self._standing.items()
                if old[0] is self.instances.live(name, now_ms=now_ms)
            }
            self._standing[request.model] = standing = fitting, made
            self.instances.listen(made.changed)
        standing[1].refresh(now_ms=now_ms)
        without = request.exclude if wanted is not fitting else ()
        return Field(standing[1], request.reach(), now_ms=now_ms, without=without)

    def _place_on(
        self, request: PlacementRequest, usable: Sequence[Instance], field: Field
    ) -> Placed | Rejected:
        self.tenants.asks(request.tenant, request.weight, field.now_ms)
        placed = self._place_in(request, usable, field)
        if placed is None and (share := self.tenants.share(request.tenant, field.now_ms)):
            free = [row.known for row in field.rows()]
            held = self.tenants.held(request.tenant)
            claimed = claimed_of(usable, held, share, self.limits, field.now_ms)
            placed = self._place_in(request, usable, self._only(field, free + claimed))
        if placed is not None:
            return placed
        return Rejected(
            request_id=request.key[0],
            attempt=request.key[1],
            code=Overloaded.code,
            reason="Every instance that could take the request is full.",
            retry_after_ms=self.limits.overloaded_retry_ms,
        )

    def _only(self, field: Field, instances: Iterable[Instance]) -> Field:
        """Of these, whether they are full or not."""
        standing = Standing(instances)
        standing.refresh(now_ms=field.now_ms)
        return Field(standing, field.reach, now_ms=field.now_ms)

    def _place_in(self, request: PlacementRequest, usable: Sequence[Instance], field: Field) -> Placed | None:
        """None: these do not do."""
        predictor = self._predictor(request, field.now_ms)
        if self.policy == "cost" and not field.lacks_models():
            decision = self._decide(request, usable, field, predictor)
            if decision is None:
                return None
            self.pressures.note(predictor, decision.way.first)
            return self._by_cost(request, decision, field.now_ms)
        return self._by_policy(request, usable, field, predictor)

    def _predictor(self, request: PlacementRequest, now_ms: int) -> Predictor:
        named = (name for name in request.holders() if name not in request.exclude)
        found = (self.instances.source(name, now_ms=now_ms) for name in named)
        holders = Holders(
            (i, request.hit_tokens.get(i.instance, 0), request.dram_tokens.get(i.instance, 0))
            for i in found
            if i is not None
        )
        return Predictor(request, holders, self.cost, self.pressures.ms_per_token(request.model))

    def _decide(
        self,
        request: PlacementRequest,
        usable: Sequence[Instance],
        field: Field,
        predictor: Predictor,
    ) -> Decision | None:
        colocate = request.must_colocate or self.cost.disaggregation == "never"
        always = not colocate and self.cost.disaggregation == "always"
        if always and not field.pairs() and has_pair(usable):
            field = self._only(field, [row.known for row in field.rows("colocated")])  # as the other policies
        return decide(predictor, field, must_colocate=colocate)

    def _by_cost(self, request: PlacementRequest, decision: Decision, now_ms: int) -> Placed:
        way = decision.way
        reason = f"By cost: {decision.reason}."
        return self._placed(request, way.first.candidate, way.decode.candidate, reason, way, now_ms=now_ms,
                            alternatives=decision.alternatives)  # fmt: skip

    def _by_policy(
        self, request: PlacementRequest, usable: Sequence[Instance], field: Field, predictor: Predictor
    ) -> Placed | None:
        first, then, why = None, None, ""
        roles = COLOCATED_ORDER
        if not request.must_colocate and self.cost.disaggregation != "never":
            if pair := self._choose_pair(request, field):
                first, then = pair
                why = f"{first.reason}; {then.reason}"
            elif has_pair(usable):  # but its free half has nobody to work with
                roles = ("colocated",)
        for role in roles if first is None else ():
            if candidates := self._considered(request, field, role, "colocated"):
                first = then = choose(self.policy, "colocated", request, candidates)
                why = f"{why_colocated(request, usable, self.cost)}; {first.reason}"
                break
        if first is None or then is None:
            return None
        by, way = self.policy, None
        if self.policy == "cost":
            by = f"cost, as prompt_tree because {field.lacks_models()} sent no coefficients"
        elif first.candidate.known.model is not None and then.candidate.known.model is not None:
            way = predict_way(predictor, first.candidate, then.candidate)
        chosen = first.candidate, then.candidate
        return self._placed(
            request, *chosen, f"By {by}: {why}.", way, now_ms=field.now_ms,
            alternatives=self._others(field, *chosen) if request.explain else [],
        )  # fmt: skip

    def _considered(
        self,
        request: PlacementRequest,
        field: Field,
        role: Role,
        stage: Stage,
        families: Families | None = None,
    ) -> list[Candidate]:
        """Those among which the policy's choice is what it would be among all of the role.

        A session's instance may be any. Otherwise only holders and the least loaded are ever chosen; the second least
        loaded says that there is more than one.
        """
        if stage != role or (self.policy == "session" and request.session):
            rows = field.rows(role)
        else:
            rows = [key[-1] for key in islice(field.by_load(role, families), 2)]
            rows += [row for name in field.reach if (row := field.find(name)) is not None and row not in rows]
        return [
            field.candidate(row)
            for row in rows
            if row.known.role == role and (families is None or row.known.family_key in families)
        ]

    def _choose_pair(self, request: PlacementRequest, field: Field) -> tuple[Choice, Choice] | None:
        families = field.pairs()
        if not families:
            return None
        prefills = self._considered(request, field, "prefill", "prefill", families)
        prefill = choose(self.policy, "prefill", request, prefills)
        family = (prefill.candidate.known.family_key,)
        partners = self._considered(request, field, "decode", "decode", family)
        return prefill, choose(self.policy, "decode", request, partners)

    def _placed(
        self,
        request: PlacementRequest,
        first: Candidate,
        then: Candidate,
        reason: str,
        way: Way | None,
        *,
        now_ms: int,
        alternatives: list[Alternative],
    ) -> Placed:
        """Note it and say so. `way`: what it is predicted to take."""
        is_pair = first.known is not then.known
        num_tokens = request.num_prompt_tokens
        cached = way.first.cached_tokens if way is not None else first.hit_tokens
        first.known.load.add_direct(
            request.key,
            prefill_tokens=num_tokens - cached,
            context_tokens=num_tokens,
            now_ms=now_ms,
            prefill_ms=way.first.fetch_ms + way.first.compute_ms if way is not None else 0.0,
            decodes=not is_pair,
            need_blocks=need_blocks(request, first.known),
        )
        if is_pair:
            then.known.load.add_handoff(
                request.key,
                context_tokens=num_tokens,
                now_ms=now_ms,
                need_blocks=need_blocks(request, then.known),
            )
            self._note(request, now_ms, first.known, then.known)
        else:
            self._note(request, now_ms, first.known)
        kv, why = kv_plan(self.policy, self.cost.fetch, way and way.first, self.instances, now_ms)
        handoff_id = HandoffId(f"{self.boot}-{self.num_placed - 1}") if is_pair else HandoffId("")
        return Placed(
            request_id=request.key[0],
            attempt=request.key[1],
            kind="disaggregated" if is_pair else "colocated",
            decode=then.known.target,
            prefill=first.known.target if is_pair else None,
            handoff_id=handoff_id,
            policy=self.policy,
            reason=f"{reason.rstrip('.')}{why}." if why else reason,
            prefill_hit_tokens=first.hit_tokens if is_pair else 0,
            decode_hit_tokens=then.hit_tokens,
            predicted_ttft_ms=round(way.ttft_ms, 3) if way is not None else None,
            predicted=way.predicted() if way is not None else None,
            kv=kv,
            alternatives=alternatives,
        )

    def _others(self, field: Field, *chosen: Candidate) -> list[Alternative]:
        """The next best ones by load, of the same roles."""
        names = {c.name for c in chosen}
        roles: set[Role] = {c.known.role for c in chosen}
        walk = merge(*(field.by_load(role) for role in roles))
        rest = islice((key for key in walk if key[-2] not in names), self.cost.max_alternatives)
        return [
            Alternative(c.name, c.known.role, c.hit_tokens, None, f"load {key[0]:.2f}")
            for key in rest
            if (c := field.candidate(key[-1]))
        ]

    def _note(self, request: PlacementRequest, now_ms: int, *chosen: Instance) -> None:
        key = request.key
        self.num_placed += 1
        for known in chosen:
            known.chosen_at = self.num_placed
            self.instances.touch(known)
        names = tuple(known.instance for known in chosen)
        self.tenants.holds(key, request.tenant, names)
        excess = self._open.add(key, OpenAttempt(names, request.gateway, now_ms))
        if excess is not None:
            self._forget(excess)

    def _forget(self, key: AttemptKey) -> None:
        self.waiting.drop(key)
        self.tenants.ended(key)
        for instance in self._open.pop(key):
            known = self.instances.get(instance)
            if known is not None:
                known.load.end(key)
                self.instances.touch(known)

    def _no_instance(self, request: PlacementRequest, reason: str) -> Rejected:
        return Rejected(
            request_id=request.key[0],
            attempt=request.key[1],
            code=NO_INSTANCE,
            reason=reason,
            retry_after_ms=self.limits.no_instance_retry_ms,
        )
