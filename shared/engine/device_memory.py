"""How much memory of a device a piece of work takes at its peak: a GPU's, as its driver counts it, or this process's.

PyTorch is imported when a GPU is asked for, and not before.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from shared.errors import SettingsError
from shared.machine_memory import MachineMemory

CPU, CUDA = "cpu", "cuda"
NO_ROOM_ON_CPU = "not enough memory"  # PyTorch's allocator raises RuntimeError with these words


class DeviceMemory(Protocol):
    """`begin()`, work, `peak()`; one piece of work at a time."""

    name: str
    total_bytes: int

    def begin(self) -> None:
        """Forget earlier peaks, and give back what is only kept for reuse."""
        ...

    def wait(self) -> None:
        """Until all work given to the device is done."""
        ...

    def peak(self) -> tuple[int, int]:
        """(most bytes used, fewest bytes free) since begin()."""
        ...

    def found_no_room(self, error: BaseException) -> bool:
        """Whether this error says that the device's memory is too small."""
        ...


def open_device(name: str = "") -> DeviceMemory:
    """Args: name: "cpu", "cuda", or "": a GPU where PyTorch has one. Raises: SettingsError."""
    if name == CPU:
        return ProcessMemory()
    if name not in ("", CUDA):
        raise SettingsError(f"no device {name!r}: give cpu or cuda")
    torch = _torch(required=name == CUDA)
    if torch is not None and torch.cuda.is_available():
        return GpuMemory(torch)
    if name == CUDA:
        raise SettingsError("PyTorch has no CUDA device here: give --device cpu")
    return ProcessMemory()


def _torch(*, required: bool) -> Any:
    try:
        import torch
    except ImportError as error:
        if required:
            raise SettingsError(f"a GPU needs PyTorch, which cannot be imported: {error}") from error
        return None
    return torch


class GpuMemory:
    """The current CUDA device, all processes and contexts on it counted: what is free is what could be lent.

    Args: torch: the module, or what stands for it in a test. PyTorch keeps what it once allocated until begin(), so
    that the driver's free bytes after a piece of work are those at its peak.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.name = str(torch.cuda.get_device_name())
        self.total_bytes = int(torch.cuda.mem_get_info()[1])

    def begin(self) -> None:
        """See DeviceMemory."""
        self._torch.cuda.synchronize()
        self._torch.cuda.empty_cache()

    def wait(self) -> None:
        """See DeviceMemory."""
        self._torch.cuda.synchronize()

    def peak(self) -> tuple[int, int]:
        """See DeviceMemory."""
        free_bytes = int(self._torch.cuda.mem_get_info()[0])
        return self.total_bytes - free_bytes, free_bytes

    def found_no_room(self, error: BaseException) -> bool:
        """See DeviceMemory."""
        return isinstance(error, self._torch.cuda.OutOfMemoryError)


class ProcessMemory:
    """This process's resident memory beside what the machine, or a limit on this process, has available.

    What is free at a peak is what was available at begin() less what came on top since: other processes have their
    part. Where the kernel takes no order to forget the peak (a sandbox), peaks only grow: a sweep of growing batches is
    right all the same.
    """

    def __init__(self, proc: Path = Path("/proc/self"), machine: MachineMemory | None = None) -> None:
        self._proc, self._machine = proc, machine or MachineMemory()
        self.name = CPU
        self.total_bytes = self._machine.total_bytes()
        self._most_bytes = 0  # that this process can have resident, as of begin()

    def begin(self) -> None:
        """See DeviceMemory. Raises: SettingsError where resident memory cannot be read."""
        with suppress(OSError):
            (self._proc / "clear_refs").write_text("5")
        self._most_bytes = self._status("VmRSS") + self._machine.available_bytes()

    def wait(self) -> None:
        """Nothing runs behind a call on a CPU."""

    def peak(self) -> tuple[int, int]:
        """See DeviceMemory. Raises: SettingsError where the peak cannot be read."""
        used_bytes = self._status("VmHWM")
        return used_bytes, max(0, self._most_bytes - used_bytes)

    def _status(self, key: str) -> int:
        for line in (self._proc / "status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
        raise SettingsError(
            f"{self._proc / 'status'} has no {key}: this process's memory cannot be read here"
        )

    def found_no_room(self, error: BaseException) -> bool:
        """See DeviceMemory."""
        return isinstance(error, MemoryError) or (
            isinstance(error, RuntimeError) and NO_ROOM_ON_CPU in str(error)
        )
