"""How many processors this process may really use."""

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def usable_cpus(root: Path = CGROUPS) -> float:
    """Cores by affinity, or the quota of the container (cgroup v2, the root of its namespace) where that is less."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, _, period = (root / "cpu.max").read_text().strip().partition(" ")
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError, ZeroDivisionError):  # no cgroup v2, or "max"
        return cores
