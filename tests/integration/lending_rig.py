"""A real coordinator with its Redis, and how a mempool on it is started, for tests of lending."""

from typing import Any

import pytest

from shared.prompttree.embedded import EmbeddedRedis
from tests.integration.test_coordinator_market import Coordinator
from tests.integration.test_mempool_lending import NUM_PAGES, PAGE_BYTES

COPY_TIMEOUT_MS = 60_000


@pytest.fixture
def coordinator(tmp_path):
    redis = EmbeddedRedis(0, tmp_path / "redis", appendonly=True)
    redis.start()
    made = Coordinator(redis, "c0", 60_000).start().wait()
    yield made
    made.process.kill()
    redis.kill()


def pool_flags(coordinator: Coordinator) -> dict[str, Any]:
    """Of a mempool that this coordinator knows, with host memory behind its pages and patience with this machine.

    Blocks leave for an engine's stock whatever that has, so that a few prompts are more than a space holds.
    """
    return {
        "stock-share": 1.0,
        "capacity-bytes": NUM_PAGES * PAGE_BYTES, "dram-bytes": 64 * PAGE_BYTES, "dram-for-host": "true",
        "offer-patience-ms": 60_000, "copy-timeout-ms": COPY_TIMEOUT_MS, "out-timeout-ms": COPY_TIMEOUT_MS,
        "coordinator-url": coordinator.url, "instance": "mempool-0",
    }  # fmt: skip
