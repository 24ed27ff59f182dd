"""One launch of pieces.cu: its rows go into a pinned slot that the kernel reads, which is free behind its event."""

import numpy as np

from shared.kernels.copy_pages.copies import CopyFailed
from shared.kernels.copy_pages.driver import CopyDriver
from shared.kernels.copy_pages.host_memory import view
from shared.kernels.copy_pages.plan import KERNEL_CTAS, Plan
from shared.kernels.copy_pages.staging import StagingSlots

COLUMNS = 3  # sources, targets, sizes: uint64 each


def launch(driver: CopyDriver, tables: StagingSlots, plan: Plan, stream: int) -> None:
    """Stream-ordered. The copier holds its lock, and has seen that a table is free.

    Raises: CopyFailed; nothing of it runs.
    """
    slot = tables.take()
    if slot is None:
        raise CopyFailed("pieces.cu", "every table is in use")
    rows = plan.runs
    table = view(slot[0], COLUMNS * 8 * len(rows)).view(np.uint64).reshape(COLUMNS, len(rows))
    table[0], table[1], table[2] = rows.sources, rows.targets, rows.sizes
    try:
        driver.copy_rows(slot[0], len(rows), KERNEL_CTAS * plan.choice.lanes, stream)
    except CopyFailed:
        tables.give_back(slot)
        raise
    driver.record(slot[1], stream)  # if this fails the slot is nobody's for good: the kernel reads it
    tables.give_back(slot)
