"""A peer describes what cannot be mapped: its path is refused, and no thread ends by it."""

import fcntl
import os

import pytest

from shared.errors import PeerProtocolError
from shared.transfer.describe import RegionDescription
from shared.transfer.interface import RegionKind
from shared.transfer.shm import HostMapping


def test_a_region_of_no_pages_is_a_peers_mistake() -> None:
    fd = os.memfd_create("empty", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    region = RegionDescription(
        name="pages", kind=RegionKind.HOST, page_bytes=4096, num_pages=0, memory_key=""
    )
    with pytest.raises(PeerProtocolError, match="no memfd of pages"):
        HostMapping(region, fd, 0, writable=False)
