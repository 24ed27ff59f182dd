"""What to copy: three columns of integers, and the rules that make a set of copies one batch.

A batch has no order inside (CUDA driver API, cuMemcpyBatchAsync), so a set whose copies depend on each other
has no meaning: no byte may be written twice, and none may be both read and written. `check` refuses such sets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shared.errors import ClusterError, ResourceError

U64: TypeAlias = NDArray[np.uint64]
NO_ADDRESSES: U64 = np.zeros(0, np.uint64)


class InvalidCopies(ClusterError):
    """The set has no meaning: columns of unequal length, overlapping ranges, a stream that cannot take it."""

    code = "copy.invalid"
    http_status = 500


class CopyUnavailable(ResourceError):
    """No CUDA driver or no such device here."""

    code = "copy.unavailable"
    retryable = False


class CopyFailed(ResourceError):
    """The driver refused. `running`: earlier parts of the same set may still be writing their targets."""

    code = "copy.failed"
    retryable = False

    def __init__(self, call: str, status: str, *, running: bool = False) -> None:
        super().__init__(f"{call}: {status}")
        self.call = call
        self.status = status
        self.running = running


class CopyQueueFull(ResourceError):
    """More sets are in flight than the copier may hold; wait for one of them."""

    code = "copy.queue_full"


class CopyTimeout(ResourceError):
    """The set was not complete by the deadline. It is still running: its targets may not be reused."""

    code = "copy.timeout"


class Direction(StrEnum):
    """Where the bytes are and where they go. Costs differ, so each has rows of its own in the cost table."""

    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"
    DEVICE_TO_DEVICE = "device_to_device"  # within one GPU
    PEER = "peer"  # between GPUs of one host, through pages imported here
    HOST_TO_HOST = "host_to_host"


class Order(IntEnum):
    """When the source may be read (values of CUmemcpySrcAccessOrder). Which writer is safe beside each:

    |             | earlier writer on the same stream | later writer, anywhere, not waiting for the copy |
    |-------------|-----------------------------------|---------------------------------------------------|
    | STREAM      | seen                              | races until the copy is done                      |
    | DURING_CALL | may be missed                     | safe as soon as submit returns                    |
    | ANY         | may be missed                     | races until the copy is done                      |
    """

    STREAM = 1
    DURING_CALL = 2
    ANY = 3


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """sizes[i] bytes from sources[i] to targets[i]: uint64 [num_copies] each, C-contiguous, never written to."""

    sources: U64
    targets: U64
    sizes: U64

    @classmethod
    def of(cls, sources: ArrayLike, targets: ArrayLike, sizes: ArrayLike) -> "Copies":
        """From lists or arrays of non-negative integers; one size may stand for all.

        Raises: InvalidCopies on unequal lengths, negative numbers, or an end beyond 64 bits.
        """
        source, target, size = _column(sources), _column(targets), _column(sizes)
        if np.ndim(sizes) == 0 or (size.size == 1 and source.size > 1):
            size = np.full(source.size, size[0], np.uint64)
        if not source.size == target.size == size.size:
            raise InvalidCopies(
                f"{source.size} sources, {target.size} targets, {size.size} sizes: give as many of each"
            )
        if np.any(source + size < source) or np.any(target + size < target):
            raise InvalidCopies("a range ends beyond the 64-bit address space")
        return cls(source, target, size)

    def __len__(self) -> int:
        return self.sources.size

    @property
    def num_bytes(self) -> int:
        """Bytes read; as many are written."""
        return int(self.sizes.sum())

    def take(self, index: "slice | NDArray[np.intp] | NDArray[np.bool_]") -> "Copies":
        """A part or a permutation; a view where numpy gives one."""
        return Copies(self.sources[index], self.targets[index], self.sizes[index])

    def rows(self) -> Sequence[tuple[int, int, int]]:
        """(source, target, size) as plain integers."""
        return list(zip(self.sources.tolist(), self.targets.tolist(), self.sizes.tolist(), strict=True))


def _column(values: ArrayLike) -> U64:
    array = np.atleast_1d(np.asarray(values))
    if array.ndim != 1:
        raise InvalidCopies(f"a column has one dimension, not {array.ndim}")
    if array.size == 0:
        return NO_ADDRESSES
    if array.dtype.kind == "i" and array.min() < 0:
        raise InvalidCopies("addresses and sizes are not negative")
    if array.dtype.kind not in "iu":
        raise InvalidCopies(f"addresses and sizes are integers, not {array.dtype}")
    return np.ascontiguousarray(array, np.uint64)


def ordered(copies: Copies) -> Copies:
    """Without empty copies, sorted by target."""
    used = copies if len(copies) == 0 or copies.sizes.all() else copies.take(copies.sizes > 0)
    if np.any(used.targets[1:] < used.targets[:-1]):
        return used.take(np.argsort(used.targets))
    return used


def check(copies: Copies) -> None:
    """Refuse a set whose result depends on the order inside it.

    Args:
        copies: as `ordered` leaves them.
    Raises: InvalidCopies naming an address.
    Cost: a pass over the columns; a search for each source where sources and targets lie among each other.
    """
    if len(copies) == 0:
        return
    starts, ends = copies.targets, copies.targets + copies.sizes
    twice = np.flatnonzero(ends[:-1] > starts[1:])
    if twice.size:
        raise InvalidCopies(f"bytes at target {int(starts[twice[0] + 1]):#x} would be written twice")
    behind = copies.sources + copies.sizes
    if copies.sources.min() >= ends[-1] or behind.max() <= starts[0]:
        return
    # The first target that ends behind a source's start is the only one that can be the first to overlap it.
    nearest = np.searchsorted(ends, copies.sources, side="right")
    inside = nearest < ends.size
    nearest[~inside] = 0
    both = inside & (starts[nearest] < behind)
    if both.any():
        raise InvalidCopies(f"bytes at source {int(copies.sources[both.argmax()]):#x} are also a target")
