"""Start a set of copies and look whether it is done, in machine code: 2 us where Python's way to the driver takes 15.

Importing this costs about 0.5 s, and raises VmmUnavailable without numba; the first use compiles once into its cache.
The thread's context is put back, and the interpreter's lock is free meanwhile.
"""

from typing import Any

import numpy as np

from shared.transfer.page_stream import MAX_DESCRIPTORS
from shared.vmm.errors import VmmUnavailable

try:
    from numba import njit

    from shared.vmm.native_calls import call6, call8
except ImportError as error:
    raise VmmUnavailable(f"no numba: {error}") from error

GET_CONTEXT, SET_CONTEXT, BATCH, RECORD, QUERY, CLOCK = range(6)  # rows of `calls`
NOT_READY = 600
_CLOCK_MONOTONIC = 1
_STATUS = 0xFFFFFFFF


@njit(nogil=True, cache=True)
def _entered(calls: Any, context: int) -> int:
    was = np.zeros(1, np.int64)
    call6(calls[GET_CONTEXT], was.ctypes.data, 0, 0, 0, 0, 0)
    if was[0] != context:
        call6(calls[SET_CONTEXT], context, 0, 0, 0, 0, 0)
    return was[0]


@njit(nogil=True, cache=True)
def start(
    calls: Any, context: int, stream: int, event: int, attributes: int, first: int,
    sources: Any, targets: Any, sizes: Any, batch: int,
) -> int:  # fmt: skip
    """Batches on the stream, none where no pages are given, and the event behind them. The first has `batch` pages,
    each other one twice as many as the one before, and the last what is left.

    Args:
        calls: int64, addresses of the driver's functions and of clock_gettime.
        attributes, first: CudaDriver.batch_words().
        sources, targets: uint64, C-contiguous, of one length; sizes: as many or more.
    Returns: a CUresult.
    """
    was = _entered(calls, context)
    status = begin = 0
    while begin < sources.size and status == 0:
        left = sources.size - begin
        count = min(batch if left >= 3 * batch else left, MAX_DESCRIPTORS)
        batch *= 2
        at = 8 * begin  # of the columns' words
        status = call8(
            calls[BATCH], targets.ctypes.data + at, sources.ctypes.data + at, sizes.ctypes.data + at, count, attributes,
            first, 1, stream,
        )  # fmt: skip
        status &= _STATUS
        begin += count
    if status == 0:
        status = call6(calls[RECORD], event, stream, 0, 0, 0, 0) & _STATUS
    if was != context:
        call6(calls[SET_CONTEXT], was, 0, 0, 0, 0, 0)
    return status


@njit(nogil=True, cache=True)
def wait(calls: Any, context: int, event: int, spin_ns: int) -> int:
    """Ask for the event until it is there or the time is up, at least once. Returns: a CUresult, such as NOT_READY."""
    was = _entered(calls, context)
    time = np.zeros(2, np.int64)
    status = call6(calls[QUERY], event, 0, 0, 0, 0, 0) & _STATUS
    if status == NOT_READY and spin_ns > 0:
        call6(calls[CLOCK], _CLOCK_MONOTONIC, time.ctypes.data, 0, 0, 0, 0)
        end_ns = time[0] * 1_000_000_000 + time[1] + spin_ns
        while status == NOT_READY and time[0] * 1_000_000_000 + time[1] < end_ns:
            status = call6(calls[QUERY], event, 0, 0, 0, 0, 0) & _STATUS
            call6(calls[CLOCK], _CLOCK_MONOTONIC, time.ctypes.data, 0, 0, 0, 0)
    if was != context:
        call6(calls[SET_CONTEXT], was, 0, 0, 0, 0, 0)
    return status
