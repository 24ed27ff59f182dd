"""The protocol as scripts: each yields the name of the step that it is about to take.

A step that a fault made impossible raises Gone, Refused or Ended; before any fault of an episode nothing may. What
is read is compared in every case: there is no fault that excuses a wrong byte.
"""

import time
from collections.abc import Iterator

from tests.fault.campaign_actors import Owned
from tests.fault.campaign_instances import CopyInstance, Instance, Lease, PageInstance
from tests.fault.campaign_prompt import Prompt
from tests.fault.campaign_rig import Refused
from tests.fault.campaign_world import KILL, World

MAX_IN_USE = 8  # pages that an engine keeps of its share, before it lets go of old ones
HANDOFF_TTL_MS = LEASE_TTL_MS = 500
HANDOFF_WAIT_MS = 1_500
GRANT_S = 30.0
PATIENCE_S = 0.2


class Ended(Exception):
    """A fault made the rest of the story impossible, in a way that engines cope with: they compute."""


def expect(world: World, condition: bool, what: str) -> None:
    """Without a fault, and in time, it must be so; else the story may end here."""
    assert condition or world.faulted or world.late, what
    if not condition:
        raise Ended(what)


# -- engines that work in the pages -------------------------------------------------------------------


def lease(world: World, instance: PageInstance, hashes: list[bytes], handoff: str) -> Iterator[str]:
    """The front leases, the core takes the lease over, the ranks read. Returns the lease, if any."""
    front, core = instance.part("front"), instance.part("core")
    yield "Acquire sent"
    instance.acquiring = True
    front.ask("acquire", hashes, handoff, HANDOFF_WAIT_MS if handoff else 0, 0)
    return (yield from leased(world, instance, hashes, front, core))


def leased(world: World, instance: PageInstance, hashes: list[bytes], front, core) -> Iterator[str]:
    yield "Acquired received"
    lease_id, pages = front.ask("acquired")
    instance.acquiring = False
    if not lease_id:
        return None
    got = Lease(lease_id, pages)
    if core.ask(
        "made", lease_id
    ):  # else a mempool did that died meanwhile: its successor knows of no such pin
        instance.leases[lease_id] = got
    yield "lease handed to the core"
    if not core.ask("take_lease", lease_id, pages):
        instance.leases.pop(lease_id, None)
        front.ask("release", lease_id)
        return None
    got.ours = True
    instance.leases[lease_id] = got
    yield "reading"
    read(instance, pages, hashes[: len(pages)])
    return got


def read(instance: PageInstance, pages: list[Owned], hashes: list[bytes]) -> None:
    """Every rank looks at the pages themselves."""
    for rank in instance.ranks():
        found = rank.ask("read", pages, hashes)
        assert all(found), (
            f"{instance.name} {rank.role} read wrong bytes: {list(zip(pages, found, strict=True))}"
        )


def compute(world: World, instance: PageInstance, hashes: list[bytes], parents: list[bytes]) -> Iterator[str]:
    """Write blocks into granted pages on every rank, and seal them. Returns the pages."""
    core = instance.part("core")
    yield "Unpin sent"
    make_room(instance, len(hashes))
    yield "grant received"
    pages = [tuple(own) for own in core.ask("take", len(hashes))]
    instance.writes.update(pages)
    expect(world, len(pages) == len(hashes), f"{instance.name} was granted {len(pages)} of {len(hashes)}")
    yield "Writing sent"
    core.ask("writing", pages)
    for half in (0, 1):
        for number, rank in enumerate(instance.ranks()):
            yield f"{('half of the bytes', 'all bytes')[half]} written, rank {number}"
            rank.ask("write", pages, hashes, half)
    yield "Sealed sent"
    for page, _ in pages:  # from here on nobody writes them, also if the core dies before it says so
        instance.writes.pop(page, None)
    core.ask("seal", pages, hashes, parents)
    for (page, epoch), block_hash in reversed(list(zip(pages, hashes, strict=True))):
        instance.sealed[page] = (epoch, block_hash)  # the last block of a prompt is the first to be let go
    return pages


def make_room(instance: PageInstance, count: int) -> None:
    """Let go of the oldest sealed pages, so that so many more are within the engine's share."""
    spare = max(0, len(instance.sealed) + count - MAX_IN_USE)
    unpin(instance, list(instance.sealed)[:spare])


def unpin(instance: PageInstance, pages: list[int]) -> None:
    """Say that nobody here uses these any more."""
    owned = [(page, instance.sealed.pop(page)[0]) for page in pages]
    if owned:
        instance.part("core").ask("unpin", owned)


def release(instance: PageInstance, got: Lease | None) -> None:
    """The core is done with a lease, if there is one and it is not over already."""
    if got is not None and instance.leases.pop(got.lease_id, None) is not None:
        instance.part("core").ask("release", got.lease_id)


def handoff_in_pages(world: World) -> Iterator[str]:
    """Prefill computes a prompt beside what it finds; decode continues in the same pages."""
    source, target = world.rng.sample([world.prefill, world.decode], 2)
    prompt = Prompt(world, "pages", source.num_ranks)
    early = world.rng.random() < 0.5
    found = yield from lease(world, source, prompt.hashes[:-1], "")
    num_found = len(found.pages) if found else 0
    front, core = target.part("front"), target.part("core")
    asked_s = time.monotonic()
    if early:
        yield "Acquire sent before the handoff is ready"
        target.acquiring = True
        front.ask("acquire", prompt.hashes, prompt.handoff, HANDOFF_WAIT_MS, 0)
    yield from compute(world, source, prompt.hashes[num_found:], prompt.parents[num_found:])
    yield "HandoffReady sent"
    ready_s = time.monotonic()
    source.part("core").ask("ready", prompt.handoff, prompt.hashes, HANDOFF_TTL_MS)
    if early:
        got = yield from leased(world, target, prompt.hashes, front, core)
        world.is_late(asked_s, HANDOFF_WAIT_MS)
    else:
        got = yield from lease(world, target, prompt.hashes, prompt.handoff)
    world.is_late(ready_s, HANDOFF_TTL_MS)  # also early: the front may send its call long after it is told to
    got = got or Lease("", [])
    expect(world, len(got.pages) == len(prompt.hashes), "decode found less than all")
    yield "prefill: Release sent"
    release(source, found)
    yield from compute(world, target, [prompt.answer], prompt.hashes[-1:])
    yield "reading all, behind the writes"
    read(target, got.pages, prompt.hashes)
    read(
        target,
        [(page, epoch) for page, (epoch, _) in target.sealed.items()],
        [block_hash for _, block_hash in target.sealed.values()],
    )
    yield from drop(world)
    read(target, got.pages, prompt.hashes)
    yield "decode: Release sent"
    release(target, got)
    yield "GiveBack sent"
    spare = [tuple(own) for own in core.ask("take", 1)]
    core.ask("give_back", spare)
    yield "Unpin of the rest"
    for instance in (source, target):
        unpin(instance, [page for page in list(instance.sealed) if world.rng.random() < 0.4])


# -- engines that copy --------------------------------------------------------------------------------


def save(world: World, instance: CopyInstance, prompt: Prompt) -> Iterator[str]:
    """Copy blocks into granted pages, and seal them."""
    engine, hashes = instance.part("engine"), prompt.hashes
    yield "copy: grant received"
    pages: list[Owned] = []
    began = time.monotonic()

    def enough() -> bool:
        if time.monotonic() - began > PATIENCE_S:  # what it has in hand of before cannot be taken again
            engine.ask("let_go_of_earlier")
        pages.extend(tuple(own) for own in engine.ask("take", len(hashes) - len(pages)))
        return len(pages) == len(hashes) or (world.faulted and engine.ask("is_lost"))

    try:
        world.clock.until(enough, f"{len(hashes)} pages for {instance.name}", GRANT_S)
    except AssertionError as error:
        raise AssertionError(f"{error}: {world.oracle.settled()}") from None
    if not world.faulted:  # else its link may have been cut meanwhile, and they are lost
        instance.writes.update(pages)
    expect(world, len(pages) == len(hashes), "too few pages")
    yield "copy: Writing sent"
    engine.ask("writing", pages)
    for half in (0, 1):
        yield f"copy: {('half of the bytes', 'all bytes')[half]} written"
        engine.ask("write", pages, hashes, half)
    yield "copy: Sealed sent"
    instance.writes.clear()
    engine.ask("seal", pages, hashes, prompt.parents)
    yield "copy: HandoffReady sent"
    instance.ready_s = time.monotonic()
    engine.ask("ready", prompt.handoff, hashes, HANDOFF_TTL_MS)


def handoff_by_copy(world: World) -> Iterator[str]:
    """One engine copies blocks into pages, another copies them out under the seqlock rule."""
    source, target = world.copy_prefill, world.copy_decode
    prompt = Prompt(world, "copy", 1)
    front, engine = target.part("front"), target.part("engine")
    evicted_before = num_evicted(world)
    yield from save(world, source, prompt)
    yield from drop(world)  # a handoff's blocks are pinned
    leased_s = time.monotonic()
    lease_id, pages = yield from lease_to_copy(target, prompt)
    world.is_late(source.ready_s, HANDOFF_TTL_MS)
    # nobody pins a copying engine's blocks between Sealed and HandoffReady
    is_all = len(pages) == len(prompt.hashes) or num_evicted(world) > evicted_before
    expect(world, is_all, "the copying decode found less than all")
    yield "copy: reading, half copied"
    target.copying = True
    engine.ask("begin_copy", pages, prompt.hashes[: len(pages)])
    yield from drop(world)
    yield "copy: reading, all copied"
    check_copies(world, target, is_leased=True, since_s=leased_s)
    yield "copy: Release sent"
    if lease_id:
        front.ask("release", lease_id)
    yield "copy: GiveBack sent"
    spare = [tuple(own) for own in engine.ask("take", 1)]
    engine.ask("give_back", spare)


def num_evicted(world: World) -> int:
    """Pages that the pool has evicted so far."""
    status = world.oracle.status()
    return status.counters.get("pages_evicted", 0) if status is not None else 0


def lease_to_copy(target: CopyInstance, prompt: Prompt) -> Iterator[str]:
    """The front leases for a while. Returns lease and pages."""
    front = target.part("front")
    yield "copy: Acquire sent"
    target.acquiring = True
    front.ask("acquire", prompt.hashes, prompt.handoff, HANDOFF_WAIT_MS, LEASE_TTL_MS)
    yield "copy: Acquired received"
    lease_id, pages = front.ask("acquired")
    target.acquiring = False
    return lease_id, pages


def copy_without_lease(world: World) -> Iterator[str]:
    """A reader whose lease is over in the middle of its copies, while the pages are used anew."""
    source, target = world.copy_prefill, world.copy_decode
    prompt = Prompt(world, "copy", 1)
    yield from save(world, source, prompt)
    lease_id, pages = yield from lease_to_copy(target, prompt)
    yield "copy: reading, half copied"
    target.copying = True
    target.part("engine").ask("begin_copy", pages, prompt.hashes[: len(pages)])
    yield "copy: Release sent"
    if lease_id:
        target.part("front").ask("release", lease_id)
    for _ in range(3):
        yield from drop(world, always=True)
        yield from save(world, source, Prompt(world, "copy", 1))
    yield "copy: reading, all copied"
    check_copies(world, target, is_leased=False)


def drop(world: World, *, always: bool = False) -> Iterator[str]:
    """Somebody empties the pool: only pins keep a block now."""
    if always or world.rng.random() < 0.4:
        yield "Delete sent"
        world.drop_unpinned()


def check_copies(world: World, instance: CopyInstance, *, is_leased: bool, since_s: float = 0.0) -> None:
    """What the seqlock calls good must be right; while nothing went wrong it must call leased pages good.

    Args: since_s: the lease is not older than that.
    """
    instance.copying = False
    found = instance.part("engine").ask("end_copy")
    is_leased = is_leased and not world.is_late(since_s, LEASE_TTL_MS)
    for is_good, is_right, what in found:
        assert is_right or not is_good, f"{instance.name} believed a wrong copy of {what}"
        world.counters["copies good" if is_good else "copies refused"] += 1
        assert is_good or not is_leased or world.faulted, f"{instance.name} refused a good copy of {what}"


def detach(world: World) -> Iterator[str]:
    """A copying engine that ends with a word: what it was granted is free at once."""
    instance: CopyInstance = world.rng.choice([world.copy_prefill, world.copy_decode])
    engine = instance.part("engine")
    instance.writes.update(tuple(own) for own in engine.ask("take", 2))
    yield "copy: Detach sent"
    instance.writes.clear()
    world.damaged = world.faulted = True
    try:
        engine.ask("detach")
    finally:  # it never attaches again
        world.end(instance)
    yield from world.recovery()


# -- restarts -----------------------------------------------------------------------------------------


def takeover(world: World) -> Iterator[str]:
    """The mempool dies in the middle of a handoff; the next one takes over; the handoff goes on."""
    inner = world.rng.choice([handoff_in_pages, handoff_in_pages, handoff_by_copy])(world)
    for _ in range(world.rng.randint(1, 14)):
        if next(inner, None) is None:
            break
    yield "mempool dies"
    world.hit("mempool", KILL)
    before = [instance.incarnation for instance in world.instances]
    if world.rng.random() < 0.3:
        world.hit(world.rng.choice([name for i in world.instances for name in i.parts]), "stop")
    yield from world.recovery()
    world.damaged = False
    yield from drop(world)
    if before == [instance.incarnation for instance in world.instances]:
        for step in inner:
            yield f"after a takeover: {step}"


def replacement(world: World) -> Iterator[str]:
    """One process of an instance dies while it holds pages; its supervisor starts the instance anew."""
    instance: Instance = world.rng.choice(world.instances)
    if isinstance(instance, PageInstance):
        prompt = Prompt(world, "pages", instance.num_ranks)
        steps = compute(world, instance, prompt.hashes, prompt.parents)
    else:
        assert isinstance(instance, CopyInstance)
        steps = save(world, instance, Prompt(world, "copy", 1))
    for _ in range(world.rng.randint(3, 8)):
        if next(steps, None) is None:
            break
    yield "a process dies"
    world.hit(world.rng.choice(list(instance.parts)), KILL)
    yield from world.recovery()
    world.damaged = False


# -- between stories ----------------------------------------------------------------------------------


def tidy(world: World) -> None:
    """Whatever a story left: let it go, as the end of its requests would. Raises: Gone, Refused."""
    for instance in world.instances:
        if instance.acquiring:
            instance.acquiring = False
            lease_id, _ = instance.part("front").ask("acquired")
            if lease_id:
                instance.part("front").ask("release", lease_id)
        if isinstance(instance, PageInstance):
            tidy_core(instance)
        elif isinstance(instance, CopyInstance):
            if instance.copying:
                check_copies(world, instance, is_leased=False)
                instance.await_links(world.clock)
            instance.writes = {}
            instance.part("engine").ask("give_all_back")
            if world.rng.random() < 0.5:  # else a request outlives several attachments, with its pages
                instance.part("engine").ask("let_go_of_earlier")


def tidy_core(instance: PageInstance) -> None:
    """Its leases and what it was about to write."""
    core = instance.part("core")
    for got in list(instance.leases.values()):
        if got.ours:
            release(instance, got)
        else:
            del instance.leases[got.lease_id]
            instance.part("front").ask("release", got.lease_id)
    if instance.writes:
        pages, instance.writes = list(instance.writes.items()), {}
        core.ask("give_back", pages)


STORIES = {
    "pages": (handoff_in_pages, 8),
    "copy": (handoff_by_copy, 3),
    "copy without lease": (copy_without_lease, 2),
    "takeover": (takeover, 4),
    "replacement": (replacement, 2),
    "detach": (detach, 1),
}
__all__ = ["STORIES", "Ended", "Refused", "tidy"]
