"""What `make` gives to the programs that it starts."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_make_sets_no_quire_variable_which_quire_would_refuse():
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("QUIRE_", "MAKE"))}
    words = ["make", "--no-print-directory", "--eval", "show-environment: ; @env", "show-environment"]
    found = subprocess.run(words, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert "PATH=" in found.stdout
    assert [line for line in found.stdout.splitlines() if line.startswith("QUIRE_")] == []
