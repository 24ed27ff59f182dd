"""A reader that does not read is cut off, and the end of its connection is no second end of its answer."""

from types import SimpleNamespace

from services.gateway import metrics
from services.gateway.push import Limits, Push, Watch
from tests.support.stream_answer import stream_answer


class Transport:
    """A socket buffer that only grows."""

    def __init__(self):
        self.unsent, self.aborted = 0, False

    def write(self, data):
        self.unsent += len(data)

    def get_write_buffer_size(self):
        return self.unsent

    def abort(self):
        self.aborted = True


def connection():
    """(cycle, transport) of a request that came directly."""
    watch, transport = Watch(), Transport()
    cycle = SimpleNamespace(
        transport=transport, disconnected=False, response_complete=False, response_started=False,
        chunked_encoding=False, waiting_for_100_continue=False, keep_alive=True, default_headers=[],
        flow=SimpleNamespace(write_paused=True), message_event=watch, scope={},
    )  # fmt: skip
    watch.cycle = cycle
    return cycle, transport


def make(cycle):
    answer = stream_answer(Push(cycle))
    statuses = []
    answer.run_alone(statuses.append)
    return answer, statuses


def lose(cycle):
    """What uvicorn's connection_lost() does; whatever is raised here keeps it from the rest of its work."""
    cycle.disconnected = True
    cycle.message_event.set()


async def test_the_lost_connection_of_a_reader_that_was_cut_off_ends_nothing_twice():
    cycle, transport = connection()
    answer, statuses = make(cycle)
    aborts_before = metrics.ABORTS._value.get()
    answer.emit(b"first")
    for _ in range(2):
        answer.emit(b"x" * (Limits.unsent_bytes + 1))
    assert transport.aborted
    assert statuses == [499]
    lose(cycle)
    assert statuses == [499]
    assert metrics.ABORTS._value.get() == aborts_before, "we left, not the client"


async def test_a_client_that_leaves_by_itself_ends_its_answer():
    cycle, _ = connection()
    answer, statuses = make(cycle)
    answer.emit(b"first")
    aborts_before = metrics.ABORTS._value.get()
    lose(cycle)
    assert statuses == [499]
    assert metrics.ABORTS._value.get() == aborts_before + 1


def test_a_reader_is_not_cut_off_for_one_large_event_but_for_what_comes_behind_it():
    cycle, transport = connection()
    push = Push(cycle)
    push.start_stream(b"")
    assert push.write(b"e" * 3 * Limits.unsent_bytes), "an echoed prompt"
    token, num_sent = b"t" * 1024, 0
    while push.write(token):
        num_sent += len(token)
    assert 0.9 * Limits.unsent_bytes < num_sent <= Limits.unsent_bytes
    transport.unsent = 2 * Limits.unsent_bytes  # it reads again
    assert push.write(token)


def test_small_events_alone_cut_a_reader_off_where_they_always_did():
    cycle, transport = connection()
    push = Push(cycle)
    push.start_stream(b"")
    while push.write(b"t" * 100):
        pass
    assert Limits.unsent_bytes < transport.unsent < Limits.unsent_bytes + 1024
