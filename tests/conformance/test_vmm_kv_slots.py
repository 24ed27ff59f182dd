"""KV written through request slots is read back from the same slots, in both contiguous layouts, with aliases."""

import random

import numpy as np
import pytest

from shared.vmm.cuda_pages import CudaPages
from shared.vmm.errors import BadMapping
from shared.vmm.geometry import KvShape
from shared.vmm.kv_layouts import layer_major, token_major
from shared.vmm.kv_slots import KvSlots, init
from shared.vmm.memfd_pages import MemfdPages
from tests.support.fake_vmm_driver import GRANULARITY_BYTES, FakeVmmDriver

SHAPE = KvShape(num_layers=3, num_kv_heads=2, head_dim=32, dtype_bytes=4)  # 512 B a side and layer
LAYOUTS = [token_major, layer_major]
SLOTS, TOKENS = 3, 240


def arrays(slots):
    """[layer][K, V] as numpy sees them."""
    if hasattr(slots.window, "as_memoryview"):
        memory = slots.window.as_memoryview()
    else:
        interface = slots.window.span().__cuda_array_interface__
        import ctypes

        memory = (ctypes.c_uint8 * interface["shape"][0]).from_address(interface["data"][0])
    return [
        [
            np.ndarray(
                view.shape, np.float32, memory, view.offset_bytes, [4 * stride for stride in view.strides]
            )
            for view in layer
        ]
        for layer in slots.layout.views
    ]


def make(layout_of, num_pages=60, **options):
    layout = layout_of(SHAPE, SLOTS, TOKENS, 4096)
    source = MemfdPages(num_pages * layout.num_tensors, layout.geometry.page_bytes)
    return KvSlots(layout, source, **options)


def value(seed, layer, side, tokens):
    return (seed * 1000 + layer * 10 + side + tokens / 1024).astype(np.float32)[:, None, None]


def write(cache, reqid, seed, start, end):
    tokens = np.arange(start, end, dtype=np.float64)
    for layer, sides in enumerate(cache):
        for side, array in enumerate(sides):
            array[reqid, start:end] = value(seed, layer, side, tokens)


def same(cache, reqid, seed, start, end):
    tokens = np.arange(start, end, dtype=np.float64)
    return all(
        (array[reqid, start:end] == value(seed, layer, side, tokens)).all()
        for layer, sides in enumerate(cache)
        for side, array in enumerate(sides)
    )


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("layout_of", LAYOUTS)
def test_requests_of_any_length_keep_their_own_bytes(layout_of, native):
    rng = random.Random(5)
    slots = make(layout_of, native=native)
    cache = arrays(slots)
    lens, seeds = [0] * SLOTS, [0] * SLOTS
    for turn in range(120):
        if not all(lens) and rng.random() < 0.5:
            reqid = slots.alloc_reqid((), rng.randrange(TOKENS))
            assert reqid is not None
            seeds[reqid], wanted = turn, rng.randrange(1, 60)
        else:
            reqid = rng.choice([i for i in range(SLOTS) if lens[i]] or [None])
            if reqid is None:
                continue
            if rng.random() < 0.2 or lens[reqid] == TOKENS:
                slots.free_reqid(reqid)
                lens[reqid] = 0
                continue
            wanted = min(TOKENS, lens[reqid] + rng.choice([1, 1, 1, 7]))
        start, lens[reqid] = lens[reqid], wanted
        assert slots.step(lens)
        write(cache, reqid, seeds[reqid], start, wanted)
        assert all(same(cache, i, seeds[i], 0, lens[i]) for i in range(SLOTS))
    assert slots.counters.background_ops > 0
    slots.close()
    slots.source.close()


@pytest.mark.parametrize("layout_of", LAYOUTS)
def test_an_aliased_prefix_is_read_at_the_new_requests_own_addresses(layout_of):
    slots, views = init(
        layout := layout_of(SHAPE, SLOTS, TOKENS, 4096),
        MemfdPages(20 * layout.num_tensors, layout.geometry.page_bytes),
    )
    assert views == layout.views
    cache = arrays(slots)
    first = slots.alloc_reqid()
    step = layout.geometry.block_tokens
    lens = [0] * SLOTS
    lens[first] = 2 * step + 1
    assert slots.step(lens)
    write(cache, first, 7, 0, lens[first])
    prefix = slots.table.seal(first, 2)
    for page in prefix:
        slots.table.pin(page)
    second = slots.alloc_reqid(prefix)
    lens[second] = 2 * step + 3
    assert slots.step(lens)
    assert same(cache, second, 7, 0, 2 * step)
    write(cache, second, 8, 2 * step, lens[second])
    assert same(cache, first, 7, 0, lens[first])
    slots.close()


@pytest.mark.parametrize("layout_of", LAYOUTS)
def test_memory_goes_back_to_the_system_and_comes_again(layout_of):
    slots = make(layout_of, num_pages=12)
    cache = arrays(slots)
    reqid = slots.alloc_reqid()
    lens = [40 if i == reqid else 0 for i in range(SLOTS)]
    assert slots.step(lens)
    write(cache, reqid, 3, 0, 40)
    slots.free_reqid(reqid, fence=4)
    gone = slots.shrink(12)
    full = slots.source.resident_bytes()
    assert full > 0
    assert len(gone) < 12, "pages of the ended request wait for its fence"
    slots.passed(4)
    gone += slots.shrink(12)
    slots.drain()
    gone += slots.shrink(12)
    assert sorted(gone) == list(range(12))
    assert slots.source.resident_bytes() == 0
    assert slots.alloc_reqid() is not None
    assert not slots.step(lens), "there is no page"
    assert slots.counters.refused_steps == 1
    slots.grow(gone[:6])
    assert slots.step(lens)
    write(cache, reqid, 9, 0, 40)
    assert same(cache, reqid, 9, 0, 40)
    slots.close()


def test_a_step_that_is_short_takes_the_pages_of_ended_requests_at_once():
    slots = make(token_major, num_pages=4)
    step = slots.layout.geometry.block_tokens
    lens = [0] * SLOTS
    first = slots.alloc_reqid()
    lens[first] = min(TOKENS, 3 * step)
    assert slots.step(lens)
    kept = slots.table.seal(first, 1)
    slots.table.pin(kept[0])
    slots.free_reqid(first, fence=1)
    lens[first] = 0
    second = slots.alloc_reqid((), 1)
    assert second != first
    lens[second] = 2 * step
    assert not slots.step(lens), "the fence has not passed"
    slots.passed(1)
    assert slots.step(lens)
    assert slots.counters.refused_steps == 1
    slots.close()


def test_decode_makes_no_call_and_no_wait_on_the_critical_path():
    slots = make(layer_major, ahead_tokens=4)
    reqid = slots.alloc_reqid()
    lens = [0] * SLOTS
    lens[reqid] = 10
    assert slots.step(lens)
    slots.drain()
    inline = slots.counters.inline_ops
    for _ in range(100):
        lens[reqid] += 1
        assert slots.step(lens)
        slots.drain()  # the GPU's work gives the mapper time
    assert slots.counters.inline_ops == inline
    assert slots.counters.background_ops > 0
    slots.close()


def test_slots_on_a_gpu_map_a_prompt_with_one_access_call_a_tensor():
    driver = FakeVmmDriver()
    shape = KvShape(num_layers=2, num_kv_heads=1, head_dim=32, dtype_bytes=4)
    layout = layer_major(shape, 2, 4096, GRANULARITY_BYTES)
    source = CudaPages(driver, 12 * layout.num_tensors, layout.geometry.page_bytes)
    slots = KvSlots(layout, source, eager_pages=0)
    reqid = slots.alloc_reqid()
    lens = [3 * layout.geometry.block_tokens if i == reqid else 0 for i in range(2)]
    assert slots.step(lens)
    assert len(driver.named("cuMemMap")) == 3 * layout.num_tensors
    assert len(driver.named("cuMemSetAccess")) == layout.num_tensors
    cache = arrays(slots)
    write(cache, reqid, 1, 0, lens[reqid])
    assert same(cache, reqid, 1, 0, lens[reqid])
    slots.close()
    source.close()
    assert not driver.mapped
    assert driver.used_bytes == 0
    driver.close()


def test_sizes_that_do_not_fit_the_layout_are_refused():
    layout = layer_major(SHAPE, SLOTS, TOKENS, 4096)
    for source in (MemfdPages(12, 8192), MemfdPages(13, layout.geometry.page_bytes)):
        with pytest.raises(BadMapping):
            KvSlots(layout, source)
        source.close()
    with pytest.raises(BadMapping):
        token_major(SHAPE, 0, TOKENS)
