"""A reader's mempool and the source's, on two hosts: what arrives, what is a miss, and that everything comes back."""

import pytest

from services.mempool.core.actions import Action, AskPeer, PullRemote, TellPeer
from shared.errors import PeerProtocolError
from shared.ids import HandoffId, InstanceId, LeaseId
from shared.kv.page import PageState
from shared.kv.words import u32_list
from shared.wire import mempool as wire
from shared.wire import mempool_peer as peer
from tests.unit.mempool_harness import BOOT, DESCRIPTION, chain, page_lists
from tests.unit.test_mempool_spaces import Spaces, acquire, answers

PREFILL, DECODE, FRONT = 1, 2, 3
ABC = chain("a", "b", "c")
A_HOST, B_HOST = "tcp://10.0.0.1:1", "tcp://10.0.0.2:1"
LINK = 7
HANDOFF = HandoffId("h")


class Host(Spaces):
    """One mempool; what it would say to another host, or have copied from there, waits here."""

    def __init__(self, address: str, num_pages: int = 8, **limits: object) -> None:
        super().__init__(num_pages, **limits)
        self.core.peer_address = address
        self.asked: list[AskPeer] = []
        self.told: list[TellPeer] = []
        self.remote_pulls: list[PullRemote] = []

    def run(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case AskPeer():
                    self.asked.append(action)
                case TellPeer():
                    self.told.append(action)
                case PullRemote():
                    assert all(self.state_in(action.space, p) is PageState.WRITING for p in action.targets)
                    self.remote_pulls.append(action)
                case _:
                    super().run([action])


class TwoMempools:
    """Source a (prefill), reader b (decode). Messages and bytes move when the test says so."""

    def __init__(self, pages_there: int = 8, **limits: object) -> None:
        self.a, self.b = Host(A_HOST, num_pages=pages_there), Host(B_HOST, **limits)
        self.a.worker(PREFILL, "cpu")
        self.b.worker(DECODE, "cpu")
        self.b.client(FRONT, f"i{DECODE}")

    def deliver(self) -> list[object]:
        """Every message on its way, and what they cause; returns what was said."""
        said: list[object] = []
        while self.b.asked or self.a.told:
            asked, self.b.asked = self.b.asked, []
            for ask in asked:
                assert ask.address == A_HOST
                said.append(ask.message)
                self.a.run(self.a.core.on_peer_call(LINK, ask.message, self.a.now_ms))
            told, self.a.told = self.a.told, []
            for tell in told:
                said.append(tell.message)
                self.b.run(self.b.core.on_peer_answer(A_HOST, tell.message, self.b.now_ms))
        return said

    def copy(self) -> None:
        """The bytes of all pulls arrive."""
        pulls, self.b.remote_pulls = self.b.remote_pulls, []
        for pull in pulls:
            for source, target in zip(pull.sources, pull.targets, strict=True):
                self.b.bytes[pull.space, target] = self.a.bytes.get((pull.source_space, source), "")
            self.b.run(self.b.core.on_remote_pulled(pull.number, self.b.now_ms))

    def acquire(self, hashes: list = ABC, call_id: int = 1, **fields: object) -> None:
        options = {"handoff_id": HANDOFF, "wait_ms": 1_000, "source_mempool": A_HOST} | fields
        acquire(self.b, hashes, call_id, **options)

    def hand_off(self, hashes: list = ABC, names: str = "abc", handoff_id: HandoffId = HANDOFF) -> list:
        pages = self.a.fill(PREFILL, 0, hashes, names)
        ready = wire.HandoffReady(handoff_id=handoff_id, hashes=b"".join(hashes), ttl_ms=10_000)
        self.a.say(PREFILL, ready)
        return pages

    def got(self) -> list[wire.Acquired]:
        return answers(self.b, FRONT, wire.Acquired)

    def bytes_of(self, got: wire.Acquired) -> list[str]:
        return [self.b.bytes[0, page] for page in u32_list(got.pages)]

    def assert_at_rest(self) -> None:
        """No pull, no page of one, no pin for a peer."""
        self.a.counts()
        self.b.counts()
        assert not self.b.core.remote.pulls
        assert not self.a.core.pools[0].leases.leases
        assert not self.a.core.serve.waits
        memory = self.b.core.pools[0].memory
        assert memory is not None
        table = memory.table
        assert not table.counts[PageState.WRITING]
        assert not self.b.core.pools[0].claims


@pytest.fixture
def two() -> TwoMempools:
    return TwoMempools()


def test_blocks_of_another_host_are_sealed_here_and_leased_and_its_pins_end(two):
    two.hand_off()
    two.acquire()
    two.deliver()
    assert two.a.core.status().num_leases == 1
    assert two.a.core.status().num_handoffs == 0
    assert not two.got()
    two.copy()
    two.deliver()
    (got,) = two.got()
    assert (got.num_blocks, two.bytes_of(got)) == (3, ["a", "b", "c"])
    assert all(two.b.state_in(0, page) is PageState.SEALED for page in u32_list(got.pages))
    two.assert_at_rest()
    assert two.b.core.counters["remote_blocks"] == 3


def test_a_reader_that_comes_first_waits_at_the_source_for_the_handoff(two):
    two.acquire()
    two.deliver()
    assert two.a.core.serve.waits
    assert not two.b.remote_pulls
    two.hand_off()
    two.deliver()
    two.copy()
    two.deliver()
    assert two.got()[0].num_blocks == 3
    two.assert_at_rest()


def test_only_what_is_missing_moves(two):
    two.hand_off()
    two.b.fill(DECODE, 0, ABC[:2], "ab")
    two.acquire()
    two.deliver()
    assert [len(pull.targets) for pull in two.b.remote_pulls] == [1]
    two.copy()
    two.deliver()
    assert two.bytes_of(two.got()[0]) == ["a", "b", "c"]
    two.assert_at_rest()


def test_a_reader_that_has_everything_is_answered_at_once_and_the_source_lets_go(two):
    two.hand_off()
    two.b.fill(DECODE, 0, ABC, "abc")
    two.acquire()
    assert two.got()[0].num_blocks == 3
    assert two.a.core.status().num_handoffs == 1
    two.deliver()
    assert two.a.core.status().num_handoffs == 0
    two.assert_at_rest()


@pytest.mark.parametrize("reused", [0, 1, 2])
def test_a_page_that_was_reused_during_the_copy_is_a_miss_and_all_after_it(two, reused):
    """The source has lost its pins early (its link broke and came back, say) and given the page to others."""
    pages = two.hand_off()
    two.acquire()
    two.deliver()
    two.a.run(two.a.core.on_peer_gone(LINK, 0))
    two.a.say(PREFILL, wire.Unpin(**page_lists(pages)))
    two.a.client(50)
    two.a.say(50, wire.Delete(call_id=1, hashes=b"".join(ABC[reused:])))
    page, _ = pages[reused]
    two.a.bytes[0, page] = "another's"
    two.copy()
    two.deliver()
    (got,) = two.got()
    assert got.num_blocks == reused
    if reused:
        assert two.bytes_of(got) == ["a", "b", "c"][:reused]
    assert two.b.core.counters["remote_blocks_stale"] == 3 - reused
    two.assert_at_rest()


def test_a_reader_is_answered_in_its_time_and_what_comes_later_is_there_for_the_next(two):
    two.hand_off()
    two.acquire(wait_ms=500)
    two.deliver()
    two.b.advance(499)
    assert not two.got()
    two.b.advance(1)
    assert two.got()[0].num_blocks == 0
    two.copy()
    two.deliver()
    two.acquire(call_id=2)
    assert two.got()[1].num_blocks == 3
    two.deliver()
    two.assert_at_rest()


def test_without_an_answer_the_reader_is_answered_in_its_time_and_a_late_lease_is_released(two):
    two.hand_off()
    two.acquire(wait_ms=500)
    two.b.advance(two.b.core.next_deadline_ms())
    assert two.got()[0].num_blocks == 0
    assert not two.b.core.remote.pulls
    two.deliver()
    assert two.b.core.counters["remote_late"] == 1
    two.assert_at_rest()


@pytest.mark.parametrize("copied", [False, True])
def test_a_lost_link_is_a_miss_at_once_at_every_step(two, copied):
    two.hand_off()
    two.acquire()
    two.deliver()
    if copied:
        two.copy()
    two.b.run(two.b.core.on_peer_lost(A_HOST, 0))
    if not copied:
        assert two.b.remote_pulls  # its end is the transport's to tell
        (pull,) = two.b.remote_pulls
        two.b.run(two.b.core.on_remote_pulled(pull.number, 0, failed=True, in_doubt=pull.targets))
        assert two.b.core.status().pages_by_state["quarantined"] == 3
        two.b.run(two.b.core.on_settled(0, pull.targets, 0))
    assert two.got()[0].num_blocks == 0
    two.a.run(two.a.core.on_peer_gone(LINK, 0))
    two.b.asked.clear()
    two.assert_at_rest()
    assert two.b.core.status().pages_by_state["quarantined"] == 0


def test_a_link_that_is_lost_before_the_answer_is_a_miss_at_once(two):
    two.acquire()
    two.b.run(two.b.core.on_peer_lost(A_HOST, 0))
    assert two.got()[0].num_blocks == 0
    two.b.asked.clear()
    two.assert_at_rest()


def test_bytes_that_came_as_the_link_broke_are_not_taken(two):
    two.hand_off()
    two.acquire()
    two.deliver()
    two.b.run(two.b.core.on_peer_lost(A_HOST, 0))
    two.copy()
    assert two.got()[0].num_blocks == 0
    assert two.b.core.status().num_indexed == 0


def test_no_word_on_the_epochs_is_a_miss(two):
    two.hand_off()
    two.acquire(wait_ms=10_000)
    two.deliver()
    two.copy()
    two.b.advance(2_000)
    assert two.got()[0].num_blocks == 0
    assert two.b.core.status().num_indexed == 0


def test_two_readers_of_the_same_blocks_wait_for_one_pull_and_both_handoffs_end(two):
    two.hand_off()
    second = HandoffId("h2")
    two.a.say(PREFILL, wire.HandoffReady(handoff_id=second, hashes=b"".join(ABC), ttl_ms=10_000))
    two.acquire()
    two.acquire(call_id=2, handoff_id=second)
    two.deliver()
    assert len(two.b.remote_pulls) == 1
    two.copy()
    two.deliver()
    assert [got.num_blocks for got in two.got()] == [3, 3]
    assert two.a.core.status().num_handoffs == 0
    two.assert_at_rest()


def test_a_reader_with_more_blocks_than_the_pull_that_it_joined_gets_the_rest_after_it(two):
    more = chain("a", "b", "c", "d")
    two.hand_off()
    two.acquire()
    two.acquire(more, call_id=2, handoff_id=HandoffId("h2"))
    two.deliver()
    two.copy()
    last = two.a.take(PREFILL, 1)
    two.a.write(PREFILL, last)
    two.a.seal(PREFILL, last, more, first=3)
    two.a.say(PREFILL, wire.HandoffReady(handoff_id=HandoffId("h2"), hashes=b"".join(more), ttl_ms=1_000))
    two.deliver()
    two.copy()
    two.deliver()
    assert sorted(got.num_blocks for got in two.got()) == [3, 4]
    two.assert_at_rest()


def test_a_mempool_that_talks_to_no_peers_answers_at_once(two):
    two.b.core.peer_address = ""
    two.acquire()
    assert two.got()[0].num_blocks == 0
    assert not two.b.asked


def test_the_own_address_is_no_other_host(two):
    two.b.fill(DECODE, 0, ABC, "abc")
    two.acquire(source_mempool=B_HOST, handoff_id=HandoffId(""))
    assert two.got()[0].num_blocks == 3
    assert not two.b.asked


def test_another_content_is_a_miss(two):
    import msgspec

    other = msgspec.structs.replace(DESCRIPTION, dtype="bfloat16")
    two.hand_off()
    two.b.engine(20, description=other)
    two.b.client(21, "i20")
    call = wire.Acquire(call_id=1, hashes=b"".join(ABC), source_mempool=A_HOST, wait_ms=100)
    two.b.say(21, call)
    two.deliver()
    assert answers(two.b, 21, wire.Acquired)[0].num_blocks == 0


@pytest.mark.parametrize(
    "change",
    [
        {"num_blocks": 2},
        {"pages": b"\0"},
        {"parents": b"".join(chain("x", "y", "z"))},
        {"parents": b"".join(ABC)},
        {"valid_tokens": b"\0" * 12},
        {"num_blocks": 4},
    ],
)
def test_an_answer_that_cannot_be_right_is_a_miss_and_its_lease_is_released(two, change):
    import msgspec

    two.hand_off()
    two.acquire()
    (ask,), two.b.asked = two.b.asked, []
    two.a.run(two.a.core.on_peer_call(LINK, ask.message, 0))
    (tell,), two.a.told = two.a.told, []
    wrong = msgspec.structs.replace(tell.message, **change)
    two.b.run(two.b.core.on_peer_answer(A_HOST, wrong, 0))
    assert two.got()[0].num_blocks == 0
    assert two.b.core.counters["remote_malformed"] == 1
    two.deliver()
    two.assert_at_rest()


def test_what_is_no_call_of_a_reader_ends_its_connection(two):
    with pytest.raises(PeerProtocolError):
        two.a.core.on_peer_call(LINK, peer.PathBytes(path_id=1, data=b""), 0)
    with pytest.raises(PeerProtocolError):
        two.a.core.on_peer_call(LINK, peer.RemoteAcquire(call_id=1, content_key="k", hashes=b"x"), 0)


def test_a_check_of_pages_that_cannot_be_is_stale(two):
    two.a.run(
        two.a.core.on_peer_call(
            LINK, peer.CheckEpochs(call_id=1, space=9, pages=b"\1\0\0\0", epochs=bytes(8)), 0
        )
    )
    check = peer.CheckEpochs(call_id=2, space=0, pages=b"\xff\0\0\0", epochs=int(BOOT).to_bytes(8, "little"))
    two.a.run(two.a.core.on_peer_call(LINK, check, 0))
    assert [u32_list(tell.message.stale) for tell in two.a.told] == [[0], [0]]


def test_a_source_that_waited_in_vain_says_what_there_is(two):
    two.acquire(wait_ms=300)
    two.deliver()
    two.a.advance(two.a.core.next_deadline_ms())
    two.deliver()
    assert two.got()[0].num_blocks == 0
    two.assert_at_rest()


def test_calls_that_wait_at_the_source_are_bounded():
    two = TwoMempools()
    two.a.core.serve._limits = type(two.a.core.limits)(capacity_bytes=1, max_waiting=1)
    two.acquire()
    two.acquire(chain("x"), call_id=2, handoff_id=HandoffId("other"))
    two.deliver()
    assert [got.call_id for got in two.got()] == [2]


def test_pins_of_a_peer_are_no_engines_and_end_with_their_time(two):
    two.hand_off()
    two.acquire()
    two.deliver()
    two.a.advance(30_000)
    assert not two.a.core.pools[0].leases.leases
    assert LeaseId("") not in two.a.core.pools[0].leases.leases


def test_a_client_learns_where_its_mempool_is_reached(two):
    (attached,) = answers(two.b, FRONT, wire.Attached)
    assert attached.peer_address == B_HOST
    assert two.b.core.space_of(InstanceId(f"i{DECODE}")) == 0
