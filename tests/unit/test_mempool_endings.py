"""A space whose processes are gone, with nothing in it, makes room in a full mempool; what somebody may need stays."""

import pytest
from msgspec.structs import replace

from services.mempool.core.actions import CreateMemory, EndSpace, Send
from services.mempool.core.lifetimes import LENDER_IDLE_MS
from services.mempool.core.pools import LAST_NUMBER
from shared.errors import PeerProtocolError
from shared.ids import InstanceId, SpaceId
from shared.kv.layout import LENDER, TENSORS
from shared.lending.rules import DEFAULT_RULES
from shared.wire import mempool as wire
from shared.wire import mempool_api as api_wire
from shared.wire.mempool_callers import AttachCaller
from tests.unit.mempool_harness import BOOT, DESCRIPTION, PAGE_BYTES, chain, page_lists
from tests.unit.test_mempool_lender_gone import LenderMarket
from tests.unit.test_mempool_lending import ABCD
from tests.unit.test_mempool_spaces import FRONT, PREFILL, Spaces, answers

AB = chain("a", "b")
IDLE_MS = 1_000


class Rig(Spaces):
    """Knows which spaces have ended. Of each worker the engine's process is its connection's number."""

    def __init__(self, num_pages: int = 8, **limits: object) -> None:
        super().__init__(num_pages, **({"space_idle_ms": IDLE_MS} | limits))
        self.ended: list[int] = []
        self.numbers: list[int] = []
        self.next = 1_000

    def run(self, actions: list) -> None:
        for action in actions:
            if isinstance(action, EndSpace):
                self.ended.append(action.space)
            elif isinstance(action, CreateMemory):
                assert action.space not in self.numbers, "no number is another space's"
                self.numbers.append(action.space)
            else:
                is_told = isinstance(action, Send) and not action.with_memory  # a refusal is of no space
                assert is_told or getattr(action, "space", -1) not in self.ended, action
        super().run(actions)

    def come(self, name: str, backend: str = LENDER, connection: int = 0, quota: int = 0) -> int:
        """A process of this name, on memory of its own; its connection."""
        self.next += 1_000
        connection = connection or self.next
        own = replace(DESCRIPTION, backend=backend, fingerprint=f"aqua {name}")
        self.worker(connection, f"cpu:{name}", quota=quota, instance=name, description=own)
        return connection

    def go(self, connection: int) -> None:
        for each in (connection, 100 + connection):
            self.closed(each)
        self.dead(connection)

    def answered(self) -> None:
        """The system does what it was asked for."""
        while self.memory:
            asked = self.memory.popleft()
            if type(asked).__name__ == "ReleaseUnits":
                self.run(self.core.on_released(asked.space, asked.units, self.now_ms))
            else:
                self.run(self.core.on_restored(asked.space, asked.units, len(asked.units), self.now_ms))

    def refused(self, connection: int) -> str:
        return self.disconnected.get(connection, "") or self.disconnected.get(100 + connection, "")

    def has(self, name: str) -> bool:
        return self.core.space_number(InstanceId(name)) is not None

    def space(self, name: str) -> int:
        number = self.core.space_number(InstanceId(name))
        assert number is not None
        return number


@pytest.fixture
def rig() -> Rig:
    """Two spaces are there, of which the first is an engine's that lives; three may be."""
    made = Rig(max_spaces=3)
    made.worker(PREFILL, "cpu:0")
    return made


# -- who makes room -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [LENDER, TENSORS])
@pytest.mark.parametrize("waits", [False, True])
def test_seventy_names_one_after_the_other_find_a_space_each(backend, waits):
    rig = Rig(max_spaces=4, dram_bytes=4 * PAGE_BYTES, dram_for_host=True)
    rig.worker(PREFILL, "cpu:0")
    for i in range(70):
        connection = rig.come(f"name-{i}", backend)
        assert not rig.refused(connection), i
        assert rig.has(f"name-{i}")
        rig.go(connection)
        if waits:
            rig.advance(max(IDLE_MS, LENDER_IDLE_MS))
            rig.answered()
        rig.counts()
    assert rig.core.pools.num_spaces <= 4
    assert not rig.core.counters["attaches_refused"]
    assert rig.core.status().counters["spaces_ended"] == len(rig.ended) >= 67
    assert "dram_refused" not in rig.core.status().counters, "host memory found room, too"


def test_a_name_whose_space_has_ended_is_taken_as_a_new_one(rig):
    first = rig.come("a")
    was = rig.space("a")
    rig.go(first)
    for name in ("b", "c"):
        rig.go(rig.come(name))
    assert rig.ended == [was]
    assert not rig.has("a")
    again = rig.come("a")
    assert not rig.refused(again)
    assert rig.space("a") != was
    assert rig.core.pools[rig.space("a")].memory_id != BOOT + was


def test_a_name_that_comes_back_while_there_is_room_has_its_space_again(rig):
    rig.go(rig.come("a"))
    was = rig.space("a")
    rig.come("a")
    assert (rig.space("a"), rig.ended) == (was, [])


def test_the_longest_deserted_goes_first_and_one_without_memory_before_one_that_has_some():
    rig = Rig(max_spaces=4)
    rig.worker(PREFILL, "cpu:0")
    for name, backend in (("old", TENSORS), ("new", TENSORS), ("lender", LENDER)):
        rig.now_ms += 10
        rig.go(rig.come(name, backend))
    old, new, lender = rig.space("old"), rig.space("new"), rig.space("lender")
    rig.come("x")
    assert rig.ended == [old]
    rig.now_ms += 1
    for pool in rig.core.pools.values():  # the lender's second is over, the others' is not
        pool._active_at_ms = rig.now_ms if pool.number == new else pool._active_at_ms
    rig.advance(LENDER_IDLE_MS - 1)
    rig.answered()
    rig.come("y")
    assert rig.ended == [old, lender]


def test_the_first_space_may_end_but_one_is_always_there():
    rig = Rig(max_spaces=2)
    rig.go(rig.come("a"))
    rig.client(FRONT, "nobody-yet")
    rig.closed(FRONT)
    rig.come("b")
    rig.come("c")
    assert rig.ended == [0]
    rig.client(FRONT, "nobody-yet")
    rig.say(FRONT, wire.StatusCall(call_id=1))
    assert answers(rig, FRONT, wire.PoolStatus)
    with pytest.raises(PeerProtocolError, match="before Attach"):
        rig.core.on_message(77, wire.StatusCall(call_id=2), rig.now_ms)
    alone = Rig(max_spaces=1)
    alone.go(alone.come("a"))
    assert alone.refused(alone.come("b")) == "spaces.full"
    assert not alone.ended


def test_whoever_is_refused_anyhow_ends_no_space(rig):
    rig.go(rig.come("a"))
    rig.come("b")
    rig.next += 1_000
    twin = wire.Attach(
        kind="engine", instance=InstanceId("b"), device="cpu:elsewhere",
        description=replace(DESCRIPTION, fingerprint="another"),
    )  # fmt: skip
    rig.run(rig.core.on_attach(rig.next, rig.next, twin, rig.now_ms))
    assert rig.refused(rig.next) in ("instance.taken", "layout.mismatch")
    huge = replace(twin, instance=InstanceId("c"), description=replace(DESCRIPTION, block_bytes=1 << 40))
    rig.run(rig.core.on_attach(rig.next + 1, rig.next + 1, huge, rig.now_ms))
    assert rig.refused(rig.next + 1)
    assert not rig.ended


def test_no_number_is_used_twice_and_without_one_whoever_comes_is_refused(rig):
    rig.go(rig.come("a"))
    rig.core.pools._highest = LAST_NUMBER - 1
    rig.come("b")
    assert rig.space("b") == LAST_NUMBER
    late = rig.come("c")
    assert rig.refused(late) == "spaces.full"
    refusals = [m for m in rig.sent[100 + late] if isinstance(m, wire.AttachRefused)]
    assert "start it again" in refusals[0].reason
    assert not rig.ended


# -- what stays ---------------------------------------------------------------------------------------


def stays(rig: Rig, name: str = "kept") -> bool:
    """Whether a newcomer is refused rather than that the space ends."""
    assert rig.core.pools.is_full
    late = rig.come("late", TENSORS)
    is_refused = rig.refused(late) == "spaces.full"
    assert is_refused != bool(rig.ended)
    assert not is_refused or rig.has(name)
    return is_refused


def engine(rig: Rig) -> int:
    """In the last space that there may be."""
    connection = rig.come("kept", "none", quota=4)
    rig.come("other")
    return connection


def test_a_space_of_a_living_process_stays(rig):
    connection = engine(rig)
    assert stays(rig)
    for each in (connection, 100 + connection):
        rig.closed(each)
    assert stays(rig), "its process may live"
    rig.dead(connection)
    assert not stays(rig)


def test_cached_blocks_of_an_engine_that_may_come_back_stay_until_their_time_is_over(rig):
    connection = engine(rig)
    pages = rig.save(connection, AB)
    rig.say(connection, wire.Unpin(**page_lists(pages)))
    rig.go(connection)
    assert stays(rig)
    rig.advance(IDLE_MS)
    assert not stays(rig)
    (number,) = rig.ended
    assert number in {asked.space for asked in rig.memory}, "its memory is on its way to the system"
    rig.answered()


@pytest.mark.parametrize("how", ["lease", "handoff", "waiter", "client"])
def test_a_space_that_a_front_waits_for_or_reads_stays(rig, how):
    connection = engine(rig)
    rig.client(FRONT, "kept")
    if how == "handoff":
        rig.save(connection, AB)
        rig.ready(connection, "h", AB, ttl_ms=500)
    elif how == "lease":
        rig.save(connection, AB)
        rig.acquire(FRONT, AB, ttl_ms=500)
    elif how == "waiter":
        rig.acquire(FRONT, AB, handoff="h", wait_ms=500)
    rig.go(connection)
    assert stays(rig)
    rig.closed(FRONT)
    for _ in range(3):
        rig.advance(IDLE_MS)
        rig.answered()
    assert not stays(rig)


def test_a_client_that_has_said_nothing_since_its_engine_came_keeps_its_space(rig):
    rig.client(FRONT, "kept")
    rig.go(engine(rig))
    assert stays(rig)
    rig.closed(FRONT)
    assert not stays(rig)


def test_pages_that_a_caller_holds_keep_the_space_and_so_does_its_mapping(rig):
    connection = engine(rig)
    rig.replies = []
    rig.core.api.connect(50, api_wire.ApiHello(instance=InstanceId("kept")), None)
    call = api_wire.AllocMem(call_id=1, num_blocks=2, instance=InstanceId("kept"), mem_type="hbm")
    rig.core.api.on_call(50, call, rig.now_ms)
    rig.run(rig.core.after_api(rig.now_ms))
    rig.go(connection)
    assert stays(rig)
    message = AttachCaller(
        instance=InstanceId("caller"), pages_of=InstanceId("kept"), space=SpaceId(rig.space("kept")), reads_only=True
    )  # fmt: skip
    rig.run(rig.core.on_attach_caller(60, 999, message, rig.now_ms))
    assert rig.core.callers.has(60)
    rig.core.api.on_closed(50)
    rig.run(rig.core.after_api(rig.now_ms))
    assert stays(rig)
    rig.say(60, wire.Detach())
    rig.closed(60)
    assert not stays(rig)
    assert InstanceId("kept") not in rig.core.api.api.homes


def test_a_space_that_the_shell_cannot_let_go_of_stays(rig):
    connection = engine(rig)
    number = rig.space("kept")
    rig.core.endings.is_kept = lambda each: each == number
    rig.go(connection)
    assert stays(rig)
    rig.core.endings.is_kept = lambda _: False
    assert not stays(rig)


def test_host_memory_goes_behind_its_spaces_and_keeps_the_last_of_them_while_blocks_are_there():
    rig = Rig(max_spaces=3, dram_bytes=4 * PAGE_BYTES, dram_for_host=True)
    rig.worker(PREFILL, "cpu")  # no host memory is behind common host memory
    connection = rig.come("kept", "none", quota=8)
    behind = rig.core.dram.tiers[rig.space("kept")].slow.space
    pages = rig.save(connection, AB)
    rig.say(connection, wire.Unpin(**page_lists(pages)))
    rig.core.dram.drain(rig.space("kept"), 2, rig.now_ms)
    rig.run(rig.core.after_api(rig.now_ms))
    rig.copied()
    assert len(rig.core.pools[int(behind)].index) == 2
    rig.go(connection)
    assert stays(rig), "an engine that comes back has them"
    rig.advance(IDLE_MS)
    rig.answered()
    front = rig.space("kept")
    assert stays(rig), "they lie in host memory alone by now"
    rig.advance(1)
    rig.answered()
    late = rig.come("late", LENDER)
    assert not rig.refused(late)
    assert rig.ended == [front]
    assert not rig.refused(rig.come("later", LENDER))
    assert rig.ended == [front, int(behind)]
    assert rig.core.status().counters["dram_blocks_out"] == 2, "what ended spaces have counted stays counted"


# -- loans --------------------------------------------------------------------------------------------


class EndingMarket(LenderMarket):
    ended: tuple[int, ...] = ()

    def run(self, actions: list) -> None:
        self.ended = (*self.ended, *(each.space for each in actions if isinstance(each, EndSpace)))
        super().run(actions)


def test_a_lender_stays_while_something_of_it_is_lent_and_its_loans_pages_end_with_it():
    rig = EndingMarket(max_spaces=3)
    rig.lend(4)
    rig.leave(ABCD, "abcd")
    rig.copied()
    rig.core.open_desk(DEFAULT_RULES, {}, InstanceId("m"), 100)
    (shelf,) = rig.core.lending.loans.shelves.values()
    own = replace(DESCRIPTION, backend=LENDER, fingerprint="late")
    rig.die()
    late = [9_000]

    def comes() -> bool:
        late[0] += 1_000
        rig.worker(late[0], "cpu:late", quota=0, instance="late", description=own)
        return 100 + late[0] not in rig.disconnected

    assert not comes(), "blocks leave for host memory still"
    rig.copied()
    assert not rig.core.lending.loans.loans
    assert (moved := rig.core.lending.num_moved(shelf.consumer)) == 8
    assert comes()
    assert rig.ended == (rig.producer,)
    assert shelf.number not in rig.core.pools
    assert not rig.core.lending.shelves
    assert not rig.core.lending.loans.shelves
    assert shelf.number not in rig.core.dram.tiers
    assert rig.core.lending.num_moved(shelf.consumer) == moved, "what was moved stays counted"
    assert rig.read(ABCD) == "abcd"
    rig.core.decide_market(rig.now_ms)
    assert set(rig.core.audience.now(rig.now_ms)) == {
        n for n, p in rig.core.pools.items() if p.memory is not None
    }
