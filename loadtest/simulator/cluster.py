"""A simulated cluster: the production scheduler and gateway cores, engines as step machines, links, the prompt tree."""

from collections.abc import Callable, Sequence
from random import Random

from loadtest.outcomes import Outcome
from loadtest.simulator.blocks import ROOT, BlockStore, tokens_of
from loadtest.simulator.caching import keeps, lends
from loadtest.simulator.engine import Engine, EngineParts
from loadtest.simulator.events import EventQueue
from loadtest.simulator.fair_engine import FairEngine
from loadtest.simulator.frontend import Call, Frontend, Submitted
from loadtest.simulator.links import Links
from loadtest.simulator.parking import turns_of
from loadtest.simulator.prices import StepPrices
from loadtest.simulator.reports import Reports
from loadtest.simulator.request import SimRequest
from loadtest.simulator.spec import ClusterSpec, Simulated
from loadtest.simulator.task import EngineHooks, Task
from loadtest.simulator.tree import SimTree
from services.gateway.core.request_flow import SendGenerate
from services.mempool.core.pd_caching import PdCaching
from services.scheduler.core.instances import Instances
from services.scheduler.core.placement import Placer
from shared.ids import BlockHash, RequestId
from shared.prompttree.publisher import TTL_S
from shared.wire.handoff import HandoffState
from shared.wire.placement import Ended, Held, Medium, Place, Placed, PrefixHit, Rejected, Target
from shared.wire.reports import Role
from shared.wire.requests import Stage

FORGET_MS = 1_000.0


class Simulation:
    """Args: prices: of every instance. enough: asked after each request; True ends the run with those that ended.
    is_late: the same, asked with every report: of time that a run may take.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        prices: StepPrices,
        requests: Sequence[SimRequest],
        *,
        enough: Callable[[Outcome], bool] | None = None,
        is_late: Callable[[], bool] | None = None,
    ) -> None:
        self._enough, self._is_late, self._stopped = enough, is_late, False
        self._spec, self._prices, self._requests = spec, prices, requests
        self._events = EventQueue()
        self._links = Links(spec.peer, spec.remote, spec.dram, spec.instances_per_host)
        self._tree = SimTree(self._events, len(spec.roles))
        # host memory counted
        self._reach = SimTree(self._events, len(spec.roles)) if spec.dram_tokens else None
        self._instances = Instances(spec.instances)
        self._placer = Placer(self._instances, spec.policy, "simulated", spec.placement, spec.cost)
        self.engines = self._build_engines()
        self._reports = Reports(
            spec,
            self._events,
            prices,
            self.engines,
            self._instances,
            self._links,
            self._heard,
            lambda: self._frontend.num_open,
        )
        self._names = self._reports.names
        self._numbers = {name: n for n, name in enumerate(self._names)}
        self._tasks: dict[tuple[int, int, Stage], Task] = {}
        self._followers: dict[int, list[int]] = {}
        self._records: list[Outcome | None] = [None] * len(requests)
        self._num_ended = self._num_rejected = self._num_retries = 0
        self._frontend = Frontend(
            self._events, self, spec.delays, spec.flow,
            model=self._reports.description.model, block_tokens=spec.block_tokens, on_end=self._on_end,
        )  # fmt: skip

    def run(self) -> Simulated:
        """Until every request has its outcome."""
        self._reports.begin()
        for index, request in enumerate(self._requests):
            if request.depends_on is None:
                self._events.at(request.arrival_ms, self._frontend.arrive, index, request)
            else:
                self._followers.setdefault(request.depends_on, []).append(index)
        for death in self._spec.deaths:
            self._events.at(death.at_ms, self._die, death.instance)
        self._events.run(lambda: self._stopped or self._num_ended == len(self._requests))
        records = [record for record in self._records if record is not None]
        assert self._stopped or len(records) == len(self._requests), "every request ends"
        return Simulated(
            outcomes=records,
            num_events=self._events.num_events,
            num_steps=sum(engine.num_steps for engine in self.engines),
            num_preempted=sum(engine.num_preempted for engine in self.engines),
            num_evicted=sum(engine.store.num_evicted for engine in self.engines),
            num_rejected=self._num_rejected,
            num_retries=self._num_retries,
            peer_bytes=self._links.num_bytes,
            end_ms=self._events.now_ms,
            busy_ms=[engine.busy_ms for engine in self.engines],
            turns=turns_of(self.engines),
        )

    def settle(self, wait_ms: float = 5_000.0) -> None:
        """Let what was on its way arrive: aborts, releases, blocks that go back."""
        until_ms = self._events.now_ms + wait_ms
        self._events.at(until_ms, lambda: None)  # no pause is passed over beyond it
        self._events.run(lambda: self._events.now_ms >= until_ms)

    # -- for the frontend -------------------------------------------------------------------------

    def lookup(self, request: SimRequest) -> list[PrefixHit]:
        """What the prompt tree says."""
        here = self._tree.lookup(request.blocks)
        hits, depths = [self._hit(request, n, depth, "hbm") for n, depth in here], dict(here)
        if self._reach is not None:
            further = [(n, d) for n, d in self._reach.lookup(request.blocks) if d > depths.get(n, 0)]
            hits += [self._hit(request, n, depth, "dram") for n, depth in further]
        return hits

    def _hit(self, request: SimRequest, number: int, depth: int, medium: Medium) -> PrefixHit:
        tokens = min(depth * self._spec.block_tokens, request.prompt_tokens)
        return PrefixHit(self._names[number], tokens, medium)

    def place(self, place: Place) -> Placed | Rejected | Held:
        """The production scheduler's answer."""
        answer = self._placer.place(place, now_ms=self._now())
        self._num_rejected += isinstance(answer, Rejected)
        return answer

    def _heard(self) -> None:
        self._stopped = self._stopped or (self._is_late is not None and self._is_late())
        self._serve_held()

    def _serve_held(self) -> None:
        for answer in self._placer.serve_held(now_ms=self._now()):
            self._num_rejected += isinstance(answer, Rejected)
            self._frontend.placed_at_last(answer)

    def ended(self, request_id: RequestId, attempt: int) -> None:
        """The scheduler forgets an attempt."""
        self._placer.ended(Ended(request_id=request_id, attempt=attempt))
        self._serve_held()

    def submit(self, call: Call, order: SendGenerate) -> Submitted:
        """A stage reaches its worker, or not."""
        placed, stage, attempt = call.flow.placed, order.stage, order.attempt
        assert placed is not None
        engine = self.engines[self._numbers[order.target.instance]]
        if engine.dead:
            return "down"
        decoding = stage == "decode"
        source = self._numbers[placed.prefill.instance] if decoding and placed.prefill is not None else -1
        task = Task(
            key=(call.name, attempt),
            stage=stage,
            request=call.request,
            hinted_tokens=placed.prefill_hit_tokens if stage == "prefill" else placed.decode_hit_tokens,
            owner=call,
            instance=engine.number,
            source=source,
            kv=order.kv,
            prior=self._tasks.get((call.index, attempt, "prefill")) if decoding else None,
        )
        if not engine.submit(task):
            return "never fits"
        self._tasks[call.index, attempt, stage] = task
        self._reports.soon(engine.number)
        return "taken"

    def abort(self, call: Call, attempt: int, target: Target) -> None:
        """A worker stops an attempt, whatever its stage."""
        number = self._numbers[target.instance]
        for stage in ("prefill", "decode", "colocated"):
            task = self._tasks.get((call.index, attempt, stage))
            if task is not None and task.instance == number:
                self.engines[number].abort(task)

    def handoff(self, placed: Placed) -> HandoffState:
        """What the prefill worker's answer carries."""
        assert placed.prefill is not None
        return HandoffState(
            handoff_id=placed.handoff_id,
            source=placed.prefill.instance,
            description=self._reports.description,
        )

    def outside_ms(self, request: SimRequest) -> float:
        """What a worker does for a prompt outside of steps."""
        return self._prices.outside_ms(request.prompt_tokens)

    # -- for the engines --------------------------------------------------------------------------

    def _find(self, number: int, task: Task, num_blocks: int) -> int:
        """What the mempool would bring: of the same host what there is, of others what the scheduler says."""
        blocks, task.lent = task.request.blocks, []
        if num_blocks >= len(blocks) or (self._spec.instances_per_host == 1 and task.kv is None):
            return 0
        hosts = {self._links.host_of(number)}
        if task.kv is not None and task.kv.reach == "remote":
            hosts.add(self._links.host_of(self._numbers[task.kv.source]))
        per_host, best = self._spec.instances_per_host, 0
        for host in sorted(hosts):
            for engine in self.engines[host * per_host : (host + 1) * per_host]:
                if engine.number == number or engine.dead or not self._has(engine.number, lends):
                    continue
                found = engine.store.match(blocks)  # all is pinned: what precedes pinned blocks cannot go
                if (tokens := tokens_of(found[num_blocks:])) > best:
                    best, task.fetch_from, task.lent = tokens, engine.number, found
        return best

    def _computed(self, number: int, task: Task) -> None:
        """More of a prompt is there, which leaves for its decode side on this host."""
        placed = task.owner.flow.placed
        if task.stage != "prefill" or placed is None or not self._spec.sends_ahead(number):
            return
        target = self.engines[self._numbers[placed.decode.instance]]
        unit = self._spec.limits.unit_tokens
        if target.dead or self._links.are_apart(number, target.number):
            return
        have = max(task.ahead_tokens, tokens_of(target.store.match(task.request.blocks)))
        task.ahead_tokens = max(have, task.done_tokens // unit * unit)
        num_bytes = (task.ahead_tokens - have) * self._prices.kv_bytes_per_token
        self._links.send(number, target.number, num_bytes, self._events.now_ms)  # the rest comes behind it

    def _load(self, number: int, task: Task, moved_tokens: int, dram_tokens: int) -> None:
        now_ms, per_token = self._events.now_ms, self._prices.kv_bytes_per_token
        at_ms = self._links.load(number, dram_tokens * per_token, now_ms)
        source = task.source if task.stage == "decode" else task.fetch_from
        if not moved_tokens:
            task.lent = []
        else:
            self.engines[source].store.pin(task.lent)
            rest_tokens = moved_tokens
            if task.prior is not None and task.prior.ahead_tokens:
                rest_tokens = min(moved_tokens, task.request.prompt_tokens - task.prior.ahead_tokens)
            at_ms = max(at_ms, self._links.send(source, number, rest_tokens * per_token, now_ms))
        task.owner.record.stages["fetch_ms"] = at_ms - now_ms
        self._events.at(at_ms, self._loaded, self.engines[number], task)

    def _loaded(self, engine: Engine, task: Task) -> None:
        if task.lent:
            self.engines[task.fetch_from].store.unpin(task.lent)
            self.engines[task.fetch_from].wake()
            task.lent = []
        engine.loaded(task)
        self._release_source(task)

    def _release_source(self, task: Task) -> None:
        if task.prior is not None:
            self.engines[task.source].release(task.prior)
            task.prior = None

    def _first_token(self, number: int, task: Task) -> None:
        engine = self.engines[number]
        call, (_, attempt) = task.owner, task.key
        record = call.record
        if task.stage != "decode":
            way = "remote" if self._links.are_apart(number, task.fetch_from) else "peer"
            found = {"engine": task.tokens_local, "dram": task.tokens_dram, way: task.tokens_moved}
            record.sources = {name: count for name, count in found.items() if count}
            record.sources["computed"] = task.tokens_computed
            record.stages["queue_ms"] = task.admitted_at_ms - task.queued_at_ms
        else:
            self._release_source(task)
        if task.stage == "prefill":
            if task.request.output_tokens == 1:
                engine.release(task)
            self._events.after(self._spec.delays.hop_ms, self._frontend.prefilled, call, attempt)
        else:
            self._events.after(self._spec.delays.hop_ms, self._frontend.first_token, call, attempt)
        self._reports.soon(engine.number)

    def _finished(self, number: int, task: Task) -> None:
        engine = self.engines[number]
        call, (_, attempt) = task.owner, task.key
        if task.stage == "decode" and self._spec.pd_caching is PdCaching.FULL:
            self._push_back(engine, task)
        self._events.after(self._spec.delays.hop_ms, self._frontend.finished, call, attempt)
        self._reports.soon(engine.number)

    def _has(self, number: int, what: Callable[[PdCaching, Role], bool]) -> bool:
        return what(self._spec.pd_caching, self._spec.roles[number])

    def _push_back(self, engine: Engine, task: Task) -> None:
        """PD-Caching-3: what decode completed goes to where the prompt was computed."""
        blocks = task.request.output_blocks
        if not blocks or self.engines[task.source].dead:
            return
        num_bytes = len(blocks) * self._spec.block_tokens * self._prices.kv_bytes_per_token
        at_ms = self._links.send(engine.number, task.source, num_bytes, self._events.now_ms)
        self._events.at(at_ms, self._pushed, task)

    def _pushed(self, task: Task) -> None:
        engine, request, block_tokens = self.engines[task.source], task.request, self._spec.block_tokens
        whole = request.prompt_tokens // block_tokens
        if tokens_of(engine.store.match(request.blocks[:whole])) < whole * block_tokens:
            return  # what is before them was evicted: nobody could use them
        parent = request.blocks[whole - 1] if whole else ROOT
        engine.store.keep(parent, request.output_blocks, len(request.output_blocks) * block_tokens)

    # -- the rest ---------------------------------------------------------------------------------

    def _build_engines(self) -> list[Engine]:
        spec, rng = self._spec, Random(self._spec.seed)
        hooks = EngineHooks(self._find, self._load, self._first_token, self._finished, self._computed)

        def noise() -> float:
            return max(0.2, rng.gauss(1.0, spec.noise)) if spec.noise else 1.0

        engines = []
        for number in range(len(spec.roles)):
            store = BlockStore(
                spec.block_tokens,
                spec.memory_tokens,
                spec.dram_tokens,
                lambda blocks, n=number: self._stored(n, blocks),
                lambda blocks, n=number: self._tree.removed(n, blocks),
                lambda blocks, n=number: self._reach and self._reach.removed(n, blocks),
            )
            parts = EngineParts(
                number, self._events, self._prices, store, spec.limits, hooks, noise, spec.local,
                keeps=self._has(number, keeps), room_wait_ms=spec.room_wait_ms if spec.counts_room else 0.0,
            )  # fmt: skip
            engines.append(FairEngine(parts) if spec.local.policy == "cfs" else Engine(parts))
        return engines

    def _stored(self, number: int, blocks: Sequence[BlockHash]) -> None:
        if not self._has(number, keeps):
            return
        self._tree.stored(number, blocks)
        if self._reach is not None:
            self._reach.stored(number, blocks)

    def _die(self, number: int) -> None:
        self.engines[number].die()
        self._events.after(self._spec.delays.hop_ms, self._frontend.instance_down, self._names[number])
        for tree in (self._tree, self._reach):
            if tree is not None:
                self._events.after(TTL_S * 1000, tree.expire, number)

    def _on_end(self, call: Call) -> None:
        self._records[call.index] = call.record
        self._num_ended += 1
        self._stopped = self._stopped or (self._enough is not None and self._enough(call.record))
        self._num_retries += call.flow.num_retries
        self._events.after(FORGET_MS, self._forget, call)  # its aborts are on their way
        for index in self._followers.pop(call.index, ()):
            follower = self._requests[index]
            at_ms = max(follower.arrival_ms, self._events.now_ms + follower.think_ms)
            self._events.at(at_ms, self._frontend.arrive, index, follower)

    def _forget(self, call: Call) -> None:
        """Its tasks."""
        for attempt in range(1, call.flow.attempt + 1):
            for stage in ("prefill", "decode", "colocated"):
                self._tasks.pop((call.index, attempt, stage), None)

    def _now(self) -> int:
        return int(self._events.now_ms)


def simulate(spec: ClusterSpec, prices: StepPrices, requests: Sequence[SimRequest]) -> Simulated:
    """Run a workload through a cluster. Deterministic in its arguments. Memory: what is cached, plus a record each."""
    return Simulation(spec, prices, requests).run()
