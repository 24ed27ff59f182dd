"""Who holds a GPU's memory: by process, as the driver says, and inside an engine core, as torch's allocator says."""

import os
import subprocess
from pathlib import Path
from typing import Any

SMI_S = 20


def by_process() -> list[dict[str, Any]]:
    """The command and bytes of every process with a context on a GPU of this machine; [] where nobody can say."""
    words = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(words, capture_output=True, text=True, timeout=SMI_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = []
    for line in told.splitlines():
        pid, _, mib = line.partition(",")
        if pid.strip().isdecimal() and mib.strip().isdecimal():
            found.append({"command": _command(int(pid)), "bytes": int(mib) << 20})
    return found


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "gone"
    name = b" ".join(word for word in words if not word.startswith(b"/")).decode(errors="replace")
    return "this process" if pid == os.getpid() else name[:80]


def of_engine(out: Path) -> dict[str, int]:
    """What the recorder of steps (shared/engine/measured.py) last wrote beside `out` of torch's allocator; {} without a
    GPU or a recorder.
    """
    path = out.with_suffix(".memory")
    if not path.exists():
        return {}
    names = ("allocated_bytes", "reserved_bytes", "most_allocated_bytes", "most_reserved_bytes")
    return dict(zip(names, map(int, path.read_text().split()), strict=True))
