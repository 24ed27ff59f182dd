"""Callers that map spaces to copy by themselves: what they could still write is nobody's until they say so, or die."""

from types import SimpleNamespace

import pytest

from services.mempool.api_server import ApiServer
from services.mempool.core.actions import Disconnect, KeepCaller, Send
from services.mempool.core.callers import MAX_SPACES_OF_PROCESS
from shared.errors import PeerProtocolError
from shared.ids import Epoch, InstanceId, SpaceId
from shared.kv.page import PageState
from shared.transport.clock import ManualClock
from shared.wire import mempool as wire
from shared.wire import mempool_api as api_wire
from shared.wire.mempool_callers import AttachCaller, CallerAttached, Detached
from tests.unit.mempool_harness import DESCRIPTION, page_lists
from tests.unit.test_mempool_spaces import Spaces

P, D = InstanceId("prefill-0"), InstanceId("decode-0")
PROCESS, API, MAPS = 77, 1 << 32, 500


class Rig(Spaces):
    """Prefill's space 0 and decode's space 1, and a caller of prefill's as process PROCESS."""

    def __init__(self) -> None:
        super().__init__(num_pages=8)
        self.worker(1, "cpu:0", quota=2, instance=P)
        self.worker(2, "cpu:1", quota=2, instance=D)
        self.did: list[object] = []

    def run(self, actions) -> None:
        self.did = list(actions)
        super().run(actions)

    def caller(self, connection: int = API, process: int = PROCESS, instance: InstanceId = P) -> None:
        self.core.api.connect(connection, api_wire.ApiHello(instance=instance), process)

    def alloc(self, count: int, connection: int = API) -> list[int]:
        call = api_wire.AllocMem(call_id=1, num_blocks=count, mem_type="hbm", instance=D)
        self.core.api.on_call(connection, call, 0)
        actions = self.core.after_api(0)
        self.run(actions)
        reply = next(a.message for a in actions if getattr(a, "connection", 0) == connection)
        return [address.page for address in api_wire.unpack_addresses(reply.addresses)]

    def attach(self, connection: int = MAPS, process: int = PROCESS, **fields) -> object:
        options = {"instance": P, "pages_of": D, "space": SpaceId(1)} | fields
        self.run(self.core.on_attach_caller(connection, process, AttachCaller(**options), 0))
        return self.sent[connection][-1]

    def api_closed(self, connection: int = API) -> None:
        self.core.api.on_closed(connection)
        self.run(self.core.after_api(0))

    def states(self, pages: list[int]) -> set[PageState]:
        return {self.state_in(1, page) for page in pages}


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_the_keeper_knows_of_a_caller_before_it_has_descriptors_and_that_it_left_before_the_caller_knows(rig):
    assert isinstance(rig.attach(), CallerAttached)
    kept, sent = (next(a for a in rig.did if isinstance(a, kind)) for kind in (KeepCaller, Send))
    assert kept == KeepCaller(PROCESS, [1])
    assert sent.with_memory
    assert not sent.reads_only
    assert rig.did.index(kept) < rig.did.index(sent)
    rig.say(MAPS, wire.Detach())
    kinds = [type(a) for a in rig.did]
    assert rig.did[kinds.index(KeepCaller)] == KeepCaller(PROCESS, [])
    assert kinds.index(KeepCaller) < kinds.index(Send) < kinds.index(Disconnect)
    assert isinstance(rig.sent[MAPS][-1], Detached)


def test_pages_of_a_caller_that_left_in_the_middle_of_a_copy_are_free_when_it_says_that_it_copies_no_more(
    rig,
):
    rig.caller()
    rig.attach()
    pages = rig.alloc(3)
    rig.api_closed()
    assert rig.states(pages) == {PageState.QUARANTINED}
    rig.advance(10_000_000)
    assert rig.states(pages) == {PageState.QUARANTINED}, "no time frees them"
    rig.say(MAPS, wire.Detach())
    assert rig.states(pages) == {PageState.FREE}


def test_pages_of_a_caller_without_a_word_are_free_with_proof_of_its_death(rig):
    rig.caller()
    rig.attach()
    pages = rig.alloc(3)
    rig.closed(MAPS)
    rig.api_closed()
    assert rig.states(pages) == {PageState.QUARANTINED}
    rig.dead(PROCESS)
    assert rig.states(pages) == {PageState.FREE}


def test_where_pids_are_not_seen_the_pages_of_a_caller_that_left_wait_for_its_death(rig):
    link = SimpleNamespace(state=API, peer=SimpleNamespace(pid=0))
    watch = SimpleNamespace(number_of=lambda _: 7)
    ApiServer(None, rig.core, watch, ManualClock(), rig.run)._hello(link, api_wire.ApiHello(instance=P))
    rig.attach(process=8)
    pages = rig.alloc(3)
    rig.api_closed()
    assert rig.states(pages) == {PageState.QUARANTINED}
    rig.dead(7)
    assert rig.states(pages) == {PageState.FREE}


def test_a_second_connection_of_the_process_that_still_maps_keeps_the_pages_of_the_first(rig):
    rig.caller()
    rig.attach()
    rig.attach(MAPS + 1)
    pages = rig.alloc(2)
    rig.api_closed()
    rig.say(MAPS, wire.Detach())
    assert rig.states(pages) == {PageState.QUARANTINED}
    rig.say(MAPS + 1, wire.Detach())
    assert rig.states(pages) == {PageState.FREE}


def test_a_caller_that_only_reads_holds_nothing_up(rig):
    rig.caller()
    rig.attach(reads_only=True)
    assert next(a for a in rig.did if isinstance(a, Send)).reads_only
    pages = rig.alloc(2)
    rig.api_closed()
    assert rig.states(pages) == {PageState.FREE}


def test_an_engine_detaches_as_ever_and_a_caller_is_none_of_its_ranks(rig):
    """The engine's pages come back with its own processes, whoever else maps the space."""
    rig.attach()
    mine = rig.take(2, 2)
    rig.write(2, mine)
    assert rig.states([page for page, _ in mine]) == {PageState.WRITING}
    rig.closed(2)
    rig.closed(102)
    rig.dead(2)
    assert rig.states([page for page, _ in mine]) == {PageState.FREE}
    rig.say(MAPS, wire.Detach())
    with pytest.raises(PeerProtocolError):
        rig.say(MAPS, wire.GiveBack(**page_lists(mine)))


@pytest.mark.parametrize(
    "fields",
    [
        {"instance": D},  # its own space: others may be told to copy into its pages
        {"pages_of": P},  # which is not there
        {"space": SpaceId(9)},
        {"pages_of": InstanceId("elsewhere")},
        {"memory_id": Epoch(5)},
    ],
)
def test_a_space_that_callers_must_not_write_is_refused(rig, fields):
    assert isinstance(rig.attach(**fields), wire.AttachRefused)
    assert MAPS in rig.disconnected
    assert not rig.core.callers.has(MAPS)


def test_its_own_space_may_be_read(rig):
    assert isinstance(rig.attach(instance=D, reads_only=True), CallerAttached)


def test_one_process_cannot_attach_without_end(rig):
    for number in range(MAX_SPACES_OF_PROCESS):
        assert isinstance(rig.attach(MAPS + number), CallerAttached)
    assert isinstance(rig.attach(MAPS + MAX_SPACES_OF_PROCESS), wire.AttachRefused)


def test_callers_of_a_dead_mempool_are_awaited_beside_the_engines_of_the_same_process(rig):
    """A process that is a rank too has said with its rank's word nothing of its copies."""
    pages = rig.take(2, 1)
    old, plan = rig.core.pools[1], rig.spaces[1]
    words = [rig.words_of[1, page] for page in range(8)]
    successor = Spaces(num_pages=8)
    successor.core.adopt(
        1, plan.description, plan, words, b"", memory_id=old.memory_id, processes=[PROCESS, -PROCESS],
        engines=[], instances=[D], label="1",
    )  # fmt: skip
    core = successor.core
    assert core.awaited() == {PROCESS, -PROCESS}
    assert PROCESS in core.callers
    rank = wire.Attach(
        kind="rank", instance=D, description=plan.description, device="cpu:1", memory_id=old.memory_id
    )
    successor.run(core.on_attach(1, PROCESS, rank, 0))
    assert core.awaited() == {-PROCESS}
    assert core.pools[1].memory.table.state(pages[0][0]) is PageState.QUARANTINED
    again = AttachCaller(instance=P, pages_of=D, space=SpaceId(1), memory_id=old.memory_id)
    successor.run(core.on_attach_caller(MAPS, PROCESS, again, 0))
    assert core.awaited() == set()
    assert core.pools[1].memory.table.state(pages[0][0]) is PageState.FREE


def test_a_caller_of_a_dead_mempool_that_dies_too_is_awaited_no_more(rig):
    old, plan = rig.core.pools[1], rig.spaces[1]
    words = [rig.words_of[1, page] for page in range(8)]
    successor = Spaces(num_pages=8)
    successor.core.adopt(
        1, plan.description, plan, words, b"", memory_id=old.memory_id, processes=[-PROCESS], engines=[],
        instances=[], label="1",
    )  # fmt: skip
    assert PROCESS in successor.core.callers
    successor.dead(PROCESS)
    assert successor.core.awaited() == set()
    assert PROCESS not in successor.core.callers


def test_a_space_on_a_gpu_gives_memory_back_when_its_callers_have_unmapped_it():
    rig = Spaces(num_pages=8)
    core = rig.core
    rank = wire.Attach(
        kind="rank", instance=D, description=DESCRIPTION, device="cuda:ab", capacity_bytes=16 << 20
    )
    rig.run(core.on_attach(102, 2, rank, 0))
    releases = core.pools[0].releases
    rig.run(
        core.on_attach_caller(
            MAPS, PROCESS, AttachCaller(instance=P, pages_of=D, space=SpaceId(0)), 0
        )
    )  # fmt: skip
    reply = rig.sent[MAPS][-1]
    assert isinstance(reply, CallerAttached)
    assert (reply.device, reply.pages_per_slab > 0) == ("cuda:ab", True)
    assert PROCESS in releases.mappers
    assert releases._obstacle(), "it has not said Mapped yet"
    rig.say(MAPS, wire.Mapped())
    assert MAPS in releases.ready
    rig.say(MAPS, wire.Detach())
    assert PROCESS not in releases.mappers
    assert MAPS not in releases.ready
