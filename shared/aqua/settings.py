"""What a consumer and a lender say about themselves, and what a consumer is told of its memory."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class AquaSettings:
    """Args:
    socket, api_socket: of the host's mempool, which needs `dram_bytes`, and on a CPU `dram_for_host`.
    instance: name, unlike any other's on the host; one used before has local_bytes of then, as long as the mempool
        lives.
    device: torch's; tensors in use are there. "cuda": the GPU that is current when the Aqua is made.
    local_bytes: of this device, for tensors in use. A GPU's are taken at once.
    borrow_bytes: wanted of peers; 0: host memory only.
    page_bytes: a lender's pages are at least as large. On a GPU a multiple of 2 MiB.
    address_bytes: of all tensors together; 0: 64 times local_bytes.
    step_bytes: that one step() moves at most, or one tensor.
    ttl_ms: of a loan that this process does not renew; the coordinator's lease_ttl_ms at most.
    every_ms: between two looks at the market.
    """

    socket: str
    api_socket: str
    instance: str
    local_bytes: int
    device: str = "cpu"
    borrow_bytes: int = 0
    page_bytes: int = 8 << 20
    address_bytes: int = 0
    coordinator_url: str = ""
    coordinator_key: str = ""
    ttl_ms: int = 30_000
    every_ms: int = 500
    step_bytes: int = 256 << 20
    timeout_ms: int = 30_000


@dataclass(frozen=True, slots=True)
class LenderSettings:
    """Args:
    socket: of the host's mempool. instance: name, unlike any other's on the host.
    device: as in wire.Attach: "cpu:" and a name, or "cuda:" and the GPU's UUID (local_memory.mempool_device()).
    most_bytes: that will ever be lent at once; the mempool makes the pages with the name's first lend(), never more.
    page_bytes: at least a consumer's.
    """

    socket: str
    instance: str
    device: str
    most_bytes: int
    coordinator_url: str
    coordinator_key: str = ""
    page_bytes: int = 8 << 20
    timeout_ms: int = 30_000


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """What step() returns. borrowed, returned: of loans; evacuated: peer to host memory, by the mempool; promoted: host
    memory to a peer, by step(); lost: nowhere."""

    kind: Literal["borrowed", "returned", "evacuated", "promoted", "lost"]
    num_bytes: int
