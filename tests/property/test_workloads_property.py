"""Blocks of prompts and their tokens agree: equal hash ids are equal tokens, different ids are different ones."""

from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.workloads import stats, tokens
from loadtest.workloads.request import Answer, Request, Segment, clipped, scaled
from tests.support.examples import examples

IDS = tokens.TokenRange(0, 1 << 30)
segments = st.builds(Segment, st.integers(0, 3), st.integers(1, 12), st.integers(0, 6))
answers = st.builds(Answer, st.integers(0, 2), st.integers(1, 9))
prompts = st.lists(st.one_of(segments, answers), min_size=1, max_size=6)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(prompts, min_size=1, max_size=6), st.sampled_from([1, 3, 8]))
def test_hash_ids_are_equal_exactly_where_all_tokens_up_to_there_are(many, block_tokens):
    ids = stats.BlockIds()
    by_id: dict[int, tuple[int, ...]] = {}
    by_tokens: dict[tuple[int, ...], int] = {}
    for prompt in many:
        expanded = tokens.prompt_ids(prompt, IDS)
        found = ids.of(prompt, block_tokens)
        assert len(found) == -(-len(expanded) // block_tokens)
        for number, one in enumerate(found):
            prefix = tuple(expanded[: (number + 1) * block_tokens])
            assert by_id.setdefault(one, prefix) == prefix
            by_tokens.setdefault(prefix, one)
    assert len(by_tokens) == len(by_id)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(prompts, min_size=2, max_size=5), st.floats(0.1, 3), st.integers(4, 60))
def test_scaled_and_clipped_prompts_share_at_least_the_parts_they_shared(many, factor, context):
    requests = [Request(n, float(n), "s", n, tuple(prompt), 3) for n, prompt in enumerate(many)]
    for changed in (scaled(requests, factor), clipped(requests, context)):
        for one, before in zip(changed, requests, strict=True):
            assert one.prompt_tokens >= 1
            assert len(one.prompt) <= len(before.prompt)
        for a, b, new_a, new_b in zip(requests, requests[1:], changed, changed[1:], strict=False):
            same = 0
            while same < min(len(a.prompt), len(b.prompt)) and a.prompt[same] == b.prompt[same]:
                same += 1
            same = min(same, len(new_a.prompt) - 1, len(new_b.prompt) - 1)
            assert new_a.prompt[:same] == new_b.prompt[:same]
    assert all(one.prompt_tokens + one.output_tokens <= context for one in clipped(requests, context))
