"""Lists of page ids and epochs as raw little-endian words, the form in which they cross the wire."""

from array import array
from collections.abc import Iterable


def u32_bytes(values: Iterable[int]) -> bytes:
    """Raises: OverflowError when a value is no u32."""
    return array("I", values).tobytes()


def u64_bytes(values: Iterable[int]) -> bytes:
    """Raises: OverflowError when a value is no u64."""
    return array("Q", values).tobytes()


def u32_list(raw: bytes) -> list[int]:
    """Raises: ValueError unless the length is a multiple of 4."""
    out = array("I")
    out.frombytes(raw)
    return out.tolist()


def u64_list(raw: bytes) -> list[int]:
    """Raises: ValueError unless the length is a multiple of 8."""
    out = array("Q")
    out.frombytes(raw)
    return out.tolist()
