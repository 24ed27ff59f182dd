"""What a profile at a worker's start measures: points within the engine's limits and the time that there is."""

import pytest

from shared.costmodel.observation import CalibrationPlan, ProfileLimits, grid, lengths


def test_the_plan_stays_within_its_budget_and_its_limits():
    limits = ProfileLimits(4096, 2048, 8, 8192, 32, budget_ms=3000)
    plan = CalibrationPlan(limits)
    for point in plan:
        assert sum(n + point.output_tokens for n, _ in point.prompts) <= limits.kv_tokens
        assert len(point.prompts) <= limits.max_running
        assert all(
            0 <= cached < n <= limits.max_model_len and cached % 32 == 0 for n, cached in point.prompts
        )
        plan.took(point, 10 + 0.2 * point.num_tokens)
    assert 1500 < plan.spent_ms < 3300
    assert plan.num_skipped > 0


def test_a_cache_without_room_has_no_points():
    assert grid(ProfileLimits(16, 2048, 8, 16, 32, budget_ms=3000)) == []


@pytest.mark.parametrize("block_tokens", [1024, 2000, 4096])
def test_a_block_about_as_long_as_the_context_adds_no_prompt_without_tokens_and_none_twice(block_tokens: int):
    limits = ProfileLimits(2000, 2048, 8, 100_000, block_tokens, budget_ms=3000)
    assert lengths(limits) == [16, 32, 64, 128, 256, 512, 1024]
    assert all(n > 0 for point in grid(limits) for n, _ in point.prompts)
