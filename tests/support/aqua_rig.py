"""A coordinator, a mempool and what a PyTorch process needs to lend or to borrow there, for tests."""

from pathlib import Path

from shared.aqua.lender import LenderSettings
from shared.aqua.settings import AquaSettings
from shared.prompttree.embedded import EmbeddedRedis
from tests.integration.mempool_rig import MempoolProcess
from tests.integration.test_coordinator_market import Coordinator

PAGE_BYTES = 64 << 10
NUM_PAGES = 64  # of each space, and of host memory behind each


class AquaRig:
    """Started from construction to close()."""

    def __init__(self, folder: Path) -> None:
        self.redis = EmbeddedRedis(0, folder / "redis", appendonly=True)
        self.redis.start()
        self.coordinator = Coordinator(self.redis, "c0", 60_000).start().wait()
        self.api_socket = folder / "api.sock"
        self.mempool = MempoolProcess(
            folder,
            **{
                "capacity-bytes": NUM_PAGES * PAGE_BYTES, "dram-bytes": NUM_PAGES * PAGE_BYTES,
                "dram-for-host": "true", "api-socket": self.api_socket, "copy-timeout-ms": 60_000,
                "out-timeout-ms": 60_000, "coordinator-url": self.coordinator.url,
            },
        )  # fmt: skip

    def consumer(self, name: str = "consumer", **changed: object) -> AquaSettings:
        options = {"local_bytes": 16 * PAGE_BYTES, "borrow_bytes": 32 * PAGE_BYTES, "every_ms": 20} | changed
        return AquaSettings(
            socket=str(self.mempool.socket), api_socket=str(self.api_socket), instance=name, page_bytes=PAGE_BYTES,
            coordinator_url=self.coordinator.url, ttl_ms=600_000, timeout_ms=60_000, **options,
        )  # fmt: skip

    def lender(self, name: str = "lender") -> LenderSettings:
        return LenderSettings(
            socket=str(self.mempool.socket), instance=name, device=f"cpu:{name}",
            most_bytes=NUM_PAGES // 2 * PAGE_BYTES, coordinator_url=self.coordinator.url, page_bytes=PAGE_BYTES,
            timeout_ms=60_000,
        )  # fmt: skip

    def close(self) -> None:
        self.mempool.stop()
        self.coordinator.process.kill()
        self.redis.kill()
