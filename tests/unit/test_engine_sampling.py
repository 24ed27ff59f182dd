"""What an engine cannot be asked for directly is asked in another way, and answered as it was asked."""

import pytest

from shared.engine.engine_sampling import asked_deltas, engine_spec, going_on
from shared.engine.interface import EngineDelta, KvUse
from shared.wire.requests import SamplingSpec, StructuredSpec, TokenLogprob, can_continue

ROW = [[TokenLogprob(7, -0.5, 1)]]


def test_what_the_engine_takes_is_passed_on_untouched():
    for spec in (
        SamplingSpec(max_tokens=5, n=3),
        SamplingSpec(max_tokens=5, n=1, temperature=0.0),
        SamplingSpec(max_tokens=1, min_tokens=1, structured=StructuredSpec(kind="json_object")),
    ):
        told, copies = engine_spec(spec)
        assert told is spec
        deltas = [EngineDelta(0, [7], "length", request_done=True)]
        assert asked_deltas(deltas, spec, copies) is deltas


def test_several_greedy_choices_are_one_run_and_the_last_copy_ends_the_request():
    spec = SamplingSpec(max_tokens=5, n=3, temperature=0.0)
    told, copies = engine_spec(spec)
    assert (told.n, told.max_tokens, copies) == (1, 5, 3)
    deltas = [EngineDelta(0, [7]), EngineDelta(0, [8], "length", request_done=True)]
    found = asked_deltas(deltas, spec, copies)
    assert [(d.index, d.token_ids) for d in found] == [(i, [t]) for t in (7, 8) for i in range(3)]
    assert [d.request_done for d in found] == [False] * 5 + [True]


def test_the_prompt_alone_runs_one_token_that_nobody_sees():
    spec = SamplingSpec(
        max_tokens=0, n=2, temperature=1.0, seed=3, logprobs=2, prompt_logprobs=2,
        structured=StructuredSpec(kind="json_object"),
    )  # fmt: skip
    told, copies = engine_spec(spec)
    assert (told.max_tokens, told.n, told.logprobs, told.structured, copies) == (1, 1, None, None, 2)
    assert told.prompt_logprobs == 2
    use = KvUse(tokens_computed=3)
    end = EngineDelta(0, [2], "stop", 2, ROW, [None, ROW[0]], request_done=True, kv_use=use)
    found = asked_deltas([end], spec, copies)
    assert [(d.index, d.token_ids, d.finish_reason, d.stop_token_id, d.logprobs) for d in found] == [
        (0, [], "length", None, None), (1, [], "length", None, None),
    ]  # fmt: skip
    assert found[0].prompt_logprobs == [None, ROW[0]]
    assert [d.request_done for d in found] == [False, True]
    assert found[-1].kv_use == use
    (aborted,) = asked_deltas([EngineDelta(0, [], "abort", request_done=True)], spec, 1)
    assert aborted.finish_reason == "abort"


@pytest.mark.parametrize(
    ("more", "may"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 0.0, "seed": 4}, True),
        ({"temperature": 0.0, "logprobs": 3, "logit_bias": {5: 1.0}, "min_tokens": 4}, True),
        ({"temperature": 0.7, "seed": 4, "seed_is_free": True}, True),
        ({"temperature": 0.7, "seed": 4}, False),
        ({"temperature": 0.7}, False),
        ({"temperature": 0.0, "n": 2}, False),
        ({"temperature": 0.0, "presence_penalty": 0.1}, False),
        ({"temperature": 0.0, "frequency_penalty": -0.1}, False),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, False),
        ({"temperature": 0.0, "structured": StructuredSpec(kind="json_object")}, False),
    ],
)
def test_output_counts_as_prompt_only_where_nothing_counts_it_apart(more, may):
    assert can_continue(SamplingSpec(max_tokens=9, **more)) is may


def test_who_goes_on_makes_the_rest_and_draws_anew():
    spec = SamplingSpec(
        max_tokens=9, min_tokens=3, temperature=0.7, seed=4, seed_is_free=True, prompt_logprobs=2
    )
    assert going_on(spec, 0) is spec
    rest = going_on(spec, 2)
    assert (rest.max_tokens, rest.min_tokens, rest.prompt_logprobs) == (7, 1, None)
    assert going_on(spec, 5).min_tokens == 0
    seeds = [engine_spec(spec, n)[0].seed for n in range(100)]
    assert seeds[0] == 4
    assert len(set(seeds)) == 100, "no draw comes twice"
    assert all(seed is not None and 0 <= seed < 1 << 63 for seed in seeds)
    assert engine_spec(SamplingSpec(max_tokens=9, temperature=0.0), 3)[0].seed is None
