"""Whatever happens in whatever order to engines whose blocks are read outside their memory: no step finds wrong bytes,
no page or place that a step knows is free, every request is answered, every place comes back.

The model is tests/support/far_model.py; it runs in a process of its own, because importing vLLM takes longer than it.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = 15
OTHER = int(os.environ.get("TEST_SEED") or random.SystemRandom().randrange(1 << 30))
SEEDS = [1, OTHER]  # one that is always tried, and the commit's (Makefile) or a random one

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("how", [[], ["fair"]], ids=["by-arrival", "in-fair-slices"])
def test_no_order_of_events_gives_wrong_bytes_or_loses_a_place_or_a_request(how):
    words = [sys.executable, "-m", "tests.support.far_model", str(EXAMPLES), *how, *map(str, SEEDS)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, f"{done.stdout[-2_000:]}\n{done.stderr[-8_000:]}"
    print(done.stdout)
