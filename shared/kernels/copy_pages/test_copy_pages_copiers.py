"""One suite for every provider: by CPU with and without threads, and CUDA's over a recording driver."""

import ctypes

import numpy as np
import pytest

from shared.kernels.copy_pages import calibrate
from shared.kernels.copy_pages.copies import (
    Copies,
    CopyFailed,
    CopyQueueFull,
    CopyTimeout,
    Direction,
    InvalidCopies,
    Order,
)
from shared.kernels.copy_pages.cpu_copier import CpuCopier
from shared.kernels.copy_pages.cuda_copier import CudaCopier
from shared.kernels.copy_pages.host_memory import view
from shared.kernels.copy_pages.plan import Always, Choice, Limits, Method
from shared.kernels.copy_pages.recording_driver import RecordingDriver
from shared.kernels.copy_pages.reference import copy_pages_reference

STREAM = 77
PATIENCE_S = 60  # for what is no matter of time
LIMITS = Limits(max_descriptors=7, max_run_bytes=8192, slot_bytes=4096)
CUDA_CHOICES = [
    Choice(Method.LOOP),
    Choice(Method.BATCH),
    Choice(Method.BATCH, 3),
    Choice(Method.STAGED),
    Choice(Method.KERNEL, 2),
]
CUDA_NAMES = [f"{choice.method}-{choice.lanes}" for choice in CUDA_CHOICES]
NAMES = ["cpu", "cpu-2-threads", *CUDA_NAMES, *(f"{name}-late" for name in CUDA_NAMES)]


class Memory:
    """Two halves to copy between: sources random, targets zero."""

    def __init__(self, num_bytes: int, seed: int = 1) -> None:
        self.buffer = ctypes.create_string_buffer(2 * num_bytes)
        self.base = ctypes.addressof(self.buffer)
        self.half = num_bytes
        self.bytes = view(self.base, 2 * num_bytes)
        self.bytes[:num_bytes] = np.random.default_rng(seed).integers(1, 255, num_bytes, np.uint8)

    def absolute(self, copies: Copies) -> Copies:
        base = np.uint64(self.base)
        return Copies(copies.sources + base, copies.targets + base, copies.sizes)

    def expected(self, copies: Copies) -> bytes:
        memory = bytearray(self.bytes.tobytes())
        copy_pages_reference(memory, copies)
        return bytes(memory)


def scattered(half: int, size: int, count: int, seed: int = 3) -> Copies:
    return calibrate.scattered(calibrate.Arena(0, half, half), size, count, seed)


@pytest.fixture(params=NAMES)
def copier(request):
    name = request.param.removesuffix("-late")
    if name.startswith("cpu"):
        made = CpuCopier(threads=2 if name != "cpu" else 0, limits=LIMITS)
    else:
        late = request.param.endswith("-late")
        driver = RecordingDriver(eager=not late, polls=5 if late else 0)
        made = CudaCopier(driver, chooser=Always(CUDA_CHOICES[CUDA_NAMES.index(name)]), limits=LIMITS)
    yield made
    made.close()


def direction_for(copier, wanted: Direction) -> Direction:
    return Direction.HOST_TO_HOST if isinstance(copier, CpuCopier) else wanted


@pytest.mark.parametrize("wanted", [Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST, Direction.PEER])
@pytest.mark.parametrize(("size", "count"), [(64, 1), (64, 200), (1000, 37), (4096, 60), (20000, 5), (64, 0)])
def test_bytes_arrive_and_no_other_byte_changes(copier, wanted, size, count):
    memory = Memory(256 << 10)
    copies = scattered(memory.half, size, count)
    want = memory.expected(copies)
    ticket = copier.submit(
        memory.absolute(copies),
        direction_for(copier, wanted),
        stream=STREAM,
        order=Order.ANY,
        staging=True,
        kernels=True,
    )
    ticket.wait(PATIENCE_S)
    assert ticket.done()
    assert memory.bytes.tobytes() == want


def test_ragged_and_neighbouring_copies_arrive(copier):
    memory = Memory(64 << 10)
    sizes = [1, 7, 4096, 0, 333, 4096, 4096, 9000]
    targets = memory.half + np.concatenate([[0], np.cumsum(sizes)[:-1]])
    copies = Copies.of(targets - memory.half, targets, sizes)
    want = memory.expected(copies)
    ticket = copier.submit(
        memory.absolute(copies), direction_for(copier, Direction.PEER), stream=STREAM, kernels=True
    )
    ticket.wait(PATIENCE_S)
    assert memory.bytes.tobytes() == want
    assert ticket.plan.runs.num_bytes == sum(sizes)


def test_sets_of_one_stream_run_one_after_another(copier):
    """Each set copies what the one before it wrote."""
    region, steps = 256 << 10, 12
    memory = Memory(region * (steps + 1) // 2 + region)
    memory.bytes[region:] = 0
    last = None
    for step in range(steps):
        one = Copies.of([step * region], [(step + 1) * region], region)
        last = copier.submit(memory.absolute(one), direction_for(copier, Direction.PEER), stream=STREAM)
    assert last is not None
    last.wait(PATIENCE_S)
    assert np.array_equal(memory.bytes[:region], memory.bytes[steps * region : (steps + 1) * region])


def test_after_during_call_the_source_may_be_overwritten(copier):
    memory = Memory(64 << 10)
    copies = scattered(memory.half, 1024, 30)
    want = memory.expected(copies)[memory.half :]
    ticket = copier.submit(
        memory.absolute(copies),
        direction_for(copier, Direction.DEVICE_TO_HOST),
        stream=STREAM,
        order=Order.DURING_CALL,
        staging=True,
        kernels=True,
    )
    memory.bytes[: memory.half] = 0
    ticket.wait(PATIENCE_S)
    assert memory.bytes[memory.half :].tobytes() == want


def test_dependent_copies_are_refused_before_anything_starts(copier):
    memory = Memory(4096)
    copies = memory.absolute(Copies.of([0, 64], [memory.half, memory.half + 32], 64))
    with pytest.raises(InvalidCopies):
        copier.submit(copies, direction_for(copier, Direction.PEER), stream=STREAM)
    assert not memory.bytes[memory.half :].any()


# CUDA's provider: what it asks of the driver


def cuda(
    choice: Choice, *, eager: bool = True, has_batch: bool = True, **more
) -> tuple[CudaCopier, RecordingDriver]:
    driver = RecordingDriver(has_batch=has_batch, eager=eager)
    return CudaCopier(driver, chooser=Always(choice), limits=LIMITS, **more), driver


def submit(copier: CudaCopier, memory: Memory, count: int = 30, **more):
    copies = scattered(memory.half, 1024, count)
    more = {"direction": Direction.DEVICE_TO_HOST, "stream": STREAM, **more}
    return memory.absolute(copies), copier.submit(memory.absolute(copies), **more)


def test_a_batch_is_capped_calls_and_one_event():
    copier, driver = cuda(Choice(Method.BATCH))
    submit(copier, Memory(64 << 10))
    assert driver.names() == ["create_event", *["copy_batch"] * 5, "record"]
    batches = [args for name, args in driver.calls if name == "copy_batch"]
    assert [np.size(np.asarray(args[0])) for args in batches] == [7, 7, 7, 7, 2]
    assert {args[3:] for args in batches} == {(Order.STREAM, STREAM)}


def test_lanes_fork_from_the_callers_stream_and_join_it_again():
    memory = Memory(64 << 10)
    copier, driver = cuda(Choice(Method.BATCH, 3), eager=False)
    copies = scattered(memory.half, 1024, 30)
    want = memory.expected(copies)
    driver.copy(memory.base + 5, memory.base, 0, STREAM)
    gate = driver.create_event()
    driver.wait_event(STREAM, gate)  # passes at once: nothing was recorded
    ticket = copier.submit(memory.absolute(copies), Direction.PEER, stream=STREAM)
    streams = {args[4] for name, args in driver.calls if name == "copy_batch"}
    assert len(streams) == 3
    assert STREAM in streams
    assert not ticket.done()
    driver.run()
    assert ticket.done()
    assert memory.bytes.tobytes() == want


def test_a_lane_does_not_start_before_the_callers_stream_gets_there():
    memory = Memory(64 << 10)
    copier, driver = cuda(Choice(Method.BATCH, 2), eager=False)
    release = driver.hold(STREAM)
    _, ticket = submit(copier, memory)
    driver.run()
    assert not memory.bytes[memory.half :].any()
    assert not ticket.done()
    release()
    assert ticket.done()
    assert memory.bytes[memory.half :].any()


def test_the_callers_stream_waits_for_every_lane():
    memory = Memory(64 << 10)
    copier, driver = cuda(Choice(Method.BATCH, 3))
    submit(copier, memory)
    for lane in [stream for stream in driver.streams if stream != STREAM]:
        release = driver.hold(lane)
        _, ticket = submit(copier, memory)
        assert not ticket.done()
        release()
        assert ticket.done()


def test_failures_lose_no_staging_slot():
    copier, driver = cuda(Choice(Method.STAGED), num_slots=2)
    memory = Memory(64 << 10)
    for nth in (1, 2, 2, 1, 2, 2):
        driver.fail_at["copy_batch"] = nth
        with pytest.raises(CopyFailed):
            submit(copier, memory, staging=True)
    _, ticket = submit(copier, memory, staging=True)
    assert ticket.plan.choice.method is Method.STAGED
    ticket.wait(PATIENCE_S)


@pytest.fixture
def half_staged():
    """Two slots; of a set's groups the first has arrived, the second is on its way; the third will be refused."""
    copier, driver = cuda(Choice(Method.STAGED), eager=False, num_slots=2)
    memory = Memory(64 << 10)
    ticket = submit(copier, memory, staging=True)[1]
    for _ in range(2):
        assert driver.streams[STREAM].popleft()()
    driver.fail_at["copy_batch"] = 1
    return copier, driver, memory, ticket


def test_a_staged_set_that_fails_halfway_says_so_once_nothing_of_it_runs(half_staged):
    copier, driver, memory, ticket = half_staged
    assert not ticket.done()
    assert "copy_batch" not in driver.fail_at, "refused"
    assert not ticket.done(), "the second group is still copied"
    driver.run()
    for _ in range(2):
        with pytest.raises(CopyFailed) as failed:
            ticket.done()
        assert not failed.value.running
    ticket = submit(copier, memory, staging=True)[1]
    assert ticket.plan.choice.method is Method.STAGED
    assert copier._slots.all_lent, "both slots are in use again"
    while not ticket.done():
        driver.run()


def test_a_staged_set_whose_end_nobody_can_tell_says_that_it_runs_and_keeps_one_slot(half_staged):
    copier, driver, memory, ticket = half_staged
    driver.fail_at["record"] = 1
    with pytest.raises(CopyFailed) as failed:
        ticket.done()
    assert failed.value.running
    assert copier.num_pending == 0
    driver.run()
    ticket = submit(copier, memory, staging=True)[1]
    assert ticket.plan.choice.method is Method.STAGED
    while not ticket.done():
        driver.run()


def test_closing_frees_all_after_a_set_that_failed_and_was_not_asked_for(half_staged):
    copier, driver, _, ticket = half_staged
    assert not ticket.done()
    assert "copy_batch" not in driver.fail_at, "refused"
    driver.run()
    copier.close()
    assert driver.memory == {}
    assert driver.events == {}
    with pytest.raises(CopyFailed):
        ticket.done()


def test_closing_keeps_the_slots_of_a_set_whose_end_nobody_can_tell(half_staged):
    copier, driver, _, ticket = half_staged
    driver.fail_at["record"] = 1
    driver.run()
    copier.close()
    assert ticket.failure.running
    assert len(driver.memory) == 1, "the slots, one of which may be read or written yet"
    assert len(driver.events) == 2, "theirs"


def test_without_a_batch_call_the_loop_takes_over_and_during_call_still_holds():
    memory = Memory(64 << 10)
    copier = CudaCopier(RecordingDriver(has_batch=False, eager=False, polls=5), limits=LIMITS)
    want = memory.expected(scattered(memory.half, 1024, 30))[memory.half :]
    _, ticket = submit(copier, memory, order=Order.DURING_CALL)
    assert ticket.plan.choice.method is Method.LOOP
    memory.bytes[: memory.half] = 0
    ticket.wait(PATIENCE_S)
    assert memory.bytes[memory.half :].tobytes() == want


def test_events_are_used_again_and_freed_in_the_end():
    copier, driver = cuda(Choice(Method.BATCH, 3))
    memory = Memory(64 << 10)
    for _ in range(10):
        submit(copier, memory)
    assert driver.names().count("create_event") == 1 + 1 + 2  # ticket, fork, two joins
    assert copier.num_pending == 1
    copier.close()
    assert driver.events == {}
    assert driver.memory == {}
    assert set(driver.streams) <= {STREAM}


def test_more_sets_than_may_be_in_flight_are_refused_and_taken_later():
    copier, driver = cuda(Choice(Method.BATCH), eager=False, max_pending=2)
    memory = Memory(64 << 10)
    tickets = [submit(copier, memory)[1] for _ in range(2)]
    with pytest.raises(CopyQueueFull):
        submit(copier, memory)
    driver.run()
    submit(copier, memory)
    assert all(ticket.done() for ticket in tickets)


def test_a_wait_ends_at_its_deadline_and_the_set_goes_on():
    copier, driver = cuda(Choice(Method.BATCH), eager=False)
    _, ticket = submit(copier, Memory(64 << 10))
    with pytest.raises(CopyTimeout):
        ticket.wait(0.01)
    with pytest.raises(CopyTimeout):
        copier.close(0.01)
    driver.run()
    ticket.wait(0.01)


@pytest.mark.parametrize("choice", CUDA_CHOICES[:-1])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_when_submit_fails_nothing_of_the_set_still_runs(choice, nth):
    copier, driver = cuda(choice)
    memory = Memory(64 << 10)
    name = "copy" if choice.method is Method.LOOP else "copy_batch"
    driver.fail_at[name] = nth
    with pytest.raises(CopyFailed) as failed:
        submit(copier, memory, order=Order.ANY, staging=True)
    assert not failed.value.running
    assert copier.num_pending == 0
    assert [called for called, _ in driver.calls][-1] == "passed"
    submit(copier, memory, order=Order.ANY, staging=True)[1].wait(PATIENCE_S)
    copier.close()
    assert driver.events == {}


def test_when_nothing_is_known_after_a_failure_the_error_says_so():
    copier, driver = cuda(Choice(Method.BATCH))
    driver.fail_at = {"copy_batch": 2, "record": 1}
    with pytest.raises(CopyFailed) as failed:
        submit(copier, Memory(64 << 10))
    assert failed.value.running


@pytest.mark.parametrize("stream", [0, 1])
def test_the_legacy_default_stream_is_refused(stream):
    copier, _ = cuda(Choice(Method.BATCH))
    with pytest.raises(InvalidCopies, match="stream of your own"):
        submit(copier, Memory(64 << 10), stream=stream)


def test_staged_copies_to_the_host_that_nobody_asks_for_leave_others_a_way():
    copier, driver = cuda(Choice(Method.STAGED), num_slots=2)
    first, second = Memory(64 << 10), Memory(64 << 10, seed=2)
    copies, waiting = submit(copier, first, order=Order.ANY, staging=True)
    assert waiting.plan.choice.method is Method.STAGED
    _, other = submit(copier, second, direction=Direction.HOST_TO_DEVICE, order=Order.ANY, staging=True)
    assert other.done()
    while not waiting.done():
        pass
    for source, target, size in copies.rows():
        assert ctypes.string_at(source, size) == ctypes.string_at(target, size)
    copier.close()
    assert driver.memory == {}


def test_boundaries_given_later_hold():
    copier, _ = cuda(Choice(Method.BATCH))
    memory = Memory(16 << 10)
    copies = memory.absolute(Copies.of([0, 1024], [memory.half, memory.half + 1024], 1024))
    assert len(copier.submit(copies, Direction.PEER, stream=STREAM).plan.runs) == 1
    copier.add_boundaries([memory.base + 1024])
    assert len(copier.submit(copies, Direction.PEER, stream=STREAM).plan.runs) == 2
