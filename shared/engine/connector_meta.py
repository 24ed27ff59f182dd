"""What the scheduler side of the connector tells the worker side for one engine step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(slots=True)
class LoadBlocks:
    """Copy pages[i] (under epochs[i]) into cache block blocks[i], then report the request as received."""

    request_id: str
    pages: list[int]
    epochs: list[int]
    blocks: list[int]


@dataclass(slots=True)
class SaveBlock:
    """After this step's forward pass: copy cache block `block` into a granted page and seal it."""

    block: int
    page: int
    epoch: int
    block_hash: bytes
    parent: bytes
    valid_tokens: int


@dataclass(slots=True)
class Handoff:
    """After this step's saves: lease these blocks for the decode side."""

    handoff_id: str
    hashes: list[bytes]


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):
    """One step's copies."""

    loads: list[LoadBlocks] = field(default_factory=list)
    saves: list[SaveBlock] = field(default_factory=list)
    handoffs: list[Handoff] = field(default_factory=list)
