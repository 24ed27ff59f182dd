"""Corrections fade where they are learnt and where they are used: together."""

import pytest

from services.scheduler.core.fading import Fading
from shared.costmodel.online import OnlineCorrection


def test_a_correction_that_its_worker_lets_fade_too_does_not_come_back():
    correction, fading, at_ms = OnlineCorrection(), Fading(), range(0, 200_000, 1_000)
    for _ in range(31):
        correction.observe(10.0, 40.0)
    seen = []
    for now_ms in at_ms:
        correction.age(now_ms)
        seen.append(fading.now(correction.factor, correction.num_observed, now_ms))
    assert (seen[0], seen[-1]) == pytest.approx((4.0, 1.0))
    assert seen == sorted(seen, reverse=True)
