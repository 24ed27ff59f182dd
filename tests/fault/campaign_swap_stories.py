"""Stories of blocks that leave for host memory or lent pages while their request is parked, and come back."""

import time
from collections.abc import Iterator

from shared.kv.page import PageState
from tests.fault.campaign_actors import NUM_RANKS
from tests.fault.campaign_host import DRAM_PAGES, Host
from tests.fault.campaign_host_instances import HostInstance
from tests.fault.campaign_host_stories import fresh, until
from tests.fault.campaign_hosts import Hosts
from tests.fault.campaign_prompt import Prompt
from tests.fault.campaign_rig import PAGE_BYTES
from tests.fault.campaign_stories import Ended, compute, expect, make_room, read, unpin

NUM_LENT = 6
ANSWER_S = 15.0
OUT_TIMEOUT_MS = (
    500  # of copies out, a setting's default: a machine that is slower than that leaves blocks here
)


def _swap_out(world: Hosts, instance: HostInstance, prompt: Prompt, *, is_lent: bool) -> Iterator[str]:
    """Have a prompt's blocks kept elsewhere; returns the swap's number. What is kept is unpinned here."""
    host, core, number = world.host_of(instance), instance.part("core"), world.number()
    dram = host.view_of(DRAM_PAGES)
    assert dram is not None
    yield "swap: SwapOut sent"
    asked_s = time.monotonic()
    instance.away[number] = prompt.hashes
    core.ask("swap_out", number, prompt.hashes)
    answer: list[list[bool]] = []

    def is_answered() -> bool:
        found = core.ask("swapped_out", number)
        if found is not None:
            answer.append(found)
        return bool(answer) or (world.faulted and core.ask("is_lost"))

    if not is_lent and world.catch(lambda: bool(dram.in_state(PageState.WRITING)), is_answered):
        yield "swap: copies to host memory under way"
        world.thaw()
    if not answer:
        until(world, is_answered, "SwappedOut", ANSWER_S)
    yield "swap: SwappedOut received"
    if not answer:
        raise Ended("the mempool is gone")
    world.is_late(asked_s, OUT_TIMEOUT_MS)
    kept = {h for h, is_kept in zip(prompt.hashes, answer[0], strict=True) if is_kept}
    expect(world, len(kept) == len(prompt.hashes), f"{len(kept)} of {len(prompt.hashes)} blocks are kept")
    if not is_lent and not world.faulted:
        instance.kept |= kept
    world.counters["blocks swapped out"] += len(kept)
    unpin(instance, [page for page, (_, h) in list(instance.sealed.items()) if h in kept])
    return number


def _swap_in(
    world: Hosts, instance: HostInstance, prompt: Prompt, number: int, *, may_lose: bool
) -> Iterator[str]:
    """Bring them back, and read them. What is lost without a fault must not be."""
    core = instance.part("core")
    yield "swap: room is made"
    make_room(instance, len(prompt.hashes))
    yield "swap: SwapIn sent"
    instance.kept -= set(prompt.hashes)
    instance.coming[number] = prompt
    given = core.ask("swap_in", number, prompt.hashes)
    expect(world, given == len(prompt.hashes), f"{given} pages for {len(prompt.hashes)} blocks")
    found: list[list] = []
    until(world, lambda: _have_come(instance, number, found), "SwappedIn", ANSWER_S)
    yield "swap: SwappedIn received"
    if not found:
        raise Ended("the mempool is gone")
    here = [(tuple(own), h) for own, h in zip(found[0], prompt.hashes, strict=True) if own is not None]
    read(instance, [own for own, _ in here], [h for _, h in here])
    num_lost = len(prompt.hashes) - len(here)
    world.counters["blocks swapped in"] += len(here)
    world.counters["blocks lost on the way"] += num_lost
    expect(world, may_lose or not num_lost, f"{num_lost} blocks were lost")


def _have_come(instance: HostInstance, number: int, found: list[list]) -> bool:
    """Whether the blocks of a SwapIn are the engine's, those that come, or never will be."""
    core, prompt = instance.part("core"), instance.coming.get(number)
    if prompt is None:
        return True
    answer = core.ask("swapped_in", number, prompt.hashes, prompt.parents)
    if answer is None:
        return core.ask("is_lost")
    found.append(answer)
    del instance.coming[number]
    instance.away.pop(number, None)
    for own, block_hash in zip(answer, prompt.hashes, strict=True):
        if own is not None:
            instance.sealed[own[0]] = (own[1], block_hash)
    return True


def _others(world: Hosts, instance: HostInstance) -> Iterator[str]:
    """What it computes meanwhile takes the pages that are free now."""
    for _ in range(world.rng.randint(1, 3)):
        other = fresh(world)
        yield from compute(world, instance, other.hashes, other.parents)


def swap(world: Hosts) -> Iterator[str]:
    """A request is parked in host memory; across a crash of the mempool it is said again what is parked."""
    host: Host = world.rng.choice(world.hosts)
    instance: HostInstance = world.rng.choice(host.engines)
    prompt = fresh(world)
    yield from compute(world, instance, prompt.hashes, prompt.parents)
    number = yield from _swap_out(world, instance, prompt, is_lent=False)
    yield "swap: Delete sent"
    host.drop_unpinned()
    yield from _others(world, instance)
    boot = host.mempool.since
    if world.faulted and world.rng.random() < 0.5:  # as after a loss: it says again what it has elsewhere
        number = yield from _swap_out_again(world, instance, prompt)
    if world.rng.random() < 0.2:
        yield "swap: SwapDrop sent"
        instance.kept -= set(prompt.hashes)
        instance.part("core").ask("swap_drop", number)
        instance.away.pop(number, None)
        return
    yield from _swap_in(world, instance, prompt, number, may_lose=host.mempool.since != boot)
    yield from _others(world, instance)


def _swap_out_again(world: Hosts, instance: HostInstance, prompt: Prompt) -> Iterator[str]:
    core, number = instance.part("core"), world.number()
    yield "swap: SwapOut said once more"
    instance.away[number] = prompt.hashes
    core.ask("swap_out", number, prompt.hashes)
    found: list[list[bool]] = []

    def is_answered() -> bool:
        answer = core.ask("swapped_out", number)
        if answer is not None:
            found.append(answer)
        return bool(found) or core.ask("is_lost")

    until(world, is_answered, "SwappedOut", ANSWER_S)
    return number


# -- lent pages ---------------------------------------------------------------------------------------


def swap_to_lent_pages(world: Hosts) -> Iterator[str]:
    """A request is parked in another engine's pages, which wants them back meanwhile, or does not."""
    host: Host = world.rng.choice(world.hosts)
    consumer, producer = host.prefill, host.decode
    prompt = fresh(world)
    yield from compute(world, consumer, prompt.hashes, prompt.parents)
    offer = world.number()
    yield "lent: offer and grant presented"
    until(world, lambda: _lends(host, offer), "pages are lent", ANSWER_S)
    producer.lent.add(offer)
    swap_number = yield from _swap_out(world, consumer, prompt, is_lent=True)
    yield "lent: Delete sent"
    host.drop_unpinned()
    yield from _others(world, consumer)
    when = world.rng.choice(["never", "soon", "in time"])
    if when != "never":
        yield "lent: reclaim presented"
        deadline_ms = world.rng.choice([0, 20]) if when == "soon" else 10_000
        producer.part("front").ask("reclaim", offer, deadline_ms)
        producer.lent.discard(offer)
        if when == "in time":
            until(world, lambda: not _num_lent(host, producer), "lent pages return", ANSWER_S)
            yield "lent: Delete sent, blocks in host memory"
            host.drop_unpinned()
        yield "lent: the producer computes"
        yield from _others(world, producer)
    yield from _swap_in(world, consumer, prompt, swap_number, may_lose=when == "soon")
    if when == "never":
        yield "lent: reclaim presented at the end"
        producer.lent.discard(offer)
        producer.part("front").ask("reclaim", offer, 0)
        until(world, lambda: not _num_lent(host, producer), "lent pages return", ANSWER_S)
        yield "lent: all pages returned"


def _lends(host: Host, offer: int) -> bool:
    """Whether the producer's pages are the consumer's for a while; its engine may have to give some back first."""
    consumer, producer = host.prefill, host.decode
    for engine in (consumer, producer):
        engine.part("core").ask("absorb")
    space = host.spaces.number_of(producer.num_pages)
    size = NUM_LENT * PAGE_BYTES * NUM_RANKS
    code, num_bytes = producer.part("front").ask("lend", offer, host.name, space, size, consumer.name)
    return not code and num_bytes == size


def _num_lent(host: Host, producer: HostInstance) -> int:
    view = host.view_of(producer.num_pages)
    return 0 if view is None else len(view.in_state(PageState.LEASED))


def end_swaps(world: Hosts) -> None:
    """Whatever a story left parked, or lent."""
    for host in world.hosts:
        for instance in host.engines:
            for number in list(instance.coming):
                world.clock.until(lambda i=instance, n=number: _have_come(i, n, []), "SwappedIn", ANSWER_S)
            instance.coming.clear()
            for number in list(instance.away):
                del instance.away[number]
                instance.kept = set()
                instance.part("core").ask("swap_drop", number)
            for offer in list(instance.lent):
                instance.part("front").ask("reclaim", offer, 0)
            instance.lent.clear()
