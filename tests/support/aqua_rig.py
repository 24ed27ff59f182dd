"""A coordinator, a mempool and what a PyTorch process needs to lend or to borrow there, for tests."""

from pathlib import Path
from typing import Any

from shared.aqua.lender import LenderSettings
from shared.aqua.settings import AquaSettings
from shared.prompttree.embedded import EmbeddedRedis
from tests.integration.mempool_rig import MempoolProcess
from tests.integration.test_coordinator_market import Coordinator

PAGE_BYTES = 64 << 10
NUM_PAGES = 64  # of each space, and of host memory behind each


class AquaRig:
    """Started from construction to close(). `num_pages`: of each space in host memory, and behind each; `pool`: more
    settings of the mempool."""

    def __init__(
        self, folder: Path, page_bytes: int = PAGE_BYTES, num_pages: int = NUM_PAGES, **pool: Any
    ) -> None:
        self.page_bytes = page_bytes
        self.redis = EmbeddedRedis(0, folder / "redis", appendonly=True)
        self.redis.start()
        self.coordinator = Coordinator(self.redis, "c0", 60_000).start().wait()
        self.api_socket = folder / "api.sock"
        self.mempool = MempoolProcess(
            folder,
            **{
                "capacity-bytes": num_pages * page_bytes, "dram-bytes": num_pages * page_bytes,
                "dram-for-host": "true", "api-socket": self.api_socket, "copy-timeout-ms": 60_000,
                "out-timeout-ms": 60_000, "offer-patience-ms": 60_000, "coordinator-url": self.coordinator.url,
            }
            | pool,
        )  # fmt: skip

    def consumer(self, name: str = "consumer", **changed: object) -> AquaSettings:
        options = {"local_bytes": 16 * self.page_bytes, "borrow_bytes": 32 * self.page_bytes, "every_ms": 20}
        options |= changed
        return AquaSettings(
            socket=str(self.mempool.socket), api_socket=str(self.api_socket), instance=name, page_bytes=self.page_bytes,
            coordinator_url=self.coordinator.url, ttl_ms=600_000, timeout_ms=60_000, **options,
        )  # fmt: skip

    def lender(
        self, name: str = "lender", device: str = "", num_pages: int = NUM_PAGES // 2
    ) -> LenderSettings:
        return LenderSettings(
            socket=str(self.mempool.socket), instance=name, device=device or f"cpu:{name}",
            most_bytes=num_pages * self.page_bytes, coordinator_url=self.coordinator.url, page_bytes=self.page_bytes,
            timeout_ms=60_000,
        )  # fmt: skip

    def close(self) -> None:
        self.mempool.stop()
        self.coordinator.process.kill()
        self.redis.kill()
