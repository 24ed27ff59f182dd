"""Descriptors that newcomers need: whether there is room, asked before anything is decided about one."""

import os

from services.mempool.memory import PoolMemory
from shared.transport.unix_socket import OutOfDescriptors, close_fds, duplicates, opening

# More than one attachment takes, so that threads which open some meanwhile leave enough: memory of a space and of the
# one behind it (three each while they are made, two mappings), copies of those that are sent, the keeper's
ROOM = 32


def shortage() -> str:
    """Why ROOM descriptors cannot be opened now; "" when they can. Cost: about 50 us."""
    held: list[int] = []
    try:
        with opening():
            while len(held) < ROOM:
                held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OutOfDescriptors as error:
        return f"{len(held)} of {ROOM} descriptors are left: {error.message}"
    finally:
        close_fds(held)
    return ""


def of_memory(memory: PoolMemory, *, table_only: bool, reads_only: bool) -> list[int]:
    """Of pages, for reading or for writing too, and of the table; the caller's to close. Raises: OutOfDescriptors."""
    if table_only:
        return duplicates([memory.table_fd])
    if not reads_only:
        return duplicates([memory.page_fd, memory.table_fd])
    with opening():
        pages = os.open(f"/proc/self/fd/{memory.page_fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return [pages, *duplicates([memory.table_fd])]
    except BaseException:
        os.close(pages)
        raise
