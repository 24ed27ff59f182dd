"""Arenas of the fused all-reduce from our own pages: an allocation a rank, its descriptor handed to every other rank.

For ranks that are processes of one host and user, without torch's symmetric memory. An importer's mapping keeps the
memory, so that a rank that dies takes nothing away from under a running kernel.
"""

import contextlib
import os
import socket
import time
from pathlib import Path

import torch

from shared.errors import PeerProtocolError, PeerTimeout
from shared.kernels.allreduce_rmsnorm.arenas import Arena
from shared.transport.unix_socket import close_fds, listen_privately, peer_credentials, receive, transmit
from shared.vmm.cuda_driver import CudaVmmDriver, VmmDriver
from shared.vmm.cuda_pages import DeviceSpan

TIMEOUT_S = 60.0
RETRY_S = 0.02


def exchange_fds(
    folder: Path, rank: int, world: int, fd: int, timeout_s: float = TIMEOUT_S
) -> dict[int, int]:
    """Every other rank's descriptor, by rank, now the caller's; `fd` stays the caller's too.

    Sockets lie in `folder`, which all ranks know and nobody else may write. A rank connects to those below it and
    is connected to by those above.
    Raises: PeerTimeout when a rank does not come; PeerProtocolError when somebody else does. Nothing is kept then.
    """
    until = time.monotonic() + timeout_s
    found: dict[int, int] = {}
    path = _path(folder, rank)
    listener = listen_privately(path, backlog=world)
    try:
        for other in range(rank):
            with _connect(_path(folder, other), until) as link:
                _swap(link, rank, fd, found, until)
        while len(found) < world - 1:
            listener.settimeout(_left(until))
            try:
                link, _ = listener.accept()
            except TimeoutError as error:
                missing = set(range(world)) - {rank} - found.keys()
                raise PeerTimeout(f"ranks {sorted(missing)} did not come for rank {rank}'s memory") from error
            with link:
                _swap(link, rank, fd, found, until)
        if found.keys() != set(range(world)) - {rank}:
            raise PeerProtocolError(f"rank {rank} of {world} heard from ranks {sorted(found)}")
    except BaseException:
        close_fds(list(found.values()))
        raise
    finally:
        listener.close()
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    return found


def page_arena(
    num_bytes: int,
    device: torch.device,
    rank: int,
    world: int,
    folder: Path,
    *,
    driver: VmmDriver | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Arena:
    """This rank's zeroed memory and everybody's, mapped here to be read and written; close() unmaps all of it.

    All ranks call it; afterwards they meet once more by themselves before the first call, because zeros are written
    here and flags there. Raises: VmmError, OutOfPages, PeerTimeout, PeerProtocolError.
    Cost: about a millisecond and the exchange.
    """
    torch.cuda.current_stream(device)  # the context exists from here on
    driver = driver or CudaVmmDriver(device.index or 0)
    granularity = driver.granularity_bytes
    size = -(-num_bytes // granularity) * granularity
    mapped: list[int] = []

    def close() -> None:
        for address in mapped:
            driver.unmap(address, size)
            driver.free_reservation(address, size)
        mapped.clear()

    def place(handle: int) -> int:
        try:
            address = driver.reserve(size)
            try:
                driver.map(address, size, handle)
            except BaseException:
                driver.free_reservation(address, size)
                raise
        finally:
            driver.release(handle)  # the mapping keeps the memory
        mapped.append(address)
        driver.set_access(address, size, driver.access_address(True))
        return address

    handle = driver.create(size)
    try:
        fds = [driver.export_fd(handle)]
    except BaseException:
        driver.release(handle)
        raise
    bases: dict[int, int] = {}
    try:
        bases[rank] = place(handle)
        driver.zero(bases[rank], size)
        theirs = exchange_fds(folder, rank, world, fds[0], timeout_s)
        fds += theirs.values()
        for other, their_fd in theirs.items():
            bases[other] = place(driver.import_fd(their_fd))
        own = torch.as_tensor(DeviceSpan(bases[rank], size, driver), device=device).view(torch.uint8)
    except BaseException:
        close()
        raise
    finally:
        close_fds(fds)
    return Arena(own, tuple(bases[one] for one in range(world)), 0, close)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"arena-{rank}.sock"


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())


def _connect(path: Path, until: float) -> socket.socket:
    """Raises: PeerTimeout when nobody listens there in time."""
    while True:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
            link.close()
            if time.monotonic() >= until:
                raise PeerTimeout(f"nobody listens at {path.name}") from error
            time.sleep(RETRY_S)
        else:
            return link


def _swap(link: socket.socket, rank: int, fd: int, found: dict[int, int], until: float) -> None:
    """Own rank and descriptor out, theirs in."""
    if peer_credentials(link).uid != os.getuid():
        raise PeerProtocolError("another user's process came for a rank's memory")
    link.settimeout(_left(until))
    try:
        transmit(link, memoryview(bytes([rank])), (fd,))
        data, fds = receive(link, max_fds=1, read_bytes=1)
    except TimeoutError as error:
        raise PeerTimeout(f"a rank came to rank {rank} and said nothing") from error
    if len(data) != 1 or len(fds) != 1 or data[0] in found:
        close_fds(fds)
        raise PeerProtocolError(f"rank {rank} was sent {data!r} with {len(fds)} descriptors")
    found[data[0]] = fds[0]
