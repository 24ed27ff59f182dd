"""Tests of huge pages say where a kernel makes none."""

import os
from pathlib import Path

import pytest

from shared.vmm.huge_pages import huge_page_bytes

HUGE = huge_page_bytes()


def is_refused() -> str:
    """Why this kernel makes no huge pages; "": it does."""
    if not HUGE:
        return "no huge pages in this kernel"
    if "[deny]" in Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text():
        return "shmem_enabled is deny"
    release = tuple(int(word) for word in os.uname().release.split(".")[:2])
    return "" if release >= (6, 1) else "Linux 6.1 has MADV_COLLAPSE first"


needs_huge = pytest.mark.skipif(bool(is_refused()), reason=is_refused())
