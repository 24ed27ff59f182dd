"""What another process has open, while it opens and closes."""

import contextlib
import os


def open_files(pid: int) -> dict[int, str]:
    """What each descriptor of the process names. One closed meanwhile is left out. Raises: OSError: no process."""
    found: dict[int, str] = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found
