"""Stories on two hosts: blocks that one mempool pulls from another, and memory that goes to the system and comes back.

As in campaign_stories.py. Between two steps a story looks at the memory itself without a pause, and stops both
mempools at what it waits for: so that faults hit the moments that last microseconds, too.
"""

import time
from collections.abc import Callable, Iterator

from shared.kv.page import PageState
from tests.fault.campaign_actors import NUM_RANKS
from tests.fault.campaign_host import MAX_TTL_MS, Host
from tests.fault.campaign_host_instances import HostInstance
from tests.fault.campaign_hosts import Hosts
from tests.fault.campaign_prompt import Prompt
from tests.fault.campaign_rig import PAGE_BYTES
from tests.fault.campaign_stories import (
    HANDOFF_TTL_MS,
    Ended,
    compute,
    expect,
    leased,
    read,
    release,
    unpin,
)

REMOTE_WAIT_MS = 4_000
LONGEST = 7
WARM_S = 40.0  # until a path is there again
PRESS_S = 20.0


def until(world: Hosts, condition: Callable[[], object], what: str, timeout_s: float = PRESS_S) -> None:
    """As Clock.until(). Raises: Ended when it takes too long after a fault, or a service is dead."""
    try:
        world.clock.until(lambda: _or_gone(world, condition), what, timeout_s)
    except AssertionError as error:
        if not world.faulted:
            raise
        raise Ended(str(error)) from None


def _or_gone(world: Hosts, condition: Callable[[], object]) -> bool:
    world.guard()
    return bool(condition())


# -- blocks of another host ---------------------------------------------------------------------------


def _far_lease(world: Hosts, source: HostInstance, target: HostInstance, prompt: Prompt) -> Iterator[str]:
    """The mempool of the target's host pulls the prompt, caught where its bytes come. Returns the lease, if any."""
    reader = world.host_of(target)
    front, core = target.part("front"), target.part("core")
    address = source.part("front").ask("peer_address")
    yield "remote: Acquire sent"
    target.acquiring = True
    front.ask("acquire_from", prompt.hashes, prompt.handoff, REMOTE_WAIT_MS, address)
    view = reader.view_of(target.num_pages)
    assert view is not None

    def is_over() -> bool:
        return front.ask("has_acquired")

    def coming() -> list[int]:
        return view.in_state(PageState.WRITING)

    if world.catch(lambda: bool(coming()), is_over):
        yield "remote: pages claimed, bytes under way"
        world.thaw()

    def all_here() -> bool:
        pages = coming()
        return bool(pages) and all(
            any(view.holds(page, 0, h, NUM_RANKS) for h in prompt.hashes) for page in pages
        )

    if world.catch(all_here, is_over):
        yield "remote: all bytes here, epochs not checked"
        world.thaw()
    return (yield from leased(world, target, prompt.hashes, front, core))


def far_compute(world: Hosts, source: HostInstance, prompt: Prompt) -> Iterator[str]:
    """At the source: computed, sealed, handed over."""
    yield from compute(world, source, prompt.hashes, prompt.parents)
    yield "remote: HandoffReady sent"
    source.part("core").ask("ready", prompt.handoff, prompt.hashes, HANDOFF_TTL_MS)


def warm(world: Hosts, source: HostInstance, target: HostInstance) -> Iterator[str]:
    """After a loss the path is made anew: blocks come again, within a time that is no miss but a failure."""
    began_s = time.monotonic()
    while world.suspects and not world.faulted:
        assert time.monotonic() - began_s < WARM_S, "no path to the other host any more"
        prompt = fresh(world)
        yield from compute(world, source, prompt.hashes, prompt.parents)
        got = yield from _far_lease(world, source, target, prompt)
        if got is not None and len(got.pages) == len(prompt.hashes) and not world.faulted:
            world.suspects = False
        release(target, got)
        if world.suspects:
            time.sleep(0.1)


def fresh(world: Hosts) -> Prompt:
    """Blocks that nobody has."""
    names = [f"fresh {world.number()}" for _ in range(world.rng.randint(3, LONGEST))]
    return Prompt(world, "far", NUM_RANKS, names=names)


def remote_pull(world: Hosts) -> Iterator[str]:
    """One host computes, the other one's mempool pulls; what comes is read, and stays when the source is gone."""
    giver, taker = world.rng.sample(world.hosts, 2)
    source, target = giver.prefill, taker.decode
    yield from warm(world, source, target)
    prompt = fresh(world)
    yield from far_compute(world, source, prompt)
    asked_s = time.monotonic()
    got = yield from _far_lease(world, source, target, prompt)
    world.is_late(asked_s, REMOTE_WAIT_MS)
    expect(world, got is not None and len(got.pages) == len(prompt.hashes), "less came than all")
    assert got is not None
    yield "remote: the source lets go"
    unpin(source, list(source.sealed))
    yield "remote: Delete sent"
    world.drop_unpinned()
    yield from compute(world, target, [prompt.answer], prompt.hashes[-1:])
    read(target, got.pages, prompt.hashes)
    yield "remote: Release sent"
    release(target, got)


def pins_end_early(world: Hosts) -> Iterator[str]:
    """The reader stands still while the source's pins end and its pages are used anew: only the epochs tell."""
    giver, taker = world.rng.sample(world.hosts, 2)
    source, target = giver.prefill, taker.decode
    yield from warm(world, source, target)
    prompt = fresh(world)
    front, core = target.part("front"), target.part("core")
    yield "early: Acquire sent"
    target.acquiring = True
    address = source.part("front").ask("peer_address")
    front.ask("acquire_from", prompt.hashes, prompt.handoff, REMOTE_WAIT_MS, address)
    yield from compute(world, source, prompt.hashes, prompt.parents)
    yield "early: the reader stands still"
    world.freeze(taker, for_s=1.2)
    yield "early: HandoffReady sent"
    source.part("core").ask("ready", prompt.handoff, prompt.hashes, HANDOFF_TTL_MS)
    ready_s = time.monotonic()
    until(world, lambda: time.monotonic() - ready_s > MAX_TTL_MS / 1e3 + 0.02, "the pins' time is over")
    yield "early: the source lets go"
    unpin(source, list(source.sealed))
    yield "early: Delete sent"
    giver.drop_unpinned(always=True)
    for _ in range(3):
        other = fresh(world)
        yield from compute(world, source, other.hashes, other.parents)
    yield "early: the reader goes on"
    world.thaw()
    got = yield from leased(world, target, prompt.hashes, front, core)
    world.counters["early: blocks that came" if got else "early: misses"] += 1
    yield "early: Release sent"
    release(target, got)


# -- memory under pressure ----------------------------------------------------------------------------


def released(host: Host, instance: HostInstance) -> int:
    """Pages of its space that have no memory."""
    view = host.view_of(instance.num_pages)
    return 0 if view is None else len(view.in_state(PageState.RELEASED))


def pressed(world: Hosts, instance: HostInstance) -> Iterator[str]:
    """The engine answers what it is asked, until ReleaseMemory or RegainMemory is answered. Returns the answer."""
    front, core = instance.part("front"), instance.part("core")
    is_told = False
    began_s = time.monotonic()
    while not front.ask("done"):
        world.clock.tick()
        world.guard()
        if time.monotonic() - began_s > PRESS_S:
            raise AssertionError("a call about memory is never answered")
        asked = [tuple(own) for own in core.ask("asked")]
        leased = {page for lease in instance.leases.values() for page, _ in lease.pages}
        spare = [(page, epoch) for page, epoch in asked if page in instance.sealed and page not in leased]
        if asked and not is_told:
            is_told = True
            yield "release: Vacate received"
        for page, _ in spare:
            instance.sealed.pop(page, None)
        core.ask("vacate", spare)
        time.sleep(0.002)
    found = front.ask("changed")
    return None if found is None else tuple(found)


def memory_released(world: Hosts) -> Iterator[str]:
    """Memory goes back to the system while the engine works on, and comes again."""
    host = world.rng.choice(world.hosts)
    instance: HostInstance = world.rng.choice(host.engines)
    prompt = Prompt(world, "far", NUM_RANKS, LONGEST)
    yield from compute(world, instance, prompt.hashes, prompt.parents)
    kept = list(instance.sealed)[-2:]
    if world.rng.random() < 0.5:
        yield "release: Unpin sent"
        unpin(instance, [page for page in list(instance.sealed) if page not in kept])
    front = instance.part("front")
    wanted = world.rng.choice([4, instance.num_pages // 2, instance.num_pages])
    yield "release: ReleaseMemory sent"
    front.ask("press", wanted * PAGE_BYTES * NUM_RANKS, False)
    view = host.view_of(instance.num_pages)
    assert view is not None
    if world.catch(lambda: bool(view.in_state(PageState.WITHDRAWN)), lambda: front.ask("done")):
        yield "release: pages withdrawn, memory not gone"
        world.thaw()
    answer = yield from pressed(world, instance)
    expect(world, answer is not None, "ReleaseMemory was not answered")
    yield "release: MemoryChanged received"
    num_gone = released(host, instance)
    expect(
        world, num_gone > 0 and num_gone * PAGE_BYTES * NUM_RANKS == answer[1], f"{answer}, {num_gone} gone"
    )
    world.counters["pages released"] += num_gone
    few = Prompt(world, "far", NUM_RANKS, 3)
    if instance.num_pages - num_gone > 12:  # else its share of what is left may be full
        yield from compute(world, instance, few.hashes, few.parents)
    yield "release: RegainMemory sent"
    front.ask("press", 0, True)
    answer = yield from pressed(world, instance)
    yield "release: all is back"
    expect(world, answer is not None and answer[1] == 0, f"{answer} is not all")
    expect(world, not released(host, instance), "pages without memory after all of it was regained")
    more = Prompt(world, "far", NUM_RANKS, LONGEST)
    yield from compute(world, instance, more.hashes, more.parents)


def regain(world: Hosts) -> None:
    """Whatever a story left without memory gets it again."""
    for host in world.hosts:
        for instance in host.engines:
            if not released(host, instance):
                continue

            def is_back(host: Host = host, instance: HostInstance = instance) -> bool:
                instance.part("front").ask("press", 0, True)
                for _ in pressed(world, instance):
                    pass
                return not released(host, instance)

            world.clock.until(is_back, "memory comes back", PRESS_S)
