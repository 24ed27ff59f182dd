"""shared/transport/clock.py."""

import pytest

from shared.transport.clock import ManualClock, MonotonicClock


def test_the_hosts_clock_never_goes_back():
    clock = MonotonicClock()
    times = [clock.now_ms() for _ in range(100)]
    assert times == sorted(times)


def test_a_manual_clock_moves_only_when_told_and_only_on():
    clock = ManualClock(5)
    assert clock.now_ms() == 5
    assert clock.advance(10) == clock.now_ms() == 15
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)
