"""A burst's demand: equal to closed forms, never less than what one run held where memory kept somebody waiting."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.profiler.core.demand import Served, fair_demand, peak_tokens, prompt_speed, swap_bytes

SMALL = st.integers(1, 400)


def one_by_one(num, gap_ms, service_ms, prompt, output):
    """Arrivals every gap_ms, served alone, in turn, in service_ms each: the memory holds one."""
    out, free_ms = [], 0.0
    for n in range(num):
        begin = max(free_ms, n * gap_ms)
        free_ms = begin + service_ms
        out.append(Served(n * gap_ms, begin, free_ms, prompt, output))
    return out


@given(SMALL, SMALL, st.integers(1, 50), st.integers(1, 1000))
def test_requests_that_nobody_disturbs_hold_their_prompt_and_output(prompt, output, num, service_ms):
    served = one_by_one(num, service_ms * 1.5, service_ms, prompt, output)
    curve = fair_demand(served)
    assert peak_tokens(curve) == prompt + output
    assert curve[-1][1] == pytest.approx(0, abs=1e-3)


@given(SMALL, SMALL, st.integers(1, 40), st.integers(1, 500))
def test_all_at_once_behind_full_memory_all_end_together(prompt, output, num, service_ms):
    """n(p + w) at the end: nobody has all before the last token but one was made. Prompts cost no time here."""
    served = one_by_one(num, 0, service_ms, prompt, output)
    curve = fair_demand(served, [(0.0, num * service_ms)], window_ms=1e-6)
    assert peak_tokens(curve) == pytest.approx(num * (prompt + output), abs=1)
    assert curve[-1][0] == pytest.approx(num * service_ms)


@given(SMALL, SMALL, st.integers(2, 40), st.integers(1, 100), st.floats(1.2, 6))
def test_while_nobody_ends_demand_is_the_prompts_that_came_and_the_tokens_that_were_made(
    prompt, output, num, gap_ms, overload
):
    """p * (1 + floor(t / a)) + w t / s, arrivals every a ms, service of s > a ms: exact until someone has all."""
    service_ms = gap_ms * overload
    served = one_by_one(num, gap_ms, service_ms, prompt, output)
    curve = fair_demand(served, [(0.0, num * service_ms)], window_ms=1e-3)
    held, first_end = 0.0, None
    for at_ms, tokens in curve:
        if tokens < held - 1e-6:
            first_end = at_ms
            break
        held = tokens
    assert first_end is not None
    for at_ms, tokens in curve:
        if at_ms < first_end and at_ms <= (num - 1) * gap_ms:
            came = at_ms / gap_ms
            made = output * at_ms / service_ms
            assert prompt * (came - 0.01) + made - 1e-6 <= tokens <= prompt * (came + 1) + made + 1e-6


@given(SMALL, SMALL, st.integers(1, 40), st.integers(1, 500))
def test_where_memory_was_never_full_nothing_comes_earlier(prompt, output, num, service_ms):
    """The engine was the bound: one request at a time, whatever memory there is."""
    served = one_by_one(num, 0, service_ms, prompt, output)
    assert peak_tokens(fair_demand(served)) == prompt + output


@given(st.integers(0, 1 << 30), st.integers(1, 60), st.booleans())
def test_tokens_are_conserved_and_bounded_by_all_there_are(seed, num, is_full):
    rng = Random(seed)
    served = []
    for _ in range(num):
        at = rng.uniform(0, 1e5)
        first = at + rng.uniform(0, 3e4)
        served.append(
            Served(
                at,
                first,
                first + rng.choice([0.0, rng.uniform(0, 2e4)]),
                rng.randrange(1, 9000),
                rng.randrange(1, 900),
            )
        )
    full = [(0.0, 5e4), (6e4, 1.5e5)] if is_full else []
    curve = fair_demand(served, full)
    times = [at for at, _ in curve]
    assert times == sorted(times)
    assert curve[-1][1] == pytest.approx(0, abs=1e-2)
    total = sum(one.prompt_tokens + one.output_tokens for one in served)
    longest = max(one.prompt_tokens + one.output_tokens for one in served)
    assert longest - 1 <= peak_tokens(curve) <= total + 1


def test_the_speed_of_prompts_is_that_of_the_fastest_window():
    served = [Served(0, at, at + 1, 100, 1) for at in (0, 10, 20, 500, 501, 502, 503)]
    assert prompt_speed(served, 100) == 4.0
    assert prompt_speed([], 100) == 0.0
    assert fair_demand([]) == []
    assert peak_tokens([]) == 0


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.integers(0, 10**12))
def test_the_swap_need_is_what_the_pool_has_no_room_for(tokens, per_token, pool):
    need = swap_bytes(tokens, per_token, pool)
    assert need >= 0
    assert need == max(0, tokens * per_token - pool)
