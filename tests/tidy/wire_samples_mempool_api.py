"""Samples of the nine calls' messages; wire_samples.py takes them up."""

from typing import Any

from shared.ids import BlockHash, Epoch, InstanceId, PageId, SpaceId
from shared.wire.codec import Channel
from shared.wire.mempool_api import (
    FROM_MEMPOOL_API,
    TO_MEMPOOL_API,
    Addresses,
    AllocMem,
    ApiFailed,
    ApiHello,
    CopiedDirectly,
    Counted,
    DeleteBlocks,
    Delivered,
    Evacuated,
    FreeMem,
    InsertBlocks,
    MatchBlocks,
    Medium,
    PullPages,
    SwapIn,
    SwapOut,
    Transfer,
    instance_key,
    pack_addresses,
)

P, D = InstanceId("prefill-0"), InstanceId("decode-0")
HASHES = b"\x22" * 64
SEED = BlockHash(b"\x11" * 32)
PAGES = pack_addresses(
    instance_key(P), Medium.HBM, SpaceId(3), [PageId(1), PageId(70_000)], [Epoch(1 << 50), Epoch(9)]
)
TRANSFER = Transfer(
    call_id=8, target=D, sources=PAGES, targets=PAGES, flags=6, private=b"p", insert=True, parent=SEED,
    hashes=HASHES, last_tokens=3, timeout_ms=500,
)  # fmt: skip

MEMPOOL_API_SAMPLES: dict[str, tuple[Channel[Any], Any, tuple[bytes, ...]]] = {
    "api-hello": (TO_MEMPOOL_API, ApiHello(instance=P, receives=True, is_mempool=True), ()),
    "api-alloc": (TO_MEMPOOL_API, AllocMem(call_id=1, num_blocks=2, mem_type="mixed", instance=P), ()),
    "api-free": (TO_MEMPOOL_API, FreeMem(call_id=2, addresses=PAGES), ()),
    "api-insert": (
        TO_MEMPOOL_API,
        InsertBlocks(call_id=3, parent=SEED, hashes=HASHES, addresses=PAGES, last_tokens=5, flags=1),
        (),
    ),
    "api-match": (TO_MEMPOOL_API, MatchBlocks(call_id=4, hashes=HASHES, instance=P, flags=1), ()),
    "api-delete": (TO_MEMPOOL_API, DeleteBlocks(call_id=5, hashes=HASHES, instance=P), ()),
    "api-swap-out": (TO_MEMPOOL_API, SwapOut(call_id=6, num_blocks=7, instance=P), ()),
    "api-swap-in": (TO_MEMPOOL_API, SwapIn(call_id=7, addresses=PAGES), ()),
    "api-transfer": (TO_MEMPOOL_API, TRANSFER, ()),
    "api-copied": (TO_MEMPOOL_API, CopiedDirectly(transfers=3, num_bytes=1 << 40, mediated=2), ()),
    "api-pull": (TO_MEMPOOL_API, PullPages(call_id=9, source=P, order=TRANSFER), ()),
    "api-addresses": (FROM_MEMPOOL_API, Addresses(call_id=1, addresses=PAGES, num_known=1), ()),
    "api-counted": (FROM_MEMPOOL_API, Counted(call_id=2, count=4), ()),
    "api-failed": (FROM_MEMPOOL_API, ApiFailed(call_id=3, code="pages.exhausted", reason="r"), ()),
    "api-evacuated": (FROM_MEMPOOL_API, Evacuated(addresses=PAGES, lost=PAGES), ()),
    "api-delivered": (
        FROM_MEMPOOL_API,
        Delivered(source=P, addresses=PAGES, private=b"\x00\xff", inserted=True, hashes=HASHES),
        (),
    ),
}
