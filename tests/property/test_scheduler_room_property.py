"""Decode instances of small memory against random histories: nobody starves, nothing is handed over beyond the room of
one instance while another has it, and who waits keeps the order of arrival. Requests have choices, which workers count
each; now and then another scheduler begins, which knows nothing of what runs."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.scheduler.core.instances import Instances
from services.scheduler.core.limits import PlacementLimits
from services.scheduler.core.placement import Placer
from services.scheduler.core.predict import CostSettings
from services.scheduler.core.room import SLACK_SHARE
from shared.wire.placement import Ended, Held, Placed
from shared.wire.reports import Room
from tests.support.control_plane import hello, place, report
from tests.support.cost_view import coefficients
from tests.support.examples import examples

BLOCK, NUM_BLOCKS, WAIT_MS, TICK_MS = 32, 60, 2_000, 100
ARRIVE_MS = 9_000  # from a placement to its arrival at most: a scheduler believes in 10 s
NAMES = ["d0", "d1", "d2"]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("place"), st.integers(100, 1_500), st.integers(1, 800), st.sampled_from([1, 1, 4])),
        st.tuples(st.just("arrive"), st.sampled_from(NAMES)),
        st.tuples(st.just("end"), st.integers(0, 30)),
        st.tuples(st.just("wait"), st.integers(1, 20)),
        st.tuples(st.just("another scheduler")),
    ),
    max_size=60,
)


class World:
    """Workers whose reports are the plain truth: what has arrived takes all of its pages from then on.

    What is on its way does, within ARRIVE_MS.
    """

    def __init__(self, policy, cost, says_arrived):
        self.policy, self.cost, self.says_arrived = policy, cost, says_arrived
        self.now_ms = self.seq = 0
        self.requests = {}
        self.placed_at_ms: dict[str, int] = {}
        self.asked: dict[str, int] = {}  # waiting: since when
        self.on_way: dict[str, list[tuple[str, int]]] = {name: [] for name in NAMES}
        self.arrived: dict[str, list[tuple[str, int]]] = {name: [] for name in NAMES}
        self.unsaid: dict[str, list[tuple[str, int]]] = {name: [] for name in NAMES}  # that they have arrived
        self.needs: dict[str, int] = {}
        self.begin()

    def begin(self):
        """A scheduler that knows nothing; what was on its way is there by the time it places."""
        self.placer = Placer(
            Instances(), self.policy, "boot", PlacementLimits(room_wait_ms=WAIT_MS, overload_factor=1e9),
            CostSettings(disaggregation="always"),
        )  # fmt: skip
        for name in ["p0", *NAMES]:
            role = "prefill" if name == "p0" else "decode"
            self.placer.instances.hello(hello(name, role=role, cost=self.cost), now_ms=self.now_ms)
        for name in NAMES:
            while self.on_way[name]:
                self.arrive(name)
        self.report()
        waiting, self.asked = list(self.asked), {}
        for name in waiting:
            self.ask(name)

    def arrive(self, name):
        one = self.on_way[name].pop(0)
        self.arrived[name].append(one)
        self.unsaid[name].append((one[0], 1))

    def ask(self, name):
        self.asked[name] = self.now_ms
        answer = self.placer.place(self.requests[name], now_ms=self.now_ms)
        if not isinstance(answer, Held):
            assert len(self.asked) == 1, "nobody overtakes who waits"
            self.placed(answer)

    def room(self, name):
        return NUM_BLOCKS - sum(need for _, need in self.on_way[name] + self.arrived[name])

    def report(self):
        self.seq += 1
        self.placer.instances.report(report("p0", seq=self.seq), now_ms=self.now_ms)
        for name in NAMES:
            free = NUM_BLOCKS - sum(need for _, need in self.arrived[name])
            told = report(
                name, seq=self.seq,
                num_running=sum(self.requests[request].num_choices for request, _ in self.arrived[name]),
                room=Room(NUM_BLOCKS, max(0, free), max(0, -free)),
                arrived=self.unsaid[name] if self.says_arrived else None,
            )  # fmt: skip
            self.unsaid[name] = []
            self.placer.instances.report(told, now_ms=self.now_ms)
        self.serve()

    def serve(self):
        answers = self.placer.serve_held(now_ms=self.now_ms)
        order = [int(answer.request_id) for answer in answers]
        assert order == sorted(order), "in order of arrival"
        for answer in answers:
            self.placed(answer)

    def placed(self, answer):
        assert isinstance(answer, Placed)
        assert answer.kind == "disaggregated"
        name, need = answer.decode.instance, self.needs[answer.request_id]
        since_ms = self.asked.pop(answer.request_id)
        assert self.now_ms - since_ms <= WAIT_MS + TICK_MS, "bounded, whatever happens"
        if self.room(name) < need:
            others = [other for other in NAMES if self.room(other) >= need]
            assert not others, "another had room"
            had_slack = self.room(name) + int(SLACK_SHARE * NUM_BLOCKS) >= need
            assert had_slack or self.now_ms - since_ms >= WAIT_MS, "not before its time"
        self.placed_at_ms[answer.request_id] = self.now_ms
        self.on_way[name].append((answer.request_id, need))

    def tick(self):
        self.now_ms += TICK_MS
        for name in NAMES:
            while self.on_way[name] and self.now_ms >= self.placed_at_ms[self.on_way[name][0][0]] + ARRIVE_MS:
                self.arrive(name)
        self.report()


@settings(max_examples=examples(150))
@example(
    [
        ("place", 257, 800, 1), ("another scheduler",), ("place", 100, 1, 1), ("place", 100, 1, 1),
        ("place", 100, 1, 1), ("place", 100, 605, 1),
    ],
    "cost", True,
)  # fmt: skip
@given(steps, st.sampled_from(["cost", "prompt_tree", "least_load"]), st.booleans())
def test_nobody_starves_and_nothing_goes_where_there_is_no_room_while_there_is_elsewhere(
    told, policy, says_arrived
):
    """Workers that do not say what has arrived: one choice each and one scheduler, or nobody could know."""
    world = World(policy, coefficients(), says_arrived)
    number = 0
    for kind, *rest in told:
        if kind == "place":
            number += 1
            tokens, most, choices = rest
            name, choices = str(number), choices if says_arrived else 1
            world.needs[name] = min(-(-(tokens + most * choices) // BLOCK), int(0.75 * NUM_BLOCKS))
            world.requests[name] = place(name, tokens=tokens, max_tokens=most, num_choices=choices)
            world.ask(name)
        elif kind == "another scheduler" and says_arrived:
            world.begin()
        elif kind == "arrive" and world.on_way[rest[0]]:
            world.arrive(rest[0])
            world.report()
        elif kind == "end":
            running = [(name, one) for name in NAMES for one in world.arrived[name]]
            if running:
                name, one = running[rest[0] % len(running)]
                world.arrived[name].remove(one)
                world.placer.ended(Ended(request_id=one[0], attempt=1))
                world.report()
        elif kind == "wait":
            for _ in range(rest[0]):
                world.tick()
    for _ in range(WAIT_MS // TICK_MS + 1):
        world.tick()
    assert not world.asked, "everybody is placed, though nobody ever left"
    assert len(world.placer.waiting) == 0
