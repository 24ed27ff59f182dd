"""The supervisor's last will: `python -I -S guard.py PID...`, with the supervisor holding the other end of stdin.

Each service leads its own session. PR_SET_PDEATHSIG ends the leaders when the supervisor dies; what a leader
had started itself (gateway processes, engine cores) may outlive it. The arguments name the sessions that live
already; the supervisor writes `+PID` and `-PID` lines behind them; at end of file this process kills every member
of the sessions still named.
"""

import contextlib
import os
import signal
import sys
import time

MAX_ROUNDS = 40
ROUND_S = 0.05


def sessions() -> dict[int, int]:
    """Session id of every living process (zombies left out), from /proc/PID/stat."""
    out: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
                if fields[0] != b"Z":
                    out[int(entry)] = int(fields[3])
    return out


def kill_sessions(leaders: set[int]) -> int:
    """SIGKILL every member of these sessions; how many were found."""
    members = [pid for pid, session in sessions().items() if session in leaders]
    for pid in members:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return len(members)


def main() -> None:
    """Read until the supervisor is gone, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    leaders = {int(pid) for pid in sys.argv[1:]}
    for line in sys.stdin:
        pid = int(line[1:])
        if line[0] == "+":
            leaders.add(pid)
        else:
            leaders.discard(pid)
    for _ in range(MAX_ROUNDS):  # again: one may have forked meanwhile
        if not leaders or not kill_sessions(leaders):
            return
        time.sleep(ROUND_S)


if __name__ == "__main__":
    main()
