"""Samples of what placement by cost adds: predictions, fetch or recompute, where pages lie and came from."""

from typing import Any

from shared.ids import BlockHash, Epoch, HandoffId, InstanceId, LeaseId, RequestId
from shared.wire.codec import Channel
from shared.wire.mempool import FROM_MEMPOOL, TO_MEMPOOL, Acquire, Acquired, KeepHandoff
from shared.wire.placement import (
    FROM_SCHEDULER,
    TO_SCHEDULER,
    Alternative,
    GatewayHello,
    Held,
    Place,
    Placed,
    Predicted,
    PrefixHit,
    Target,
)
from shared.wire.reports import REPORT_REPLIES, REPORTS, PoolPlace, Report, Room, ServedElsewhere
from shared.wire.requests import (
    TO_GATEWAY,
    TO_WORKER,
    Finished,
    Generate,
    KvPlan,
    SamplingSpec,
    StageReceipt,
)

R, P, C = RequestId("chatcmpl-1"), InstanceId("prefill-0"), InstanceId("colocated-0")
HASH = BlockHash(b"\x11" * 32)
PLAN = KvPlan(reach="remote", source=P, tokens=96, path="remote", source_mempool="tcp://10.0.0.1:8107")

PLACEMENT_SAMPLES: dict[str, tuple[Channel[Any], Any, tuple[bytes, ...]]] = {
    "gateway-hello": (TO_SCHEDULER, GatewayHello(gateway="5f0c9a1e7b2d4c68"), ()),
    "gateway-hello-deadline": (
        TO_SCHEDULER,
        GatewayHello(gateway="5f0c9a1e7b2d4c68", request_deadline_ms=7_200_000),
        (),
    ),
    "held": (
        FROM_SCHEDULER,
        Held(request_id=R, attempt=1, wait_ms=5_000, reason="No decode instance has room."),
        (),
    ),
    "placed-held": (
        FROM_SCHEDULER,
        Placed(
            request_id=R,
            attempt=1,
            kind="colocated",
            decode=Target(instance=C, epoch=Epoch(8), role="colocated", endpoint="tcp://127.0.0.1:2"),
            held_ms=299.0,
        ),
        (),
    ),
    "report-room": (
        REPORTS,
        Report(instance=P, epoch=Epoch(7), seq=6, room=Room(1_000, 120, 40, 181)),
        (),
    ),
    "keep-handoff": (TO_MEMPOOL, KeepHandoff(handoff_id=HandoffId("h-1"), ttl_ms=10_000), ()),
    "finished-room": (
        TO_GATEWAY,
        Finished(
            request_id=R,
            attempt=1,
            receipt=StageReceipt(instance=C, stage="decode", room_wait_ms=35.5),
        ),
        (),
    ),
    "place-dram-hit": (
        TO_SCHEDULER,
        Place(
            request_id=R,
            attempt=1,
            num_prompt_tokens=200,
            hits=[PrefixHit(P, 32), PrefixHit(P, 96, "dram")],
        ),
        (),
    ),
    "placed-cost": (
        FROM_SCHEDULER,
        Placed(
            request_id=R,
            attempt=1,
            kind="colocated",
            policy="cost",
            reason="r",
            decode=Target(instance=C, epoch=Epoch(8), role="colocated", endpoint="tcp://127.0.0.1:2"),
            predicted_ttft_ms=20.5,
            predicted=Predicted(queue_ms=1.5, fetch_ms=2.0, compute_ms=17.0, step_ms=4.0, total_ms=84.5),
            kv=PLAN,
            alternatives=[
                Alternative(P, "prefill", 96, 90.25, "queue 5.8 ms more"),
                Alternative(P, "x", 0, None, ""),
            ],
        ),
        (),
    ),
    "generate-kv": (
        TO_WORKER,
        Generate(
            request_id=R,
            attempt=1,
            stage="colocated",
            instance_epoch=Epoch(8),
            sampling=SamplingSpec(max_tokens=9),
            kv=PLAN,
        ),
        (b"\x01\x00\x00\x00",),
    ),
    "generate-recompute": (
        TO_WORKER,
        Generate(
            request_id=R,
            attempt=1,
            stage="colocated",
            instance_epoch=Epoch(8),
            sampling=SamplingSpec(max_tokens=9),
            kv=KvPlan(reach="own", source=P, tokens=32, path="peer", recompute=True),
        ),
        (b"\x01\x00\x00\x00",),
    ),
    "finished-sources": (
        TO_GATEWAY,
        Finished(
            request_id=R,
            attempt=1,
            receipt=StageReceipt(
                instance=C,
                stage="colocated",
                tokens_pool=128,
                tokens_peer=32,
                tokens_dram=32,
                tokens_remote=64,
                bytes_fetched=8192,
                fetch_path="peer+dram+remote",
            ),
        ),
        (),
    ),
    "report-pool": (
        REPORTS,
        Report(
            instance=P,
            epoch=Epoch(7),
            seq=5,
            pool=PoolPlace(Epoch(77), Epoch(78), "tcp://10.0.0.1:8107"),
        ),
        (),
    ),
    "report-pool-confined": (
        REPORTS,
        Report(
            instance=P,
            epoch=Epoch(7),
            seq=5,
            pool=PoolPlace(Epoch(77), Epoch(78), "tcp://10.0.0.1:8107", crosses_hosts=False),
        ),
        (),
    ),
    "report-measured": (
        REPORTS,
        Report(
            instance=P,
            epoch=Epoch(7),
            seq=7,
            prefill_correction=1.25,
            num_prefills_measured=31,
            num_decodes_measured=4_000,
        ),
        (),
    ),
    "report-arrived": (REPORTS, Report(instance=P, epoch=Epoch(7), seq=8, arrived=[(R, 1), (R, 2)]), ()),
    "report-served": (REPORTS, Report(instance=P, epoch=Epoch(7), seq=6, served={"t": 1_000}), ()),
    "report-reply-served": (REPORT_REPLIES, ServedElsewhere(served={"q/3": {"t": 5}}), ()),
    "acquire-own-space": (TO_MEMPOOL, Acquire(call_id=1, hashes=HASH, own_space_only=True), ()),
    "acquired-sources": (
        FROM_MEMPOOL,
        Acquired(
            call_id=1,
            lease_id=LeaseId("l"),
            fencing_token=Epoch(2),
            num_blocks=3,
            pages=b"\x01\x00\x00\x00" * 3,
            epochs=b"\x05" + b"\x00" * 23,
            blocks_peer=1,
            blocks_dram=1,
            blocks_remote=1,
        ),
        (),
    ),
}
