"""Slots over host memory, a GPU, and a fake GPU: what is written to a block is read in every slot that has it."""

import pytest

from shared.vmm.request_layout import RequestLayout
from shared.vmm.request_slots import RequestSlots
from shared.vmm.request_window import RequestWindow, map_blocks
from tests.support import vmm_backends

NUM_PAGES, SLOTS, PLACES = 5, 3, 4


@pytest.fixture(params=vmm_backends.NAMES)
def backend(request):
    made = vmm_backends.make(request.param)
    if made is None:
        pytest.skip("no GPU here")
    yield made
    made.close()


@pytest.fixture(params=["token-major", "layer-major"])
def rig(request, backend):
    pieces = 1 if request.param == "token-major" else 4
    layout = RequestLayout(request.param, 2, 1, 64, 2, 16, backend.page_bytes * pieces, SLOTS, PLACES)
    assert layout.num_pieces == pieces
    null_piece = NUM_PAGES * pieces
    source = backend.pages(null_piece + 1)
    blocks = source.window((NUM_PAGES + 1) * pieces)
    map_blocks(blocks, NUM_PAGES, pieces, null_piece)
    window = RequestWindow(source, layout, null_piece, guard_places=1)
    yield layout, blocks, window
    window.close()
    blocks.close()
    source.close()


def mark(page, piece):
    return b"page %d piece %d" % (page, piece)


def write_all(backend, layout, blocks):
    for page in range(NUM_PAGES):
        for piece in range(layout.num_pieces):
            at = blocks.address + ((page + 1) * layout.num_pieces + piece) * layout.piece_bytes
            backend.write(at, mark(page, piece))


def read(backend, layout, window, piece, place):
    at = window.window.address + layout.index(piece, place) * layout.piece_bytes
    return backend.read(at, len(mark(0, 0)))


def test_a_request_reads_its_pages_side_by_side_in_every_piece(backend, rig):
    layout, blocks, window = rig
    write_all(backend, layout, blocks)
    table = RequestSlots(SLOTS, PLACES)
    first, second = table.begin("a", [4, 0, 2]), table.begin("b", [4, 1])
    window.wait(window.submit(first.commands + second.commands))
    for piece in range(layout.num_pieces):
        for slot, pages in ((first.slot, [4, 0, 2]), (second.slot, [4, 1])):
            found = [
                read(backend, layout, window, piece, slot * PLACES + place) for place in range(len(pages))
            ]
            assert found == [mark(page, piece) for page in pages]


def test_a_place_shows_another_page_after_it_was_laid_anew(backend, rig):
    layout, blocks, window = rig
    write_all(backend, layout, blocks)
    table = RequestSlots(1, PLACES)
    window.submit(table.begin("a", [1, 2]).commands)
    table.end("a", 0)
    ticket = window.submit(table.begin("b", [1, 3]).commands)
    window.wait(ticket)
    assert window.is_done(ticket)
    for piece in range(layout.num_pieces):
        assert read(backend, layout, window, piece, 1) == mark(3, piece)


def test_bytes_written_after_the_mapping_are_seen_too(backend, rig):
    layout, blocks, window = rig
    window.wait(window.submit(RequestSlots(1, PLACES).begin("a", [3]).commands))
    write_all(backend, layout, blocks)
    assert read(backend, layout, window, layout.num_pieces - 1, 0) == mark(3, layout.num_pieces - 1)


def test_the_first_place_and_every_guard_are_mapped_before_any_request(backend, rig):
    layout, _, window = rig
    zeros = bytes(16)
    assert backend.read(window.window.address, 16) == zeros
    for piece in range(layout.num_pieces):
        for slot in range(SLOTS):
            at = layout.index(piece, (slot + 1) * PLACES - 1) * layout.piece_bytes
            assert backend.read(window.window.address + at, 16) == zeros


def test_a_page_is_mapped_piece_by_piece_each_by_its_own_handle():
    backend = vmm_backends.FakeCudaBackend()
    layout = RequestLayout("layer-major", 2, 1, 64, 2, 16, backend.page_bytes * 4, 1, PLACES)
    source = backend.pages(NUM_PAGES * 4 + 1)
    window = RequestWindow(source, layout, NUM_PAGES * 4)
    backend.driver.calls.clear()
    window.wait(window.submit(RequestSlots(1, PLACES).begin("a", [2]).commands))
    maps = sorted(at for at, (_, handle) in backend.driver.mapped.items() if handle in range(9, 13))
    places = [window.window.address + layout.index(piece, 0) * layout.piece_bytes for piece in range(4)]
    assert maps == places
    window.close()
    source.close()
    backend.close()
