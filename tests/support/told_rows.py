"""A model that runs in a process of its own and says what came of it, a JSON object a line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def rows_of(module: str, *, timeout_s: float) -> list[dict[str, Any]]:
    """What `python -m module` said; a failure shows its output."""
    done = subprocess.run(
        [sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"{done.stdout[-2_000:]}\n{done.stderr[-8_000:]}"
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(*found, sep="\n")
    return found
