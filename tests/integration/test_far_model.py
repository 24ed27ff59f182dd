"""Whatever happens in whatever order to engines whose blocks are read outside their memory: no step finds wrong bytes,
no page or place that a step knows is free, every request is answered, every place comes back.

The models are tests/support/far_model.py and, with sizes and events of more kinds, far_wide_model.py; they run in
processes of their own, because importing vLLM takes longer than they do.
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
# nobody ran for ten seconds; places outlived their mempool
ONCE = {"fair": ["1-656", "2-139", "2-337", "7-30", "7-346"]}

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("how", [[], ["fair"]], ids=["by-arrival", "in-fair-slices"])
def test_no_order_of_events_gives_wrong_bytes_or_loses_a_place_or_a_request(how):
    words = [sys.executable, "-m", "tests.support.far_model", str(EXAMPLES), *how, *map(str, SEEDS)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, f"{done.stdout[-2_000:]}\n{done.stderr[-8_000:]}"
    print(done.stdout)


@pytest.mark.parametrize("how", [[], ["fair"]], ids=["by-arrival", "in-fair-slices"])
def test_engines_of_any_size_with_losses_and_choices_answer_everything_and_nobody_stands_still_for_long(how):
    examples = [*ONCE.get("".join(how), []), *map(str, SEEDS)]
    words = [sys.executable, "-m", "tests.support.far_wide_model", str(2 * EXAMPLES), *how, *examples]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, f"{done.stdout[-2_000:]}\n{done.stderr[-8_000:]}"
    print(done.stdout)
