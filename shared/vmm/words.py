"""64-bit words in shared memory, written with release order and read with acquire order (architecture: rule 1).

One writer publishes: everything that it wrote before store() is seen by whoever reads the stored value with load().
No compiler is needed. On x86-64 plain aligned stores and loads are ordered so (Intel SDM 3A 9.2: stores are not
reordered with older loads and stores, loads not with older loads), and CPython's memory views execute each as one
instruction; a reader may use the words as a seqlock: load, copy, load again. Elsewhere libatomic does both, in a call
of 1 us (it comes with GCC's runtime); a seqlock's second load would need a fence there, which is not offered.
"""

import ctypes
import mmap
import platform
from collections.abc import Callable

from shared.vmm.errors import BadMapping, VmmUnavailable

WORD_BYTES = 8
_ACQUIRE, _RELEASE = 2, 3  # of C11's memory_order


class Words:
    """Words 0 .. num_words - 1 of a mapping; the mapping's owner keeps it until close().

    Args:
        memory: writable for store(); read-only memory serves load().
        offset_bytes: where word 0 is; a multiple of 8.
        native: use libatomic on x86-64 too; for tests.
    Raises: BadMapping when the words do not lie in the memory; VmmUnavailable without libatomic where it is needed.
    Cost: load() and store() about 0.2 us on x86-64.
    """

    def __init__(
        self, memory: mmap.mmap, num_words: int, offset_bytes: int = 0, *, native: bool = False
    ) -> None:
        if offset_bytes % WORD_BYTES or num_words <= 0 or offset_bytes + num_words * WORD_BYTES > len(memory):
            raise BadMapping(f"{num_words} words at {offset_bytes} of {len(memory)} B")
        self.num_words = num_words
        self._view = memoryview(memory)[offset_bytes : offset_bytes + num_words * WORD_BYTES].cast("Q")
        plain = platform.machine() in ("x86_64", "AMD64") and not native
        self._native = None if plain else _libatomic()
        self._base = _address_of(self._view)

    def load(self, index: int) -> int:
        """What the writer last published there, and all that it wrote before. Raises: IndexError."""
        if not 0 <= index < self.num_words:
            raise IndexError(index)
        if self._native is None:
            return self._view[index]
        return self._native[0](self._base + WORD_BYTES * index, _ACQUIRE)

    def store(self, index: int, value: int) -> None:
        """Publish. Raises: IndexError; TypeError for read-only memory; ValueError when it is no u64."""
        if not 0 <= index < self.num_words:
            raise IndexError(index)
        if self._view.readonly:
            raise TypeError("these words are read-only here")
        if not 0 <= value < 1 << 64:
            raise ValueError(value)
        if self._native is None:
            self._view[index] = value
        else:
            self._native[1](self._base + WORD_BYTES * index, value, _RELEASE)

    def close(self) -> None:
        """Let go of the mapping."""
        self.num_words = 0
        self._view.release()


def _libatomic() -> tuple[Callable[[int, int], int], Callable[[int, int, int], None]]:
    try:
        library = ctypes.CDLL("libatomic.so.1")
        load, store = library.__atomic_load_8, library.__atomic_store_8
    except (OSError, AttributeError) as error:
        raise VmmUnavailable(f"install the package libatomic1: {error}") from error
    load.restype = ctypes.c_uint64
    load.argtypes = (ctypes.c_void_p, ctypes.c_int)
    store.restype = None
    store.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int)
    return load, store


def _address_of(view: memoryview) -> int:
    """Also of read-only memory, for which ctypes has no from_buffer()."""
    import numpy as np

    return int(np.frombuffer(view, np.uint64).ctypes.data)
