"""Copies through pinned slots, of engines that refuse: what may still be written, and which slot is lent again."""

from collections.abc import Callable

from services.mempool.mover_bounce import NUM_SLOTS, BounceCopier
from shared.kernels.copy_pages.copies import Copies, CopyFailed, Direction
from shared.transfer.mapped import TicketAttempt

SLOT_BYTES = 4096
FIRST_SLOT = 1 << 30


class Ticket:
    """Done, or failed for good."""

    def __init__(self, failure: CopyFailed | None = None) -> None:
        self.failure = failure

    def done(self) -> bool:
        if self.failure is not None:
            raise self.failure
        return True


class Engine:
    """A copy engine, its copier and its driver. Args: copy: what becomes of each set."""

    into, out = 1, 2

    def __init__(self, copy: Callable[[], Ticket]) -> None:
        self.gpu = self.copy = self.copier = self
        self._copy = copy
        self.sets: list[Copies] = []

    def make_current(self) -> None: ...

    def allocate_host(self, num_bytes: int) -> int:
        return FIRST_SLOT

    def submit(self, copies: Copies, direction: Direction, *, stream: int) -> Ticket:
        self.sets.append(copies)
        return self._copy()


def refused(*, running: bool) -> Callable[[], Ticket]:
    def copy() -> Ticket:
        raise CopyFailed("cuMemcpyBatchAsync", "refused halfway", running=running)

    return copy


def bounced(out: Engine, into: Engine, num_pages: int = 2) -> tuple[BounceCopier, TicketAttempt]:
    """Pages of a slot each, from one to the other, looked at for a while."""
    copier = BounceCopier(out, into, slot_bytes=SLOT_BYTES)  # type: ignore[arg-type]
    sources, targets = ([at + n * SLOT_BYTES for n in range(num_pages)] for at in (1 << 20, 1 << 24))
    attempt = TicketAttempt(copier.submit(Copies.of(sources, targets, SLOT_BYTES), Direction.PEER))
    return copier, attempt


def test_targets_that_a_refused_copy_inward_may_still_write_stay_with_it_whatever_failed_first():
    ends = [Ticket(CopyFailed("cuEventQuery", "the first slot's copy failed"))]
    out, into = Engine(lambda: ends.pop() if ends else Ticket()), Engine(refused(running=True))
    _, attempt = bounced(out, into)
    for _ in range(3):
        assert not attempt.cancel(peer_is_dead=True)
        assert not attempt.over


def test_a_slot_that_a_refused_copy_inward_may_still_read_is_never_lent_again():
    into = Engine(refused(running=True))
    copier, attempt = bounced(Engine(Ticket), into, num_pages=1)
    assert not attempt.over
    out = copier._source = Engine(Ticket)  # type: ignore[assignment]
    copier._target = Engine(Ticket)  # type: ignore[assignment]
    later = copier.submit(Copies.of([1 << 20], [1 << 24], SLOT_BYTES * NUM_SLOTS), Direction.PEER)
    while not later.done():
        assert not attempt.over
    stuck = {int(copies.sources[0]) for copies in into.sets}
    assert len(stuck) == 1
    assert stuck.isdisjoint(int(copies.targets[0]) for copies in out.sets)


def test_a_copy_inward_that_was_refused_and_runs_no_more_ends_the_set_and_frees_its_slot():
    copier, attempt = bounced(Engine(Ticket), Engine(refused(running=False)), num_pages=1)
    assert attempt.over
    assert len(copier._free) == NUM_SLOTS
