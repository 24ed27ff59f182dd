"""Places of tensors over both kinds of pages, a memfd's and a GPU's (faked, and real where there is one): an address
stays while the pages behind it change, and nobody gets another's."""

import random
import weakref

import pytest
import torch

from shared.aqua.local_memory import LocalMemory
from shared.errors import OutOfPages
from shared.vmm.errors import BadMapping
from tests.support import vmm_backends

NUM_PAGES, NUM_PLACES = 6, 16


@pytest.fixture(params=vmm_backends.NAMES)
def backend(request):
    made = vmm_backends.make(request.param)
    if made is None:
        pytest.skip("no GPU here")
    yield made
    made.close()


@pytest.fixture
def memory(backend):
    source = backend.pages(NUM_PAGES)
    made = LocalMemory(source.window(NUM_PLACES), torch.device("cpu"))
    yield made
    made.close()
    source.close()


def test_the_address_stays_and_shows_the_pages_of_the_moment(backend, memory):
    first = memory.take(2)
    at = memory.address(first)
    memory.map(first, [3, 1])
    backend.write(at, b"one")
    backend.write(at + backend.page_bytes, b"two")
    memory.unmap(first, 2)
    memory.map(first, [5, 0])
    backend.write(at, b"new")
    memory.unmap(first, 2)
    memory.map(first, [1, 3])
    assert memory.address(first) == at
    assert backend.read(at, 3) == b"two"
    assert backend.read(at + backend.page_bytes, 3) == b"one"


def test_places_are_nobody_elses_until_they_are_given_back(memory):
    chance = random.Random(7)
    held: dict[int, int] = {}
    for _ in range(400):
        if held and chance.random() < 0.5:
            first = chance.choice(sorted(held))
            memory.give_back(first, held.pop(first))
            continue
        count = chance.randrange(1, 6)
        try:
            first = memory.take(count)
        except OutOfPages:
            assert sum(held.values()) + count > NUM_PLACES // 3
            continue
        taken = {place for begin, size in held.items() for place in range(begin, begin + size)}
        assert not taken & set(range(first, first + count))
        assert first + count <= NUM_PLACES
        held[first] = count
    for first, count in held.items():
        memory.give_back(first, count)
    assert memory.take(NUM_PLACES) == 0, "the pieces are whole again"


def test_places_that_were_given_back_are_handed_out_in_turn(memory):
    """So that a view of a closed tensor faults for long, and shows no other's bytes."""
    stale = memory.take(2)
    memory.give_back(stale, 2)
    others = [memory.take(2) for _ in range(NUM_PLACES // 2 - 1)]
    assert stale not in others
    for first in others[::2]:
        memory.give_back(first, 2)
    assert memory.take(2) == stale, "the one that was a hole for longest"
    assert memory.take(2) == others[0]


def test_a_place_is_mapped_once(memory):
    first = memory.take(3)
    memory.map(first, [0])
    with pytest.raises(BadMapping):
        memory.map(first, [1])
    with pytest.raises(BadMapping):
        memory.unmap(first + 1, 1)
    with pytest.raises(OutOfPages, match="address_bytes"):
        memory.take(NUM_PLACES)


def test_a_view_is_the_bytes_at_the_place():
    made = vmm_backends.make("memfd")
    source = made.pages(2)
    memory = LocalMemory(source.window(4), torch.device("cpu"))
    first = memory.take(2)
    memory.map(first, [1, 0])
    view = memory.view(first, torch.Size([3, 5]), torch.float32)
    assert view.data_ptr() == memory.address(first)
    view.copy_(torch.arange(15).view(3, 5))
    assert torch.equal(memory.view(first, torch.Size([15]), torch.float32), torch.arange(15.0))
    memory.close()
    source.close()


def test_the_owner_of_a_view_lives_as_long_as_any_part_of_it(backend):
    class Owner:
        pass

    source = backend.pages(1)
    window = source.window(1)
    window.map(0, 0)
    owner = Owner()
    here = weakref.ref(owner)
    span = window.span(0, 16, owner=owner)
    part = torch.frombuffer(span, dtype=torch.uint8)[3:5] if isinstance(span, memoryview) else span
    del owner, span
    assert here() is not None
    del part
    assert here() is None, "nothing else holds it"
    window.close()
    source.close()
