"""Each PD-Caching mode names, moves and lets go of exactly what MemServe's Table 4 says."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.mempool.core.pd_caching import HandOver, LetGo, Name, PdCaching, PdRequest, PushBack
from shared.errors import InvariantBroken

BLOCK = 4
MODES = list(PdCaching)
P_GOES, D_GOES = LetGo("prefill", 0), LetGo("decode", 0)


def run(mode: PdCaching, prompt: int, output: int, eager: int = 0) -> list:
    """A request that goes well, decoding token by token."""
    request = PdRequest(mode, BLOCK, prompt, eager)
    out = [*request.on_prefill_done(), *request.on_handed_over()]
    for count in range(1, output + 1):
        out += request.on_decoded(count)
    return [*out, *request.on_decode_done(output)]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("basic", [HandOver(2, True, False), P_GOES, D_GOES]),
        ("1", [Name("prefill", 0, 2), HandOver(2, True, False), P_GOES, D_GOES]),
        ("2", [Name("prefill", 0, 2), HandOver(2, True, True), P_GOES, Name("decode", 2, 4), D_GOES]),
        (
            "3",
            [
                Name("prefill", 0, 2),
                HandOver(2, True, True),
                P_GOES,
                Name("decode", 2, 4),
                PushBack(2, 4),
                D_GOES,
            ],
        ),
    ],
)
def test_a_request_of_ten_tokens_that_decodes_seven(mode, expected):
    """KV of 10 + 7 - 1 tokens: four blocks of four; D completes the one in which the prompt ends."""
    assert run(PdCaching(mode), 10, 7) == expected


def test_eager_push_back_sends_blocks_once_they_are_complete():
    out = run(PdCaching.FULL, 8, 14, eager=2)
    assert [a for a in out if isinstance(a, PushBack)] == [PushBack(2, 4), PushBack(4, 5)]
    assert [a for a in out if isinstance(a, Name)] == [
        Name("prefill", 0, 2),
        Name("decode", 2, 4),
        Name("decode", 4, 5),
    ]


def test_a_request_that_its_first_token_ends_is_not_handed_over():
    for mode in MODES:
        out = PdRequest(mode, BLOCK, 9).on_prefill_done(finished=True)
        assert out[-1] == P_GOES
        assert not any(isinstance(a, HandOver) for a in out)


def test_a_prompt_below_one_block_has_nothing_to_name_at_prefill():
    assert PdRequest(PdCaching.FULL, BLOCK, 3).on_prefill_done() == [HandOver(0, True, True)]


@pytest.mark.parametrize("mode", MODES)
def test_events_that_come_twice_or_late_do_nothing(mode):
    request = PdRequest(mode, BLOCK, 8)
    assert request.on_handed_over() == []
    assert request.on_decode_done(3) == []
    request.on_prefill_done()
    assert request.on_prefill_done() == []
    assert request.on_handed_over() == [P_GOES]
    assert request.on_handed_over() == []
    assert request.on_decode_done(6)[-1] == D_GOES
    assert request.on_decode_done(6) == request.on_over() == request.on_decoded(9) == []


@pytest.mark.parametrize("mode", MODES)
def test_a_failure_lets_go_at_the_end_that_holds(mode):
    request = PdRequest(mode, BLOCK, 8)
    assert request.on_over() == []
    assert request.on_prefill_done() == []
    request = PdRequest(mode, BLOCK, 8)
    request.on_prefill_done()
    assert request.on_over() == [P_GOES]
    request = PdRequest(mode, BLOCK, 8)
    request.on_prefill_done()
    request.on_handed_over()
    assert request.on_over() == [D_GOES]


@given(st.sampled_from(MODES), st.integers(1, 40), st.integers(1, 40), st.integers(0, 3))
def test_every_end_lets_go_once_and_names_and_gets_each_block_at_most_once(mode, prompt, output, eager):
    out = run(mode, prompt, output, eager)
    assert out.count(P_GOES) == out.count(D_GOES) == 1
    assert out[-1] == D_GOES
    total = (prompt + output - 1) // BLOCK
    at_prefill = [
        b
        for a in out
        if (isinstance(a, Name) and a.end == "prefill") or isinstance(a, PushBack)
        for b in range(a.first, a.last)
    ]
    at_decode = [b for a in out if isinstance(a, Name) and a.end == "decode" for b in range(a.first, a.last)]
    if any(isinstance(a, HandOver) and a.insert for a in out):
        at_decode = [*range(prompt // BLOCK), *at_decode]
    expected = {
        "basic": (0, 0),
        "1": (prompt // BLOCK, 0),
        "2": (prompt // BLOCK, total),
        "3": (total, total),
    }[mode]
    assert (at_prefill, at_decode) == (list(range(expected[0])), list(range(expected[1])))


def test_a_request_without_tokens_is_our_bug():
    with pytest.raises(InvariantBroken):
        PdRequest(PdCaching.FULL, BLOCK, 0)
