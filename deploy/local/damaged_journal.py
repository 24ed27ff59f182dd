"""A journal that the own Redis cannot read goes out of its way: what is in it is rebuilt by whoever knows it."""

import contextlib
import re
import shutil
import time
from pathlib import Path

# Redis and Valkey's words; an error of reading the disk, which may pass, has others
DAMAGED = re.compile(
    r"(Bad file format|Unexpected end of file|Unknown command '.*') reading the append only file"
    "|Terminating server after rdb file reading failure|Invalid AOF manifest file format"
)


def is_damaged(log_lines: list[str]) -> bool:
    """Whether the server that wrote this ended over its own files."""
    return any(DAMAGED.search(line) for line in log_lines)


def set_aside(folder: Path) -> str:
    """Move the journal's folder to FOLDER.damaged-TIME, the only one that is kept, and make an empty one.

    Returns: what to tell the operator; "" where it cannot be moved.
    """
    kept = folder.with_name(f"{folder.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}")
    with contextlib.suppress(OSError):
        for older in folder.parent.glob(f"{folder.name}.damaged-*"):
            shutil.rmtree(older, ignore_errors=True)
        folder.rename(kept)
        folder.mkdir(mode=0o700)
        return (
            f"its journal is damaged and now at {kept}; it starts empty. Hints and members come back by themselves; "
            "what `quire place --apply` said is gone where the coordinator ended too"
        )
    return ""
