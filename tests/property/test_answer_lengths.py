"""How long answers get is kept between two answers: what is said equals the plain product-limit estimator's."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.room.answers import EDGES, FADE_AFTER, FIRST_TOKENS, LEAST_SEEN, SHARE, AnswerLengths

LENGTHS = st.one_of(st.integers(1, 60), st.integers(1, 5_000), st.integers(1, 3_000_000))
ANSWERS = st.lists(st.tuples(LENGTHS, st.booleans()), max_size=3 * LEAST_SEEN)
ASKED = st.lists(st.tuples(LENGTHS, st.one_of(st.just(0), LENGTHS)), min_size=1, max_size=8)


def plainly(answers, most, made):
    """Kaplan and Meier's estimator, anew for each question."""
    if len(answers) < LEAST_SEEN:
        return max(made, min(most, max(FIRST_TOKENS, 2 * made)))
    assert len(answers) < FADE_AFTER
    bucket_of = [next((i for i, edge in enumerate(EDGES) if edge >= n), len(EDGES) - 1) for n, _ in answers]
    left, unknown = 1.0, most
    for bucket, edge in enumerate(EDGES):
        if edge < made + 1:
            continue
        if edge >= most:
            break
        at_risk = sum(b >= bucket for b in bucket_of)
        if not at_risk:
            unknown = min(most, max(FIRST_TOKENS, 2 * edge))
            break
        ended = sum(b == bucket and by_itself for b, (_, by_itself) in zip(bucket_of, answers, strict=True))
        left *= 1.0 - ended / at_risk
        if left <= 1.0 - SHARE + 1e-9:
            return max(made, edge)
    return max(made, unknown)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(ANSWERS, ASKED), min_size=1, max_size=4))
def test_every_answer_is_the_plain_estimators_whatever_was_asked_before(rounds):
    answers, seen = AnswerLengths(), []
    for came, asked in rounds:
        for tokens, ended in came:
            answers.note(tokens, ended=ended)
            seen.append((tokens, ended))
        for most, made in (*asked, *asked):
            assert answers.expected(most, made) == plainly(seen, most, made)
