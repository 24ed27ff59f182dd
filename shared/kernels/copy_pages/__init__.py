"""Batched copies of KV pages: host, device and peer memory by plain addresses. See README.md beside this file."""

from shared.kernels.copy_pages.calibrate import open_copier
from shared.kernels.copy_pages.copier import Copier, Ticket
from shared.kernels.copy_pages.copies import (
    Copies,
    CopyFailed,
    CopyQueueFull,
    CopyTimeout,
    CopyUnavailable,
    Direction,
    InvalidCopies,
    Order,
)
from shared.kernels.copy_pages.cpu_copier import CpuCopier
from shared.kernels.copy_pages.cuda_copier import CudaCopier
from shared.kernels.copy_pages.driver import CudaDriver
from shared.kernels.copy_pages.plan import Choice, Limits, Method, Plan, plan_copies

__all__ = [
    "Choice",
    "Copier",
    "Copies",
    "CopyFailed",
    "CopyQueueFull",
    "CopyTimeout",
    "CopyUnavailable",
    "CpuCopier",
    "CudaCopier",
    "CudaDriver",
    "Direction",
    "InvalidCopies",
    "Limits",
    "Method",
    "Order",
    "Plan",
    "Ticket",
    "open_copier",
    "plan_copies",
]
