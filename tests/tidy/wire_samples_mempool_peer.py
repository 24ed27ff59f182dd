"""Samples of the channel between mempools of different hosts; see wire_samples.py."""

from typing import Any

from shared.ids import Epoch, HandoffId, InstanceId, LeaseId, RequestId
from shared.kv.layout import EngineDescription
from shared.kv.words import u32_bytes, u64_bytes
from shared.wire.codec import Channel
from shared.wire.handoff import HandoffState
from shared.wire.mempool import FROM_MEMPOOL, TO_MEMPOOL, Acquire, Attached
from shared.wire.mempool_api import Addresses, AllocMem, PullPages, Transfer
from shared.wire.mempool_peer import (
    TO_READER,
    TO_SOURCE,
    BlocksCompleted,
    CallRefused,
    CheckEpochs,
    ClosePath,
    EpochsChecked,
    Here,
    OpenPath,
    PathBytes,
    PathFailed,
    PathOpened,
    PeerCall,
    PeerHello,
    PeerRefused,
    PeerReply,
    PeerWelcome,
    RemoteAcquire,
    RemoteAcquired,
    RemoteRelease,
    WhoIsHere,
)
from shared.wire.mempool_reach import HostReach
from shared.wire.requests import TO_GATEWAY, Prefilled, StageReceipt, TokenChunk

PAGES, EPOCHS = u32_bytes([1, 70_000]), u64_bytes([1 << 50, 9])
HASHES = b"\x22" * 64
ADDRESS = "tcp://10.213.7.1:8107"
HANDOFF = HandoffState(
    handoff_id=HandoffId("h"), source=InstanceId("prefill-0"), valid_tokens=5, source_mempool=ADDRESS,
    description=EngineDescription(model="m", fingerprint="f", dtype="float32", layout="l", backend="b"),
)  # fmt: skip

MEMPOOL_PEER_SAMPLES: dict[str, tuple[Channel[Any], Any, tuple[bytes, ...]]] = {
    "peer-hello": (TO_SOURCE, PeerHello(instance="mempool-0", boot_generation=Epoch(7)), ()),
    "peer-welcome": (TO_READER, PeerWelcome(instance="mempool-1", boot_generation=Epoch(8)), ()),
    "peer-welcome-takes-back": (
        TO_READER, PeerWelcome(instance="mempool-1", boot_generation=Epoch(8), takes_back=True), (),
    ),
    "peer-blocks-completed": (
        TO_SOURCE,
        BlocksCompleted(
            handoff_id=HandoffId("h"), address=ADDRESS, parent=HASHES[:32], hashes=b"\x33" * 64, traceparent="t"
        ),
        (),
    ),
    "peer-refused": (TO_READER, PeerRefused(code="peer.version", reason="r"), ()),
    "peer-open-path": (TO_SOURCE, OpenPath(path_id=1, content_key="k", description=b"\x00d"), ()),
    "peer-path-opened": (TO_READER, PathOpened(path_id=1, description=b"\xffd"), ()),
    "peer-path-failed": (TO_READER, PathFailed(path_id=1, code="transfer.failed", reason="r"), ()),
    "peer-close-path": (TO_SOURCE, ClosePath(path_id=1), ()),
    "peer-path-bytes": (TO_SOURCE, PathBytes(path_id=1, data=b"\x00\x01"), ()),
    "peer-path-bytes-back": (TO_READER, PathBytes(path_id=1, data=b"\x01"), ()),
    "peer-remote-acquire": (
        TO_SOURCE,
        RemoteAcquire(
            call_id=2, content_key="k", hashes=HASHES, handoff_id=HandoffId("h"), wait_ms=5, ttl_ms=6
        ),
        (),
    ),
    "peer-remote-acquired": (
        TO_READER,
        RemoteAcquired(
            call_id=2, lease_id=LeaseId("l"), space=1, num_blocks=2, pages=PAGES, epochs=EPOCHS,
            parents=HASHES, valid_tokens=u32_bytes([32, 3]), checksums=u32_bytes([0, 4]),
        ),
        (),
    ),
    "peer-check-epochs": (TO_SOURCE, CheckEpochs(call_id=3, space=1, pages=PAGES, epochs=EPOCHS), ()),
    "peer-epochs-checked": (TO_READER, EpochsChecked(call_id=3, stale=u32_bytes([1])), ()),
    "peer-remote-release": (TO_SOURCE, RemoteRelease(lease_id=LeaseId("l")), ()),
    "peer-call-refused": (TO_READER, CallRefused(call_id=4, code="overloaded", reason="r"), ()),
    "peer-check-held-epochs": (
        TO_SOURCE, CheckEpochs(call_id=3, space=1, pages=PAGES, epochs=EPOCHS, held=True), (),
    ),
    "peer-who-is-here": (TO_SOURCE, WhoIsHere(), ()),
    "peer-here": (TO_READER, Here(instances=[InstanceId("decode-0"), InstanceId("decode-1")]), ()),
    "peer-call-alloc": (
        TO_SOURCE,
        PeerCall(call=AllocMem(call_id=5, num_blocks=3, mem_type="mixed", instance=InstanceId("decode-0"))),
        (),
    ),
    "peer-call-pull": (
        TO_SOURCE,
        PeerCall(call=PullPages(call_id=6, source=InstanceId("prefill-0"), order=Transfer(
            call_id=7, target=InstanceId("decode-0"), sources=b"\x01" * 28, private=b"p",
        ))),
        (),
    ),
    "peer-reply": (TO_READER, PeerReply(reply=Addresses(call_id=6, addresses=b"\x02" * 28, num_known=1)), ()),
    "mempool-attached-peer": (
        FROM_MEMPOOL,
        Attached(boot_generation=Epoch(7), attachment=1, memory_id=Epoch(8), peer_address=ADDRESS),
        (),
    ),
    "mempool-host-reach": (FROM_MEMPOOL, HostReach(crosses=False), ()),
    "mempool-acquire-remote": (
        TO_MEMPOOL,
        Acquire(call_id=1, hashes=HASHES, handoff_id=HandoffId("h"), wait_ms=9, source_mempool=ADDRESS),
        (),
    ),
    "prefilled-remote": (
        TO_GATEWAY,
        Prefilled(
            request_id=RequestId("r"), attempt=1, handoff=HANDOFF,
            first=TokenChunk(RequestId("r"), 1, 0, [5]),
            receipt=StageReceipt(instance=InstanceId("prefill-0"), stage="prefill"),
        ),
        (),
    ),
}  # fmt: skip
