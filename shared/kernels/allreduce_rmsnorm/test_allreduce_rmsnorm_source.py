"""The kernel's source without a GPU: it compiles for sm_80 and sm_90a, says what the protocol needs, and fits."""

import ctypes
import re
from itertools import pairwise

import pytest

from shared.errors import InvalidRequest, PeerTimeout
from shared.kernels.allreduce_rmsnorm import driver
from shared.kernels.allreduce_rmsnorm.errors import Phase, error_of, pack
from shared.kernels.allreduce_rmsnorm.plan import Algorithm
from shared.kernels.allreduce_rmsnorm.shapes import (
    CTA_THREADS,
    MAX_CTAS,
    OWN_SHARED_BYTES,
    PUSH_SLOT_BYTES,
    SHARED_BYTES,
    Engine,
    KernelShape,
    arena_layout,
    push_tokens,
)


def ptx_of(arch: str, name: str) -> str:
    """One kernel's text."""
    text = driver.compile_kernels(KernelShape(4, 8192, True), arch).ptx
    begin = text.index(f".entry {name}(")
    end = text.find(".entry ", begin + 1)
    return text[begin : end if end > 0 else None]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
@pytest.mark.parametrize(("world", "hidden", "bf16"), [(2, 1032, False), (8, 16384, True)])
def test_the_source_compiles_to_machine_code_without_a_gpu(arch, world, hidden, bf16):
    binary = driver.compile_kernels(KernelShape(world, hidden, bf16), arch)
    assert binary.cubin[:4] == b"\x7fELF"
    kernels = set(re.findall(r"\.entry (\w+)\(", binary.ptx))
    everywhere = {"fused_plain", "fused_push", "gather_rows", "add_norm"}
    assert kernels == everywhere | ({"fused_bulk", "fused_multimem"} if arch != "sm_80" else set())


def test_python_and_the_kernel_agree_on_every_field_of_the_parameters():
    """The compiler compares the sizes; here are order and types."""
    body = re.search(r"struct Params \{(.*?)\n\};", driver.SOURCE.read_text(), re.DOTALL)
    assert body
    sizes = {"u64": 8, "int": 4, "float": 4}
    declared = []
    for line in re.findall(r"^  ([^/\n]*);", body[1], re.MULTILINE):
        found = re.fullmatch(r"((?:const )?\w+\*?) (.*)", line)
        assert found, line
        kind = found[1]
        for name in found[2].split(", "):
            count = 8 if name.endswith("[kMaxWorld]") else 1
            declared.append((name.partition("[")[0], count * (8 if kind.endswith("*") else sizes[kind])))
    assert declared == [(field[0], ctypes.sizeof(field[1])) for field in driver.Params._fields_]


@pytest.mark.parametrize("name", ["fused_plain", "gather_rows", "fused_bulk", "fused_multimem"])
def test_every_kernel_meets_its_peers_twice_by_release_and_acquire_for_the_system(name):
    text = ptx_of("sm_90a", name)
    assert text.count("st.release.sys.global.u32") == 2
    assert text.count("ld.acquire.sys.global.u32") == 2
    assert text.count("%globaltimer") >= 4, "every wait is bounded"


def test_an_arrival_may_be_relaxed_a_leave_never():
    text = driver.compile_kernels(KernelShape(2, 1024, True, relaxed_arrival=True), "sm_80").ptx
    kernels = text.count(".entry ") - 2  # add_norm and fused_push meet nobody
    assert text.count("st.relaxed.sys.global.u32") == kernels + 1, "and the host's word"
    assert text.count("st.release.sys.global.u32") == kernels


def test_all_loads_of_a_batch_are_asked_for_before_the_first_is_used():
    text = ptx_of("sm_90a", "fused_plain")
    loads = [match.start() for match in re.finditer(r"ld\.global\.L1::no_allocate\.v4\.u32", text)]
    assert len(loads) == 4 * (4 + 1), "four vectors a thread, of four ranks and the residual"
    assert text.find("cvt.rn.bf16x2.f32") > loads[-1]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_push_kernel_meets_nobody_and_asks_for_its_own_row_and_its_two_words_at_once(arch):
    text = ptx_of(arch, "fused_push")
    sends, polls = "st.relaxed.sys.global.v4.u32", "ld.relaxed.sys.global.v4.u32"
    assert text.count(sends) == text.count(polls) == 3
    assert "st.release" not in text
    asked = text.index("ld.global.L1::no_allocate.v4.u32")
    words = re.findall(r"ld\.global\.u32\s+(%r\d+),", text)
    assert len(words) == 2
    uses = [re.search(rf"{word}\b(?!,\s*\[)", text) for word in words]
    assert all(use and use.start() > asked for use in uses), "no load waits for another one"
    assert asked < text.index(sends)
    block = text[text.index(polls) : text.rindex(polls)]
    assert "bra" not in block, "rows of all ranks are asked for before one is looked at"
    assert text.index("bar.red.or.pred") < text.index("atom.global.inc.u32") < text.index(polls)
    assert "%globaltimer" in text, "every wait is bounded"


def test_the_bulk_kernel_reads_and_sends_by_bulk_copies_and_waits_until_they_have_arrived():
    text = ptx_of("sm_90a", "fused_bulk")
    assert "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes" in text
    assert "cp.async.bulk.global.shared::cta.bulk_group" in text
    arrived = text.index("cp.async.bulk.wait_group 0")
    assert text.rindex("st.release.sys.global.u32") > arrived


def test_the_multimem_kernel_lets_the_switch_add_in_float32_and_distribute():
    text = ptx_of("sm_90a", "fused_multimem")
    assert "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2" in text
    assert "multimem.st.relaxed.sys.global.v4.bf16x2" in text
    plain = ptx_of("sm_90a", "fused_plain") + ptx_of("sm_90a", "fused_bulk")
    assert "multimem." not in plain


def test_a_source_that_does_not_compile_is_refused_with_the_compilers_words(monkeypatch, tmp_path):
    source = tmp_path / "broken.cu"
    source.write_text("nonsense;")
    monkeypatch.setattr(driver, "SOURCE", source)
    with pytest.raises(driver.FusedRefused, match="nonsense"):
        driver.compile_kernels.__wrapped__(KernelShape(2, 1024, True), "sm_80")


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("hidden", [1024, 1032, 2880, 4096, 8192, 16384])
def test_every_shape_fits_an_sm(world, hidden):
    shape = KernelShape(world, hidden, True)
    assert hidden // 8 <= shape.push_threads * 2 <= 2048
    assert shape.row_threads * shape.rows_per_cta <= CTA_THREADS
    assert shape.row_threads == 32 or shape.rows_per_cta <= 15, "a named barrier a row"
    assert shape.stages >= 2
    assert shape.shared_bytes <= SHARED_BYTES
    for engine in Engine:
        for num_tokens in (1, 7, 65_536):
            launch = shape.launch(engine, Algorithm.TWO_SHOT, num_tokens, 300)
            assert 1 <= launch.ctas <= MAX_CTAS
            assert launch.threads % 32 == 0


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("hidden", [2048, 2880, 4096, 8192, 16384])
def test_where_a_cta_has_99_kib_fewer_stages_fit_or_the_bulk_engine_does_not(world, hidden):
    shape = KernelShape(world, hidden, True, most_shared_bytes=(99 << 10) - OWN_SHARED_BYTES)
    assert 1 <= shape.stages <= KernelShape(world, hidden, True).stages
    assert shape.has_bulk is (shape.stages >= 2)
    assert not shape.has_bulk or shape.shared_bytes <= (99 << 10) - OWN_SHARED_BYTES
    assert shape.has_bulk or hidden > 8192 or world > 4


def test_what_kernels_declare_themselves_is_less_than_what_is_kept_for_it():
    text = driver.compile_kernels(KernelShape(8, 16384, True), "sm_90a").ptx
    sizes = re.findall(r"^\s*\.shared .*?\[(\d+)\];", text, re.MULTILINE)
    assert sizes
    assert sum(map(int, sizes)) <= OWN_SHARED_BYTES, "of all kernels together"


def test_nothing_in_an_arena_overlaps():
    layout = arena_layout(1032, 17, 2, whole_residual=True)
    rows = 17 * 1032 * 2
    places = []
    for lane in layout.lanes:
        places += [(lane.input, rows), (lane.out, rows), (lane.whole, rows)]
        places += [(lane.flags, MAX_CTAS * 8 * 4), (lane.epochs, MAX_CTAS * 4), (lane.turns, 8)]
        places += [(lane.slots, 2 * 8 * rows)]
    places = sorted([*places, (layout.failed, 4)])
    assert all(a + size <= b for (a, size), (b, _) in pairwise(places))
    assert places[-1][0] + places[-1][1] <= layout.num_bytes
    assert all(place % 16 == 0 for place, _ in places)


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("hidden", [1024, 1032, 8192, 16384])
@pytest.mark.parametrize("max_tokens", [1, 17, 8192])
def test_slots_hold_what_is_pushed_and_few_megabytes(world, hidden, max_tokens):
    (lane,) = arena_layout(hidden, max_tokens, 1, whole_residual=False).lanes
    most = push_tokens(world, hidden, max_tokens)
    assert min(16, max_tokens) <= most <= max_tokens
    assert 2 * world * most * hidden * 2 <= lane.turns - lane.slots <= 2 * PUSH_SLOT_BYTES


def test_a_failed_word_names_the_peer_and_an_empty_one_nobody():
    assert error_of(0, 1, 500) is None
    error = error_of(pack(Phase.ARRIVE, 3, 17), 1, 500)
    assert isinstance(error, PeerTimeout)
    assert "rank 1 waited 500 ms for rank 3, which never came" in error.message
    assert "CTA 17" in error.message
    left = error_of(pack(Phase.LEAVE, 0, 0), 1, 500)
    assert left is not None
    assert "never left" in left.message
    with pytest.raises(InvalidRequest):
        pack(Phase.ARRIVE, 256, 0)
