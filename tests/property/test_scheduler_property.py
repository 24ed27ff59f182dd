"""The scheduler against random histories: whom it places on, and that load is given back."""

from copy import deepcopy

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.admission import SETTLE_MS
from services.scheduler.core.instances import InstanceLimits, Instances
from services.scheduler.core.limits import PlacementLimits
from services.scheduler.core.load import InstanceLoad
from services.scheduler.core.placement import Placer
from shared.wire.placement import Ended, Placed
from shared.wire.reports import Goodbye, Welcome
from tests.support.control_plane import description, hello, place, report
from tests.support.cost_view import coefficients
from tests.support.examples import examples

NAMES = ["a", "b", "c", "d"]
LIMITS = InstanceLimits()

steps = st.one_of(
    st.tuples(
        st.just("hello"), st.sampled_from(NAMES), st.integers(1, 4),
        st.sampled_from(["prefill", "decode", "colocated"]), st.sampled_from(["f1 x", "f1 y", "f2 x"]),
    ),
    st.tuples(st.just("report"), st.sampled_from(NAMES), st.integers(1, 4), st.booleans(), st.integers(0, 9)),
    st.tuples(st.just("goodbye"), st.sampled_from(NAMES), st.integers(1, 4)),
    st.tuples(st.just("fence"), st.sampled_from(NAMES), st.integers(1, 4)),
    st.tuples(st.just("wait"), st.integers(0, 900)),
    st.tuples(
        st.just("place"), st.sets(st.sampled_from(NAMES)), st.booleans(), st.integers(0, 3000),
        st.dictionaries(st.sampled_from(NAMES), st.integers(-5, 4000)), st.sampled_from(["", "s"]),
    ),
    st.tuples(st.just("end"), st.integers(0, 60)),
)  # fmt: skip
policies = st.sampled_from(["cost", "prompt_tree", "least_load", "session"])
costs = st.sampled_from([None, coefficients()])


class Model:
    """What the messages say, kept in the plainest way."""

    def __init__(self):
        self.members = {}  # name -> (epoch, role, fingerprint and instruction set, seen_ms, draining)
        self.newest = {}
        self.fences = {}
        self.begun_ms = None  # of the first Hello

    def heard(self, now_ms):
        return {
            name: m
            for name, m in self.members.items()
            if now_ms - m[3] < LIMITS.dead_after_ms and m[0] >= self.fences.get(name, 0)
        }

    def live(self, now_ms):
        return {name: m for name, m in self.heard(now_ms).items() if not m[4]}

    def others(self, name, kind, now_ms):
        """Names of those that have another model."""
        return [o for o, m in self.heard(now_ms).items() if o != name and kind[:2] != m[2][:2]]

    def is_other(self, name, kind, now_ms):
        """Another model than that of the others."""
        return bool(self.others(name, kind, now_ms))

    def takes_name(self, name, epoch, kind, now_ms):
        """An older registration, just behind the scheduler's start: the younger ones are gone."""
        others = self.others(name, kind, now_ms)
        if now_ms - self.begun_ms >= SETTLE_MS or any(self.members[o][0] <= epoch for o in others):
            return not others
        for other in others:
            del self.members[other]
        return True


def apply(step, model, placer, now_ms, seq, cost):
    instances = placer.instances
    kind, *rest = step
    if kind == "hello":
        name, epoch, role, made = rest
        fingerprint, isa = made.split()
        told = hello(name, epoch, role, description=description("demo", fingerprint, isa=isa), cost=cost)
        answer = instances.hello(told, now_ms=now_ms)
        is_good = epoch >= model.newest.get(name, 0)
        if is_good:
            model.begun_ms = now_ms if model.begun_ms is None else model.begun_ms
            is_good = model.takes_name(name, epoch, made, now_ms)
        assert isinstance(answer, Welcome) == is_good
        if is_good:
            model.newest[name] = epoch
            model.members[name] = (epoch, role, made, now_ms, False)
    elif kind == "report":
        name, epoch, draining, busy = rest
        load = {"num_running": busy, "queued_prefill_ms": 40.0 * busy}
        instances.report(report(name, epoch, seq, draining=draining, **load), now_ms=now_ms)
        member = model.members.get(name)
        if member and member[0] == epoch:
            if name not in model.heard(now_ms) and model.is_other(name, member[2], now_ms):
                del model.members[name]
            else:
                model.members[name] = (*member[:3], now_ms, draining)
    elif kind == "goodbye":
        name, epoch = rest
        instances.goodbye(Goodbye(instance=name, epoch=epoch))
        if name in model.members and model.members[name][0] == epoch:
            del model.members[name]
    elif kind == "fence":
        instances.fence(*rest)
        model.fences[rest[0]] = max(rest[1], model.fences.get(rest[0], 0))


def check_placed(placed, request, model, now_ms):
    live = model.live(now_ms)
    targets = [placed.decode, *([placed.prefill] if placed.prefill else [])]
    for target in targets:
        assert target.instance in live, "placed on a dead, draining, departed or fenced instance"
        assert target.epoch == live[target.instance][0], "placed under a stale epoch"
        if set(live) - set(request.exclude):
            assert target.instance not in request.exclude, "an excluded one while another lives"
    if placed.kind == "disaggregated":
        assert not request.must_colocate
        assert [live[t.instance][1] for t in targets] == ["decode", "prefill"]
        assert len({live[t.instance][2] for t in targets}) == 1, "raw KV of unequal engines"
    assert len({m[2][:2] for m in live.values()}) == 1, "two models of one name"


@given(st.lists(steps, max_size=60), policies, costs)
def test_only_live_newest_compatible_and_not_excluded_instances_are_chosen(history, policy, cost):
    placer = Placer(Instances(LIMITS), policy, "boot", PlacementLimits(overload_factor=3.0))
    model, now_ms, num_placed, handoffs = Model(), 0, 0, set()
    for seq, step in enumerate(history):
        if step[0] == "wait":
            now_ms += step[1]
            placer.instances.tick(now_ms=now_ms)
        elif step[0] == "place":
            _, exclude, colocate, tokens, hits, session = step
            num_placed += 1
            request = place(
                f"r{num_placed}", tokens=tokens, hits=hits, session=session,
                exclude=sorted(exclude), must_colocate=colocate,
            )  # fmt: skip
            answer = placer.place(request, now_ms=now_ms)
            if isinstance(answer, Placed):
                check_placed(answer, request, model, now_ms)
                if answer.handoff_id:
                    assert answer.handoff_id not in handoffs
                    handoffs.add(answer.handoff_id)
            else:
                assert answer.code == "overloaded" or not model.live(now_ms)
        elif step[0] == "end":
            placer.ended(Ended(request_id=f"r{step[1]}", attempt=1))
        else:
            apply(step, model, placer, now_ms, seq, cost)


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 200)), max_size=40), policies)
def test_load_returns_to_zero_after_every_attempt_has_ended(requests, policy):
    placer = Placer(Instances(LIMITS), policy, "boot", PlacementLimits(overload_factor=1e9))
    for name, role in (("a", "prefill"), ("b", "prefill"), ("c", "decode"), ("d", "colocated")):
        placer.instances.hello(hello(name, role=role), now_ms=0)
    now_ms = 0
    for i, (tokens, step_ms) in enumerate(requests):
        now_ms += step_ms
        for seq, name in enumerate(NAMES):
            placer.instances.report(report(name, seq=i * 4 + seq), now_ms=now_ms)
        answer = placer.place(place(f"r{i}", tokens=tokens, must_colocate=i % 3 == 0), now_ms=now_ms)
        assert isinstance(answer, Placed)
        busy = sum(known.view(now_ms=now_ms).num_requests for known in placer.instances)
        assert busy >= 1
    for i in range(len(requests)):
        placer.ended(Ended(request_id=f"r{i}", attempt=1))
    for known in placer.instances:
        view = known.view(now_ms=now_ms)
        assert (known.load.num_open, view.num_requests, view.prefill_tokens, view.context_tokens) == (
            0,
            0,
            0,
            0,
        )
    assert placer.num_open == 0


@settings(max_examples=examples(40))
@given(st.integers(1, 6), st.integers(1, 60), policies)
def test_a_burst_without_hits_is_spread_evenly(num_instances, num_requests, policy):
    placer = Placer(Instances(LIMITS), policy, "boot", PlacementLimits(overload_factor=1e9))
    for i in range(num_instances):
        placer.instances.hello(hello(f"c{i}", role="colocated"), now_ms=0)
    counts = {}
    for i in range(num_requests):
        name = placer.place(place(f"r{i}", tokens=64), now_ms=0).decode.instance
        counts[name] = counts.get(name, 0) + 1
    assert max(counts.values()) - min(counts.get(f"c{i}", 0) for i in range(num_instances)) <= 1


EVENTS = ("hello", "next epoch", "report", "draining", "goodbye", "fence", "tick", "")


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from("ab"), st.integers(0, 900)), max_size=40))
def test_who_is_remembered_as_live_is_live(events):
    instances, seqs = Instances(InstanceLimits(forget_after_ms=3_000)), {}
    now_ms, epoch = 0, 1
    for event, name, wait_ms in events:
        now_ms += wait_ms
        if event in ("hello", "next epoch"):
            epoch += event == "next epoch"
            made = description(model=f"model-{name}")
            instances.hello(hello(name, epoch=epoch, description=made), now_ms=now_ms)
        elif event in ("report", "draining"):
            seqs[name] = seqs.get(name, -1) + 1
            said = report(name, epoch=epoch, seq=seqs[name], draining=event == "draining")
            instances.report(said, now_ms=now_ms)
        elif event == "goodbye":
            instances.goodbye(Goodbye(instance=name, epoch=epoch))
        elif event == "fence":
            instances.fence(name, epoch + 1)
        elif event == "tick":
            instances.tick(now_ms=now_ms)
        live = [known.instance for known in instances if instances.is_live(known, now_ms=now_ms)]
        assert [known.instance for known in instances.live(now_ms=now_ms)] == live
        for each in "ab":
            of_model = [known.instance for known in instances.live(f"model-{each}", now_ms=now_ms)]
            assert of_model == [instance for instance in live if instance == each]
        assert not instances.live("unknown", now_ms=now_ms)


LOADS = ("direct", "decodes", "handoff", "end", "report", "arrived", "")


@given(st.lists(st.tuples(st.sampled_from(LOADS), st.integers(0, 3), st.integers(0, 12)), max_size=40))
def test_a_view_that_only_drained_is_the_view(events):
    """What is kept of the last view is what looking at everything again gives."""
    load = InstanceLoad(8, 1_024, arrive_ms=60, forget_ms=150)
    now_ms = 0
    for what, number, steps in events:
        now_ms += 5 * steps
        key = (f"r{number}", 0)
        if what in ("direct", "decodes"):
            load.add_direct(
                key,
                prefill_tokens=10,
                context_tokens=20,
                now_ms=now_ms,
                prefill_ms=7.5,
                decodes=what == "decodes",
            )
        elif what == "handoff":
            load.add_handoff(key, context_tokens=30, now_ms=now_ms)
        elif what == "end":
            load.end(key)
        elif what == "report":
            load.on_report(report("p0", num_running=number, queued_prefill_ms=9.0 * number), now_ms=now_ms)
        elif what == "arrived":
            seq = (load.report.seq if load.report else 0) + 1 + (steps == 7)  # now and then a report was lost
            load.on_report(report("p0", seq=seq, num_running=number, arrived=[key]), now_ms=now_ms)
        anew = deepcopy(load)
        anew._drained = None
        assert load.view(now_ms=now_ms) == anew.view(now_ms=now_ms)
