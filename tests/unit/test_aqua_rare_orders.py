"""AQUA's library where something fails, answers late or comes from two sides: memory goes where it belongs."""

import asyncio
import threading
import time

import pytest
import torch

from shared.aqua.borrower import Borrower
from shared.aqua.consumer import Aqua
from shared.aqua.errors import AquaClosed, TensorLost
from shared.aqua.lender import Lender, LenderSettings
from shared.aqua.lends_when_idle import LendsWhenIdle
from shared.aqua.pages import Pages, Placed
from shared.aqua.tensor import AquaTensor
from shared.errors import CopyFailed, PeerGone, PeerTimeout
from shared.ids import Epoch, InstanceId, LeaseId, SpaceId
from shared.lending.rules import LendingRules
from shared.vmm.errors import BadMapping
from shared.wire.lending import Grant, Token
from shared.wire.mempool import CallFailed
from shared.wire.mempool_api import Evacuated
from shared.wire.mempool_lending import LendingDone
from tests.support.aqua_parts import PAGE_BYTES, SETTINGS, Parts

LIMIT_S = 60

# -- lending by load ------------------------------------------------------------------------------------


class SlowLender:
    """Whose mempool does not answer the first two take-backs; each takes a minute of the clock."""

    def __init__(self):
        self.now_ms, self.calls, self.done = 0, [], threading.Event()

    def lend(self, num_bytes):
        self.calls.append("lend")
        return num_bytes

    def budget_bytes_per_s(self):
        return 0

    def still_offered_bytes(self):
        return None

    offered_bytes = 0

    def reclaim(self, deadline_ms, keep_bytes=0):
        self.calls.append("reclaim")
        if self.calls.count("reclaim") < 3:
            self.now_ms += 60_000
            raise PeerTimeout("no answer within 60.0 s")
        self.done.set()
        return 0.5


def test_a_take_back_that_was_not_answered_is_repeated_while_the_queue_stays_long():
    lender = SlowLender()
    rules = LendingRules(
        threshold_bytes=0, reserve_share=0.0, steady_ms=0, hold_ms=600_000, queue_limit=4, silent_ms=3_600_000
    )
    idle = LendsWhenIdle(lender, 1_000, rules, clock_ms=lambda: lender.now_ms)
    end_s = time.monotonic() + LIMIT_S
    while not lender.calls:
        lender.now_ms += 500
        idle.report(0, 0)
        time.sleep(0.01)
    while not lender.done.is_set() and time.monotonic() < end_s:
        lender.now_ms += 500
        idle.report(20, 20)  # it grew once, and does not go down
        lender.done.wait(0.01)
    idle.close()
    assert lender.calls == ["lend", "reclaim", "reclaim", "reclaim"]
    assert idle.lent_bytes == 0
    assert [seconds for _, seconds in idle.reclaims] == [0.5]


# -- tensors --------------------------------------------------------------------------------------------


class Moves:
    """The calls of Aqua that AquaTensor.compute() makes. `error`: of offloading."""

    def __init__(self, error=None):
        self.error, self.calls = error, []

    def fetch(self, _):
        self.calls.append("fetch")

    def view(self, _, shape, dtype, owner):
        return torch.zeros(shape, dtype=dtype)

    def store(self, _, *, changed):
        self.calls.append(("store", changed))
        if self.error is not None:
            raise self.error

    def drop_later(self, _):
        pass


@pytest.mark.parametrize(
    "error", [None, PeerGone("no mempool"), RuntimeError("device-side assert")], ids=repr
)
def test_a_tensor_is_offloaded_behind_a_block_that_raises_and_its_error_is_heard(error):
    moves = Moves(error)
    tensor = AquaTensor(moves, object(), torch.Size([4]), torch.float32)
    with pytest.raises(KeyError, match="of the block") as raised, tensor.compute(changed=False):
        raise KeyError("of the block")
    assert moves.calls == ["fetch", ("store", False)]
    notes = getattr(raised.value, "__notes__", [])
    assert [str(error) in note for note in notes] == ([] if error is None else [True])


# -- a consumer's loans ---------------------------------------------------------------------------------


def grant(lease_id, num_bytes):
    return Grant(
        lease_id=LeaseId(lease_id), offer_id="o", consumer=InstanceId("i"), purpose="swap", mempool=InstanceId("m"),
        address="", boot_generation=Epoch(1), space=SpaceId(0), length_bytes=num_bytes, token=Token(1, 1),
        present_ms=1_000, ttl_ms=1_000, consumer_ttl_ms=900,
    )  # fmt: skip


class Market:
    """Grants whatever is asked for."""

    def __init__(self):
        self.granted, self.refused = [], []

    async def market(self):
        offer = type("Offer", (), {"mempool": "m", "space": SpaceId(0), "producer": InstanceId("p")})
        view = type("View", (), {"offer": offer, "state": "open", "limit_bytes": 1_000, "leased_bytes": 0})
        mempool = type("Mempool", (), {"mempool": "m", "boot_generation": 1})
        return type("Market", (), {"mempools": [mempool], "offers": [view]})

    async def lease(self, ask):
        self.granted.append(grant(f"l{len(self.granted)}", ask.length_bytes))
        return self.granted[-1]

    async def release(self, grant):
        self.refused.append(grant.lease_id)


class Pool:
    """Answers what is presented with what is next in `answers`."""

    boot_generation = 1

    def __init__(self, *answers):
        self.answers, self.presented, self.released = list(answers), [], []

    async def present(self, what):
        self.presented.append(what.lease_id)
        return self.answers.pop(0)

    async def release_loan(self, lease_id):
        self.released.append(lease_id)


def borrower(pool, market):
    return Borrower(
        InstanceId("i"), pool, market, lambda _: None, wanted_bytes=100, min_bytes=1, ttl_ms=1_000, every_ms=1
    )


async def test_a_grant_whose_answer_was_lost_is_presented_again_and_nothing_else_asked_for():
    pool, market = Pool(None, None, LendingDone(call_id=1, num_bytes=100)), Market()
    made = borrower(pool, market)
    for _ in range(3):
        await made._ask()
    assert pool.presented == ["l0", "l0", "l0"]
    assert len(market.granted) == 1, "more than was wanted would be out, until its time"
    assert made.held_bytes == 100
    await made.give_back()
    assert pool.released == ["l0"]


async def test_a_grant_that_may_be_in_force_is_given_back_at_the_end_and_a_refused_one_forgotten():
    pool, market = Pool(None, CallFailed(call_id=1, code="lease.ended", reason=""), None), Market()
    made = borrower(pool, market)
    for _ in range(2):
        await made._ask()
    await asyncio.sleep(2 * made._every_s)  # its space is let be for so long
    await made._ask()
    assert pool.presented == ["l0", "l0", "l1"]
    assert market.refused == ["l0"]
    await made.give_back()
    assert pool.released == ["l1"]
    await made.give_back()
    assert pool.released == ["l1"]


# -- a consumer's process -------------------------------------------------------------------------------


@pytest.fixture
def parts(monkeypatch):
    return Parts(monkeypatch)


def test_an_aqua_that_cannot_connect_closes_all_that_it_had_opened(parts):
    parts.connects = False
    with pytest.raises(PeerGone):
        Aqua(SETTINGS)
    assert not parts.open


def test_step_moves_the_others_when_one_tensor_is_lost_meanwhile(parts):
    with Aqua(SETTINGS) as aqua:
        aqua._borrower = type("Borrower", (), {"give_back": lambda _: asyncio.sleep(0)})()
        torn = Pages([parts.address(), parts.address()], [parts.address(), parts.address()])
        whole = Pages(None, [parts.address()])
        for away in (torn, whole):
            aqua._directory.add(away)
        placed = [Placed(0, 2, torn), Placed(2, 1, whole)]
        aqua._tensors = dict.fromkeys(placed)  # in this order
        first, second = torn.lent
        parts.on_evacuated(Evacuated(addresses=first.to_bytes()))

        def lose():
            parts.on_evacuated(Evacuated(addresses=b"", lost=second.to_bytes()))
            parts.on_alloc = lambda: None

        parts.on_alloc = lose
        kinds = [event.kind for event in aqua.step()]
        assert kinds == ["evacuated", "lost", "promoted"]
        assert whole is not placed[1].away
        with pytest.raises(TensorLost):
            placed[0].away.current()
    assert not parts.open


class Bytes:
    """What lies in each page. `fails`: the next copy does, behind its first page."""

    def __init__(self, parts):
        self.of, self.fails = {}, False
        parts.on_transfer = self._copy

    def _copy(self, sources, targets):
        for source, target in zip(sources, targets, strict=True):
            self.of[target] = self.of.get(source, "nothing")
            if self.fails:
                self.fails = False
                raise CopyFailed("half way")

    def write(self, placed, *values):
        self.of.update(zip(placed.local, values, strict=True))

    def read(self, placed):
        return [self.of[address] for address in placed.local]


@pytest.mark.parametrize("is_lost", [False, True], ids=["changed", "lost"])
def test_what_an_offload_that_failed_did_not_copy_the_next_one_copies(parts, is_lost):
    """Though nobody wrote it since: what is away is old in part, or empty pages in place of lost ones."""
    found = Bytes(parts)
    with Aqua(SETTINGS) as aqua:
        with aqua.making(2 * PAGE_BYTES) as placed:
            found.write(placed, "a", "b")
        aqua.fetch(placed)
        if is_lost:
            placed.away.is_lost = True
        else:
            found.write(placed, "c", "d")
        found.fails = True
        with pytest.raises(CopyFailed):
            aqua.store(placed, changed=not is_lost)
        aqua.store(placed, changed=False)
        assert not placed.local
        aqua.fetch(placed)
        assert found.read(placed) == (["a", "b"] if is_lost else ["c", "d"])

        parts.on_transfer = lambda *_: pytest.fail("nothing was written since")
        aqua.store(placed, changed=False)


def test_a_tensor_that_is_closed_while_the_mempool_is_slow_leaves_nothing_behind(parts):
    with Aqua(SETTINGS) as aqua:
        with aqua.making(2 * PAGE_BYTES) as placed:
            pass
        aqua.fetch(placed)
        api, first = type(aqua._api), [True]
        free_mem = api.free_mem

        async def is_late(self, addresses):
            await free_mem(self, addresses)
            if first:
                first.clear()
                raise PeerTimeout("FreeMem: no answer within 5000 ms")

        api.free_mem = is_late
        with pytest.raises(PeerTimeout):
            aqua.drop(placed)
        assert not parts.held
        assert not parts.taken
        assert not aqua._directory._owner


def test_places_that_could_not_be_unmapped_are_given_to_nobody(parts):
    with Aqua(SETTINGS) as aqua:
        with aqua.making(2 * PAGE_BYTES) as placed:
            pass
        aqua.fetch(placed)
        parts.mapped.clear()  # as far as the driver knows
        with pytest.raises(BadMapping):
            aqua.drop(placed)
        assert len(parts.taken) == 2
        assert sorted(parts.held.values()) == ["hbm", "hbm"], "they may be mapped; what is away is not"


# -- a lender's end -------------------------------------------------------------------------------------


def test_two_threads_may_close_a_lender_at_once(monkeypatch):
    closed, taking, go_on = [], threading.Event(), threading.Event()

    class End:
        async def close(self):
            closed.append(self)

    async def connect(_):
        return End(), End()

    async def take_back(lender, deadline_ms):
        taking.set()
        await asyncio.to_thread(go_on.wait, LIMIT_S)
        lender._has_memory = False

    monkeypatch.setattr(Lender, "_connect", connect)
    monkeypatch.setattr(Lender, "_take_back", take_back)
    lender = Lender(LenderSettings("s", "p", "cpu:p", PAGE_BYTES, "http://c", timeout_ms=LIMIT_S * 1_000))
    lender._has_memory = True
    raised = []

    def close():
        try:
            lender.close()
        except BaseException as error:  # noqa: BLE001  of a thread
            raised.append(error)

    threads = [threading.Thread(target=close) for _ in range(2)]
    threads[0].start()
    assert taking.wait(LIMIT_S)
    threads[1].start()
    time.sleep(0.05)  # it waits for the first by now
    go_on.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not raised
    assert len(closed) == 2, "each connection once"
    with pytest.raises(AquaClosed):
        lender.lend(PAGE_BYTES)
