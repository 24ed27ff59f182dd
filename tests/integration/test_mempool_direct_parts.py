"""Own copies of long lists, begun in parts: what the parts that have begun mean to the ones that cannot."""

import asyncio
import threading

import pytest

from shared.errors import CopyFailed, InvalidRequest, NotHeld, StaleEpoch
from shared.kernels.copy_pages.copies import CopyQueueFull
from shared.mempool.held_pages import AddressList
from tests.integration.direct_rig import NUM, D, host, soon
from tests.integration.mempool_rig import content

__all__ = ["host"]  # a fixture


async def opened(host):
    """A caller that copies in parts, sources and targets."""
    api = await host.open()
    sources, targets = await host.ready(api, "parts")
    return api, list(sources), list(targets)


def counted(api) -> tuple[int, int]:
    """Transfers by own copies, and others since they were possible."""
    counters = api.direct.counters
    return counters["direct"], sum(
        n for why, n in counters.items() if why.startswith("mediated") and "mapped" not in why
    )


@pytest.mark.parametrize("given", [list, tuple], ids=["a list of the caller's", "another sequence"])
async def test_the_first_page_goes_ahead_of_the_others_and_all_arrive(host, given):
    api, sources, targets = await opened(host)
    gates = host.hold_copies(api)
    copying = asyncio.create_task(api.transfer(D, given(sources), given(targets)))
    await soon(lambda: len(gates) == 2, "both parts run at once")
    for gate in gates:
        gate.is_open.set()
    assert await copying == targets
    assert host.read(1, targets) == host.read(0, sources)
    assert counted(api) == (1, 0)
    assert not api.direct.is_busy([*sources, *targets])


async def test_lists_as_answers_bring_them_go_at_once(host):
    api, sources, targets = await opened(host)
    gates = host.hold_copies(api)
    copying = asyncio.create_task(api.transfer(D, AddressList(sources), AddressList(targets)))
    await soon(lambda: gates, "it has begun")
    gates[0].is_open.set()
    await copying
    assert len(gates) == 1
    assert host.read(1, targets) == host.read(0, sources)


async def test_a_later_part_that_cannot_be_copied_makes_the_whole_call_the_mempools(host):
    api, sources, targets = await opened(host)
    other = await host.open()
    stale, theirs = sources[4]._replace(epoch=sources[4].epoch + 1), await host.sources(other, 1)
    foreign = await other.alloc_mem(1, "hbm", D)
    cases = [
        (StaleEpoch, [*sources[:4], stale, sources[5]], targets),
        (StaleEpoch, sources, [*targets[:5], targets[5]._replace(epoch=targets[5].epoch + 1)]),
        (NotHeld, [*sources[:5], *theirs], targets),
        (NotHeld, sources, [*targets[:5], *foreign]),
        (InvalidRequest, [*sources[:5], sources[0]], targets),
        (InvalidRequest, [*sources[:5], sources[4]], targets),
        (InvalidRequest, sources, [*targets[:5], targets[0]]),
        (InvalidRequest, sources, targets[:5]),
    ]
    for number, (error, given, into) in enumerate(cases):
        with pytest.raises(error):
            await api.transfer(D, given, into)
        assert counted(api) == (0, number + 1)
        assert not api.direct.is_busy([*sources, *targets])
    await api.transfer(D, sources, targets)
    assert host.read(1, targets) == host.read(0, sources)
    assert counted(api) == (1, len(cases))


async def test_the_mempool_is_asked_only_when_the_parts_that_run_have_ended(host):
    api, sources, targets = await opened(host)
    gates = host.hold_copies(api)
    stale = [*sources[:5], sources[5]._replace(epoch=sources[5].epoch + 1)]
    copying = asyncio.create_task(api.transfer(D, stale, targets))
    await soon(lambda: gates, "the first page")
    await asyncio.sleep(0.05)
    assert not copying.done()
    gates[0].is_open.set()
    with pytest.raises(StaleEpoch):
        await copying
    assert len(gates) == 1


async def test_a_part_that_is_refused_by_the_driver_goes_by_the_mempool(host):
    api, sources, targets = await opened(host)
    asked = []

    def refusing(way):
        def submit(froms, tos, size):
            asked.append(froms.size)
            if len(asked) == 2:
                raise CopyQueueFull("too many")
            return way.submit(froms, tos, size)

        return submit

    api.direct.ways.copy_by(refusing)
    await api.transfer(D, sources, targets)
    assert asked == [1, NUM - 1]
    assert counted(api) == (0, 1)
    assert host.read(1, targets) == host.read(0, sources)
    assert not api.direct.is_busy([*sources, *targets])


async def test_a_caller_that_waits_no_more_leaves_the_pages_of_all_parts_busy(host):
    api, sources, targets = await opened(host)
    gates = host.hold_copies(api)
    copying = asyncio.create_task(api.transfer(D, sources, targets))
    await soon(lambda: len(gates) == 2, "they have begun")
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    for first, last in ((0, 1), (1, NUM)):
        assert api.direct.is_busy(targets[first:last], writing=True)
    gates[0].is_open.set()
    assert not api.direct.is_busy(targets[:1])
    assert api.direct.is_busy(targets[1:], writing=True)
    gates[1].is_open.set()
    assert await api.free_mem(targets) == NUM


class Failing:
    """A copy that breaks when it is let go."""

    def __init__(self) -> None:
        self.is_open = threading.Event()

    def done(self) -> bool:
        if self.is_open.is_set():
            raise CopyFailed("the link is gone")
        return False


async def test_a_part_that_fails_fails_the_call_and_another_that_runs_keeps_its_pages(host):
    api, sources, targets = await opened(host)
    gates = host.hold_copies(api)
    gated, failing = next(iter(api.direct.ways._found.values())).submit, Failing()

    def first_fails(_way):
        return lambda froms, tos, size: failing if froms.size == 1 else gated(froms, tos, size)

    api.direct.ways.copy_by(first_fails)
    copying = asyncio.create_task(api.transfer(D, sources, targets))
    await soon(lambda: gates, "the others have begun")
    failing.is_open.set()
    with pytest.raises(CopyFailed, match="link"):
        await copying
    assert not api.direct.is_busy(targets[:1])
    assert api.direct.is_busy(targets[1:])
    gates[0].is_open.set()
    assert await api.free_mem(targets) == NUM


async def test_a_part_that_cannot_begin_at_all_leaves_the_first_ones_pages_to_its_copy(host, monkeypatch):
    api, sources, targets = await opened(host)
    gates = host.hold_copies(api)
    between = api.direct.ways.between

    def breaks(source, target):
        if source.pages.size > 1:
            raise RuntimeError("can't start new thread")
        return between(source, target)

    monkeypatch.setattr(api.direct.ways, "between", breaks)
    with pytest.raises(RuntimeError, match="thread"):
        await api.transfer(D, sources, targets)
    assert api.direct.is_busy(targets[:1])
    assert not api.direct.is_busy(targets[1:])
    gates[0].is_open.set()
    assert not api.direct.is_busy(targets[:1])


async def test_a_list_that_was_changed_since_its_answer_is_copied_as_it_is_now(host):
    api = await host.open()
    sources, targets = await host.ready(api, "direct")
    assert isinstance(sources, AddressList)
    sources.reverse()
    await api.transfer(D, sources, targets)
    assert host.read(1, targets) == host.read(0, sources)
    sources.append(sources.pop(0))
    await api.transfer(D, sources, targets)
    assert host.read(1, targets) == host.read(0, sources)
    assert counted(api) == (2, 0)


@pytest.mark.parametrize("given", [list, AddressList], ids=["in parts", "at once"])
async def test_pages_that_are_both_read_and_written_are_refused_where_their_way_is_mapped_too(host, given):
    """Otherwise it is chance what a page holds that was written before, or behind, its being read."""
    api = await host.open()
    pages = await api.alloc_mem(8, "hbm", D)
    for number, address in enumerate(pages):
        host.engines[1].write(address.page, content(bytes([number]) * 32))
    own, more = pages[:4], pages[4:]
    await api.transfer(D, own, more)  # by the mempool; begins to map them
    await host.mapped(api, own, more)
    host.in_parts(api)
    before = host.read(1, pages)
    for sources, targets in ((own, own[::-1]), (own, [own[1], *more[:3]]), ([*more[:3], own[0]], own)):
        with pytest.raises(InvalidRequest):
            await api.transfer(D, given(sources), given(targets))
        if given is AddressList:
            assert host.read(1, pages) == before
    assert counted(api)[0] == 0
    await api.transfer(D, given(own), given(more))
    assert host.read(1, more) == host.read(1, own)
    assert counted(api)[0] == 1
