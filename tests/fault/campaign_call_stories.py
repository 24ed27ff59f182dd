"""Stories of the nine calls, within a host and to another one, and of blocks that leave layer by layer."""

from collections.abc import Iterator

from shared.kv.block_hash import hash_blocks, pack_tokens
from shared.kv.page import PageState
from shared.wire.mempool_api import PageAddress, pack_list, unpack_addresses
from tests.fault.campaign_actors import BLOCK_TOKENS, NUM_RANKS
from tests.fault.campaign_host import Host
from tests.fault.campaign_host_actors import NUM_LAYERS
from tests.fault.campaign_host_instances import CallerInstance, HostInstance
from tests.fault.campaign_host_stories import fresh, until
from tests.fault.campaign_hosts import Hosts
from tests.fault.campaign_rig import Refused
from tests.fault.campaign_stories import HANDOFF_TTL_MS, Ended, expect, lease, make_room, read, release
from tests.integration.mempool_rig import SEED

TRANSFER_S = 20.0
KNOWN_S = 30.0


def _pages(addresses: list[PageAddress]) -> list[tuple[int, int]]:
    return [(address.page, address.epoch) for address in addresses]


def _alloc(
    world: Hosts, caller: CallerInstance, count: int, instance: HostInstance, mem_type: str = "hbm"
) -> list[PageAddress]:
    """Pages of an instance, noted as the caller's if they are of its own host."""
    host = world.host_of(caller)
    raw = caller.part("api").ask("alloc", count, mem_type, instance.name)
    caller.addresses.append(raw)
    found = unpack_addresses(raw)
    assert len(found) == count, found
    if instance in host.engines and not world.faulted:
        caller.owned.setdefault(instance.num_pages, {}).update(_pages(found))
    return found


def _free(caller: CallerInstance, addresses: list[PageAddress]) -> int:
    """Give them back; from the moment in which it is said they may be others'."""
    pages = {(a.page, a.epoch) for a in addresses}
    for owned in caller.owned.values():
        for page in [page for page, epoch in owned.items() if (page, epoch) in pages]:
            del owned[page]
    return caller.part("api").ask("free", pack_list(addresses))


def _transfer(
    world: Hosts, caller: CallerInstance, target: HostInstance, order: tuple[list, list, list[int]]
) -> Iterator[str]:
    """transfer(), or transfer_with_insert() with tokens, caught while pages are written. Returns the addresses."""
    api = caller.part("api")
    own, given, tokens = order
    name = "calls: transfer_with_insert" if tokens else "calls: transfer"
    view = world.host_of(target).view_of(target.num_pages)
    assert view is not None
    yield f"{name} sent"
    api.ask("transfer", target.name, pack_list(own), pack_list(given), tokens)
    if world.catch(lambda: bool(view.in_state(PageState.WRITING)), lambda: api.ask("done")):
        yield f"{name}, pages are written"
        world.thaw()
    until(world, lambda: api.ask("done"), "the transfer ends", TRANSFER_S)
    yield f"{name} answered"
    return unpack_addresses(api.ask("transferred"))


def _knows(world: Hosts, caller: CallerInstance, target: HostInstance) -> bool:
    """Whether the caller's mempool has heard of the other host's instance."""
    api = caller.part("api")
    found = api.ask("may_alloc", target.name)
    if found:
        api.ask("free", found)
    return bool(found)


def nine_calls(world: Hosts) -> Iterator[str]:
    """A caller allocates, has the pages written, transfers them twice, the second time by name, and frees all."""
    host: Host = world.rng.choice(world.hosts)
    is_far = world.rng.random() < 0.5
    source, caller = host.prefill, host.caller
    target = world.other(host).decode if is_far else host.decode
    if is_far and not world.faulted:
        yield "calls: the other host's instances are known"
        until(world, lambda: _knows(world, caller, target), "the other host is known", KNOWN_S)
    count = world.rng.randint(2, 4)
    tokens = [world.number() for _ in range(count * BLOCK_TOKENS)]
    hashes = [bytes(h) for h in hash_blocks(SEED, pack_tokens(tokens), BLOCK_TOKENS)]
    world.note_blocks(hashes, NUM_RANKS)
    yield "calls: alloc_mem sent"
    own = _alloc(world, caller, count, source)
    for number, rank in enumerate(source.ranks()):
        yield f"calls: bytes written, rank {number}"
        for half in (0, 1):
            rank.ask("write", _pages(own), hashes, half)
    yield "calls: alloc_mem at the target sent"
    given = _alloc(world, caller, count, target)
    sent = yield from _moved(world, caller, target, (own, given, []))
    expect(world, sent == given, "the pages are not where they were to be")
    if not world.faulted:
        read(target, _pages(sent), hashes)
    yield "calls: free_mem sent"
    num_freed = _free(caller, given)
    expect(world, num_freed == len(given), f"{num_freed} of {len(given)} pages were held")
    named = yield from _moved(world, caller, target, (own, [], tokens))
    if not world.faulted and not is_far and len(named) == count:
        yield "calls: match sent"
        found = unpack_addresses(caller.part("api").ask("match_at", target.name, tokens))
        expect(world, len(found) == count, f"{len(found)} blocks were found by name")
    yield "calls: free_mem of the sources sent"
    num_freed = _free(caller, own)
    expect(world, num_freed == len(own), f"{num_freed} of {len(own)} pages were held")


def _moved(
    world: Hosts,
    caller: CallerInstance,
    target: HostInstance,
    order: tuple[list, list, list[int]],
) -> Iterator[str]:
    """_transfer(); to another host it is a failure that a path is not made yet, and tried again."""
    for _ in range(100):
        found = yield from _transfer_or_code(world, caller, target, order)
        if isinstance(found, list):
            return found
        is_far = target not in world.host_of(caller).engines
        expect(world, is_far and "CopyFailed" in found and world.suspects, found)
    raise AssertionError("no transfer to the other host comes to an end")


def _transfer_or_code(world, caller, target, order) -> Iterator[str]:
    try:
        found = yield from _transfer(world, caller, target, order)
    except Refused as error:
        return str(error)
    return found


def free_all(world: Hosts) -> None:
    """Whatever a story left with a caller."""
    for host in world.hosts:
        caller = host.caller
        for raw in caller.addresses:
            caller.part("api").ask("free", raw)
        caller.forget()


# -- layer by layer -----------------------------------------------------------------------------------


def by_layer(world: Hosts) -> Iterator[str]:
    """Blocks leave while they are computed; of what the step does not seal no copy may be taken for a block."""
    host: Host = world.rng.choice(world.hosts)
    source, target = host.prefill, host.decode
    prompt, step = fresh(world), world.number()
    core = source.part("core")
    yield "layers: room is made"
    make_room(source, len(prompt.hashes))
    yield "layers: grant received"
    pages = [tuple(own) for own in core.ask("take", len(prompt.hashes))]
    source.writes.update(pages)
    expect(world, len(pages) == len(prompt.hashes), "too few pages")
    num_sealed = len(pages) - (world.rng.random() < 0.3)  # else the last block is given up
    yield "layers: Writing sent"
    core.ask("writing", pages)
    yield "layers: StepLayers sent"
    host.layered.add(prompt.handoff)
    core.ask("step_layers", prompt.handoff, target.name, step, pages, prompt.hashes, [])
    for layer in range(NUM_LAYERS):
        for number, rank in enumerate(source.ranks()):
            yield f"layers: layer {layer} written, rank {number}"
            rank.ask("write_layer", pages, prompt.hashes, step, layer, num_sealed)
    yield "layers: Sealed sent"
    for page, _ in pages[:num_sealed]:
        source.writes.pop(page, None)
    core.ask("seal", pages[:num_sealed], prompt.hashes[:num_sealed], prompt.parents[:num_sealed])
    for (page, epoch), block_hash in reversed(list(zip(pages, prompt.hashes, strict=True))[:num_sealed]):
        source.sealed[page] = (epoch, block_hash)
    yield "layers: LayersSealed sent"
    core.ask("layers_sealed", step, pages[:num_sealed])
    if num_sealed < len(pages):
        yield "layers: GiveBack sent"
        source.writes.pop(pages[-1][0], None)
        core.ask("give_back", pages[num_sealed:])
    yield "layers: HandoffReady sent"
    core.ask("ready", prompt.handoff, prompt.hashes[:num_sealed], HANDOFF_TTL_MS)
    got = yield from lease(world, target, prompt.hashes, prompt.handoff)
    host.layered.discard(prompt.handoff)
    if got is None:
        raise Ended("nothing came")
    expect(world, len(got.pages) == num_sealed, f"{len(got.pages)} blocks of {num_sealed} that were sealed")
    yield "layers: Release sent"
    release(target, got)


def end_layers(world: Hosts) -> None:
    """Readers of what a story left will not come."""
    for host in world.hosts:
        for handoff in list(host.layered):
            host.decode.part("front").ask("drop_handoff", handoff)
        host.layered.clear()
