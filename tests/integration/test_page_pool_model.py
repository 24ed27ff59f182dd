"""Whatever happens in whatever order to engines that work in the mempool's pages: no step finds wrong bytes, every
request is answered, every page comes back.

The model is tests/support/page_model.py; it runs in a process of its own, because importing vLLM takes longer than it.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = os.environ.get("QUIRE_MODEL_EXAMPLES", "150")
OTHER = int(os.environ.get("TEST_SEED") or random.SystemRandom().randrange(1 << 30))
SEEDS = [1, 27, OTHER]  # two that are always tried, and the commit's (Makefile) or a random one

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_no_order_of_events_gives_wrong_bytes_or_loses_a_page_or_a_request():
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.page_model", EXAMPLES, *map(str, SEEDS)],
        cwd=ROOT, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2_000:]}\n{done.stderr[-8_000:]}"
    print(done.stdout)
