"""What is mapped where in one window, and how many mappings the kernel needs for it. No I/O."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.vmm.errors import BadMapping

HOLE = -1
PRIVATE = -3  # never continues a neighbour

Keys = npt.NDArray[np.int64]


def page_keys(pages: Sequence[int], *, writable: bool) -> Keys:
    """2 * page + writable: neighbours whose keys differ by 2 continue each other."""
    keys = (
        np.arange(pages.start, pages.stop, pages.step)
        if isinstance(pages, range)
        else np.array(pages, np.int64)
    )
    return (2 * keys + writable).astype(np.int64)


class WindowBook:
    """One key per index: HOLE, PRIVATE, or 2 * page + writable."""

    def __init__(self, num_indices: int) -> None:
        self._keys: Keys = np.full(num_indices, HOLE, np.int64)

    def page_at(self, index: int) -> int | None:
        """None for a hole or private memory."""
        self._check(index, 1)
        key = int(self._keys[index])
        return key >> 1 if key >= 0 else None

    def is_writable(self, index: int) -> bool:
        """Whether the window may write there."""
        self._check(index, 1)
        key = int(self._keys[index])
        return key == PRIVATE or (key >= 0 and bool(key & 1))

    def num_mapped(self) -> int:
        """Places that are no holes."""
        return int(np.count_nonzero(self._keys != HOLE))

    def check_free(self, index: int, count: int) -> None:
        """Raises: BadMapping unless the range is inside the window and all holes."""
        self._check(index, count)
        taken = np.flatnonzero(self._keys[index : index + count] != HOLE)
        if len(taken):
            raise BadMapping(f"index {index + int(taken[0])} is mapped already; unmap it first")

    def check_pages(self, index: int, count: int) -> None:
        """Raises: BadMapping unless the range is inside the window and all of it is pages of the source."""
        self._check(index, count)
        wrong = np.flatnonzero(self._keys[index : index + count] < 0)
        if len(wrong):
            raise BadMapping(f"index {index + int(wrong[0])} is no mapped page")

    def check_mapped(self, index: int, count: int) -> None:
        """Raises: BadMapping unless the range is inside the window and without holes."""
        self._check(index, count)
        holes = np.flatnonzero(self._keys[index : index + count] == HOLE)
        if len(holes):
            raise BadMapping(f"index {index + int(holes[0])} is not mapped")

    def private_at(self, index: int, count: int) -> list[int]:
        """Indices in the range that hold memory of the window's own."""
        self._check(index, count)
        return [index + int(i) for i in np.flatnonzero(self._keys[index : index + count] == PRIVATE)]

    def more_mappings(self, index: int, keys: Keys) -> int:
        """How many more mappings the kernel has once `keys` lie at `index`; negative when fewer."""
        low, high = max(0, index - 1), min(len(self._keys), index + len(keys) + 1)
        before = self._keys[low:high]
        after = before.copy()
        after[index - low : index - low + len(keys)] = keys
        return _edges(after) - _edges(before)

    def set(self, index: int, keys: Keys) -> None:
        """Write the keys; the caller has checked the range."""
        self._keys[index : index + len(keys)] = keys

    def mapped_runs(self) -> list[tuple[int, int]]:
        """(index, count) of each maximal stretch without holes."""
        padded = np.concatenate(([False], self._keys != HOLE, [False]))
        steps = np.flatnonzero(padded[1:] != padded[:-1])
        return [(int(a), int(b - a)) for a, b in zip(steps[::2], steps[1::2], strict=True)]

    def _check(self, index: int, count: int) -> None:
        if index < 0 or count <= 0 or index + count > len(self._keys):
            raise BadMapping(f"{count} at index {index} of a window of {len(self._keys)}")


def _edges(keys: Keys) -> int:
    """Neighbours that the kernel cannot keep in one mapping."""
    left, right = keys[:-1], keys[1:]
    joined = ((left == HOLE) & (right == HOLE)) | ((left >= 0) & (right - left == 2))
    return int(np.count_nonzero(~joined))


def runs(pages: Sequence[int]) -> list[tuple[int, int, int]]:
    """(position, page, count) of each stretch of consecutive pages, longest possible."""
    if isinstance(pages, range) and pages.step == 1:
        return [(0, pages.start, len(pages))] if pages else []
    found: list[tuple[int, int, int]] = []
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            found.append((start, pages[start], i - start))
            start = i
    return found
