"""What starts have measured of sums over ranks, kept in `worker.state_dir` for the next start on the same machine.

Keys say which GPUs these are and by links of what kind each rank reaches each other one (links_between): two of four
GPUs of one machine may have a bridge between them, and two others not.
A file that cannot be read or written costs a measurement, and is said in the log; it never fails a start.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from shared import kept_file
from shared.kernels.allreduce_rmsnorm.driver import links_from, source_digest

T = TypeVar("T")
WHAT = "worker.weave"
DRIVER_VERSION = Path("/sys/module/nvidia/version")


def machine_parts() -> tuple[str, ...]:
    """What times depend on beside shapes, GPU and ranks: driver, torch, the kernel's source."""
    return driver_version(), str(torch.__version__), source_digest()


def driver_version() -> str:
    """As "580.159.04"; "" without one. No context is made."""
    try:
        return DRIVER_VERSION.read_text().strip()
    except OSError:
        return ""


def links_between(device: torch.device, group: dist.ProcessGroup) -> str:
    """By links of what kind each rank's GPU reaches each other's, the same on every rank. All call it at the same time.

    As driver.links_from() has them, a rank's in square brackets. Args: group: of the ranks, on a CPU backend.
    """

    def from_all(mine: list[int]) -> list[list[int]]:
        given = torch.tensor(mine)
        found = [torch.zeros_like(given) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, given, group=group)
        return [one.tolist() for one in found]

    own = device.index or 0
    return str(from_all(links_from(own, [place for (place,) in from_all([own])])))


def key_of(*parts: object) -> str:
    """24 hex digits; equal parts, equal key."""
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:24]


def read_kept(path: Path | None) -> bytes | None:
    """None where there is none."""
    return kept_file.read_kept(path, WHAT) if path is not None else None


def write_kept(path: Path | None, data: bytes) -> None:
    """Whole or not at all."""
    if path is not None:
        kept_file.write_kept(path, data, WHAT)


def shared_bytes(data: bytes, first: int, group: dist.ProcessGroup) -> bytes:
    """The first rank's, on every rank, over a CPU group. Args: first: its global rank."""
    size = torch.tensor([len(data)])
    dist.broadcast(size, first, group=group)
    table = torch.zeros(int(size), dtype=torch.uint8)
    if data and dist.get_rank() == first:
        table = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if int(size):
        dist.broadcast(table, first, group=group)
    return table.numpy().tobytes()


def kept_or_measured(
    path: Path | None,
    unpack: Callable[[bytes], T | None],
    pack: Callable[[T], bytes],
    measure: Callable[[], T],
    share: Callable[[bytes], bytes],
    *,
    is_first: bool,
) -> T:
    """What the first rank's file holds, else what all ranks measure together; the first rank keeps that.

    All ranks call it at the same time and go the same way, whatever files the others see.
    Args: share: shared_bytes() of the engine's group.
    """
    data = share((read_kept(path) or b"") if is_first else b"")
    found = unpack(data) if data else None
    if found is not None:
        return found
    found = measure()
    if is_first:
        write_kept(path, pack(found))
    return found
