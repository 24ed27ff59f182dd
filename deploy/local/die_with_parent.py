"""Exec wrapper: `python -I -S die_with_parent.py PARENT_PID COMMAND...`. The command dies with its parent.

PR_SET_PDEATHSIG survives exec, so the kernel kills the service when the supervisor goes, however it goes.
Set here rather than between fork and exec: that code would have to be async-signal safe.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Never returns; ends with status 1 when the parent is already gone."""
    parent = int(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
