"""For measurements only: how many calls of CUDA's virtual memory this process makes, or its mapper for it.

Counted where all of them pass: CudaVmmDriver's one way to the driver, and what is handed to a native mapper's thread.
Kernel launches and copies are no such calls.
"""

import threading
from collections.abc import Sequence
from typing import Any

from shared.vmm.cuda_driver import CudaVmmDriver
from shared.vmm.interface import OP_PAUSE, Op
from shared.vmm.mapper import MAPPER_THREAD, NativeMapper


class DriverCalls:
    """`inline`: of threads that wait for them; `background`: of a mapper's thread. Both since counting began."""

    def __init__(self) -> None:
        self.inline = 0
        self.background = 0


def count_driver_calls() -> DriverCalls:
    """Count from now on, in this process, and in those forked from it by themselves. Call once."""
    calls = DriverCalls()
    stock_call, stock_submit = CudaVmmDriver._call, NativeMapper.submit

    def _call(self: CudaVmmDriver, name: str, *arguments: Any) -> Any:
        if threading.current_thread().name == MAPPER_THREAD:
            calls.background += 1
        else:
            calls.inline += 1
        return stock_call(self, name, *arguments)

    def submit(self: NativeMapper, ops: Sequence[Op]) -> int:
        calls.background += sum(op.code != OP_PAUSE for op in ops)
        return stock_submit(self, ops)

    CudaVmmDriver._call = _call
    NativeMapper.submit = submit
    return calls
