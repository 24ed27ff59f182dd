"""The receipt of a request with several choices counts what all of them did, whichever ends last."""

from shared.engine.choice_totals import MAX_FAMILIES, ChoiceTotals


def said(tokens: int, moved: int, local: int, fetch_ms: float) -> dict[str, float]:
    return {
        "tokens_loaded": tokens, "blocks_loaded": moved, "blocks_local": local,
        "bytes_loaded": 10 * moved, "failed_blocks": 0, "fetch_ms": fetch_ms,
    }  # fmt: skip


def test_an_only_choice_tells_its_own():
    mine = said(64, 4, 0, 1.5)
    totals = ChoiceTotals()
    for _ in range(2):
        assert totals.add("cmpl-a_1-1-1", mine) is mine


def test_the_last_choice_tells_for_all_and_the_prompts_tokens_count_once():
    totals = ChoiceTotals()
    assert totals.add("0_r_a", said(70, 5, 0, 4.0)) == said(70, 5, 0, 4.0)
    totals.add("0_r_b", said(16, 1, 0, 9.0))  # another request in between
    assert totals.add("2_r_a", said(6, 1, 4, 1.0)) == said(70, 6, 4, 4.0)
    assert totals.add("1_r_a", said(6, 1, 4, 0.5)) == said(70, 7, 8, 4.0)
    assert totals.add("1_r_b", {}) == said(16, 1, 0, 9.0), "an aborted choice has nothing to tell"


def test_at_a_bound_the_oldest_requests_are_forgotten():
    totals = ChoiceTotals()
    one = said(1, 1, 0, 0.0)
    for number in range(MAX_FAMILIES + 1):
        totals.add(f"0_r{number}", one)
    assert totals.add("1_r0", one) == one
    assert totals.add(f"1_r{MAX_FAMILIES}", one)["blocks_loaded"] == 2
