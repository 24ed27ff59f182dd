"""In which parts an engine gives many pages back. No I/O."""

from collections.abc import Iterator

# empty pages that the mempool hears of at once: so many first, then twice as many each time up to the second number.
# Copies into these begin while it hears of the next, and take three times as long as that
FIRST_PART, LARGEST_PART = 32, 256


def give_parts(count: int) -> Iterator[int]:
    """How many pages each message names, together `count`."""
    size = FIRST_PART
    while count > 0:
        part, size = min(count, size), min(2 * size, LARGEST_PART)
        count -= part
        yield part
