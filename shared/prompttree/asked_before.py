"""Which blocks were in prompts that passed here: leading ones of a prompt that nobody holds any more were evicted.

No I/O. A table of fixed size: a block's hash says its place, and a newer block takes it from an older one.
"""

from array import array
from collections.abc import Sequence
from sys import byteorder

from shared.ids import BlockHash

MAX_BLOCKS = 1 << 20  # of 8 bytes each: 16 million tokens in blocks of 16


class AskedBefore:
    """Args: most_blocks: a power of two; so many places.

    Cost: 5 us to look 256 blocks up, which halves the prompt; 70 us for 256 that are new. Hints: a block whose place
    was taken is forgotten, and then at most what is behind it. Another's hash is taken for it once in 2^64.
    """

    def __init__(self, most_blocks: int = MAX_BLOCKS) -> None:
        if most_blocks < 1 or most_blocks & (most_blocks - 1):
            raise ValueError(f"most_blocks is {most_blocks}; it must be a power of two")
        self._mask = most_blocks - 1
        self._places = array("Q", bytes(8 * most_blocks))
        self._places[0] = 1  # of no hash: those of this place end with zeros

    def ask(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading blocks were asked for before; all are remembered from now on.

        Args: hashes: first block first; of one length, a multiple of 8 bytes.
        """
        known = self._leading(hashes)
        if known < len(hashes):
            places, mask, per_hash = self._places, self._mask, len(hashes[0]) // 8
            numbers = array("Q", b"".join(hashes[known:]))[per_hash - 1 :: per_hash]
            if byteorder == "little":
                numbers.byteswap()  # names that only count, as the simulator's, differ in their last bytes
            for number in numbers:
                places[number & mask] = number
        return known

    def _leading(self, hashes: Sequence[BlockHash]) -> int:
        """A block's hash names all before it, so who knows one knows them all."""
        places, mask = self._places, self._mask
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            number = int.from_bytes(hashes[middle - 1][-8:], "big")
            if places[number & mask] == number:
                low = middle
            else:
                high = middle - 1
        return low
