"""How many streams whole pages between GPUs are shared out over."""

import numpy as np
import pytest

from shared.transfer.page_stream import PageStream


class Driver:
    """Notes how many pages each call copies."""

    has_batch = True

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.numbers = iter(range(1, 1000))

    def make_current(self) -> None: ...

    def create_stream(self) -> int:
        return next(self.numbers)

    create_event = create_stream

    def record(self, event: int, stream: int) -> None: ...

    def copy_batch(self, targets, sources, sizes, order, stream) -> None:
        self.calls.append(targets.size)


@pytest.mark.parametrize(
    ("least", "pages", "mib", "calls"),
    [
        (0, 8, 8, [8]),
        (0, 16, 8, [8, 8]),
        (8 << 20, 8, 8, [2, 2, 2, 2]),
        (8 << 20, 1, 64, [1]),
        (8 << 20, 3, 8, [1, 1, 1]),
        (8 << 20, 8, 2, [4, 4]),
        (8 << 20, 1, 1, [1]),
    ],
)
def test_a_lane_is_taken_for_so_many_pages_or_bytes(least, pages, mib, calls):
    driver = Driver()
    stream = PageStream(driver, lanes=4, min_lane_bytes=least)
    at = np.arange(pages, dtype=np.uint64) * np.uint64(mib << 20)
    stream.submit(at, at + np.uint64(1 << 40), mib << 20)
    assert driver.calls == calls
