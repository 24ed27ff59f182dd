"""What a set of copies means, byte by byte. Tests ask for equality with this."""

from shared.kernels.copy_pages.copies import Copies


def copy_pages_reference(memory: bytearray, copies: Copies) -> None:
    """Copy within `memory`, where an address is an index: every source byte is read before any is written."""
    read = [(target, bytes(memory[source : source + size])) for source, target, size in copies.rows()]
    for target, data in read:
        memory[target : target + len(data)] = data
