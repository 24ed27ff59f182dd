"""One sample per message of every channel. Run as a module to write golden bytes for new samples:
`python -m tests.tidy.wire_samples`; existing files are never rewritten, because old writers do not change."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from shared.ids import BlockHash, Epoch, HandoffId, InstanceId, LeaseId, RequestId, SpaceId
from shared.kv.layout import EngineDescription
from shared.kv.words import u32_bytes, u64_bytes
from shared.wire.codec import Channel
from shared.wire.cost import CostCoefficients, LinkRate, ModelShape
from shared.wire.handoff import HandoffState
from shared.wire.keeper import (
    FROM_KEEPER,
    TO_KEEPER,
    Done,
    End,
    Fetch,
    Forget,
    Held,
    Keep,
    KeeperHello,
    ListSpaces,
    Refused,
    Spaces,
    SpaceSummary,
    Welcome,
)
from shared.wire.mempool import (
    FROM_MEMPOOL,
    TO_MEMPOOL,
    Acquire,
    Acquired,
    Attach,
    Attached,
    Granted,
    HandoffReady,
    LayersSealed,
    LayerWords,
    LayerWordsCall,
    Mapped,
    MapSlabs,
    MemoryChanged,
    RegainMemory,
    ReleaseMemory,
    Sealed,
    StepLayers,
    Unmap,
    Unmapped,
    Unpin,
    Vacate,
    Vacated,
)
from shared.wire.mempool_callers import AttachCaller, CallerAttached, Detached
from shared.wire.placement import FROM_SCHEDULER, TO_SCHEDULER, Place, Placed, PrefixHit, Rejected, Target
from shared.wire.reports import REPORTS, Hello, Report
from shared.wire.requests import (
    TO_GATEWAY,
    TO_WORKER,
    Abort,
    Failed,
    Finished,
    Generate,
    HandoffTarget,
    Prefilled,
    PromptScored,
    SamplingSpec,
    StageReceipt,
    StructuredSpec,
    TokenChunk,
    TokenLogprob,
    Tokens,
)
from tests.tidy.wire_samples_lending import LENDING_SAMPLES
from tests.tidy.wire_samples_mempool_api import MEMPOOL_API_SAMPLES
from tests.tidy.wire_samples_mempool_far import MEMPOOL_FAR_SAMPLES
from tests.tidy.wire_samples_mempool_lending import MEMPOOL_LENDING_SAMPLES
from tests.tidy.wire_samples_mempool_peer import MEMPOOL_PEER_SAMPLES
from tests.tidy.wire_samples_mempool_swap import MEMPOOL_SWAP_SAMPLES
from tests.tidy.wire_samples_placement import PLACEMENT_SAMPLES

R, P, D = RequestId("chatcmpl-1"), InstanceId("prefill-0"), InstanceId("decode-0")
H = HandoffId("h-1")
DESCRIPTION = EngineDescription(
    model="demo",
    fingerprint="ab" * 32,
    dtype="float32",
    layout="layers-blocks",
    backend="CPU_ATTN",
    isa="vec",
    num_layers=4,
    num_kv_heads=2,
    head_dim=32,
    block_tokens=32,
    block_bytes=65536,
    max_model_len=4096,
)
HELLO = Hello(
    instance=P, epoch=Epoch(7), role="prefill", endpoint="tcp://127.0.0.1:1", description=DESCRIPTION,
    max_running=8, max_batched_tokens=2048, num_kv_blocks=100,
)  # fmt: skip
HASH = BlockHash(b"\x11" * 32)
CHUNK = TokenChunk(R, 0, 0, [5, 6], "stop", 6, [[TokenLogprob(5, -0.5, 1)], [TokenLogprob(6, -0.25, 1)]])

SAMPLES: dict[str, tuple[Channel[Any], Any, tuple[bytes, ...]]] = {
    "generate-prefill": (
        TO_WORKER,
        Generate(
            request_id=R,
            attempt=1,
            stage="prefill",
            instance_epoch=Epoch(7),
            sampling=SamplingSpec(
                max_tokens=9, seed=3, logit_bias={5: 1.5}, structured=StructuredSpec(kind="json_object")
            ),
            handoff_to=HandoffTarget(handoff_id=H, target=D),
            tenant_salt="t",
            traceparent="00-1-2-01",
        ),
        (b"\x01\x00\x00\x00\x02\x00\x00\x00",),
    ),
    "generate-decode": (
        TO_WORKER,
        Generate(
            request_id=R,
            attempt=1,
            stage="decode",
            instance_epoch=Epoch(8),
            sampling=SamplingSpec(max_tokens=9),
            handoff=HandoffState(
                handoff_id=H, source=P, description=DESCRIPTION, valid_tokens=2, output_token_ids=[9]
            ),
        ),
        (b"\x01\x00\x00\x00\x02\x00\x00\x00",),
    ),
    "generate-continue": (
        TO_WORKER,
        Generate(
            request_id=R,
            attempt=2,
            stage="colocated",
            instance_epoch=Epoch(8),
            sampling=SamplingSpec(max_tokens=9, temperature=0.5, seed=3, seed_is_free=True),
            num_output_tokens=1,
        ),
        (b"\x01\x00\x00\x00\x02\x00\x00\x00",),
    ),
    "abort": (TO_WORKER, Abort(request_id=R, attempt=1), ()),
    "tokens": (TO_GATEWAY, Tokens(chunks=[CHUNK]), ()),
    "prefilled": (
        TO_GATEWAY,
        Prefilled(request_id=R, attempt=1, first=CHUNK, receipt=StageReceipt(instance=P, stage="prefill")),
        (),
    ),
    "prompt-scored": (
        TO_GATEWAY,
        PromptScored(request_id=R, attempt=1, prompt_logprobs=[None, [TokenLogprob(7, -0.5, 1)]]),
        (),
    ),
    "finished": (
        TO_GATEWAY,
        Finished(request_id=R, attempt=1, receipt=StageReceipt(instance=D, stage="decode", tokens_pool=64)),
        (),
    ),
    "failed": (
        TO_GATEWAY,
        Failed(request_id=R, attempt=1, code="peer.gone", message="m", retryable=True),
        (),
    ),
    "place": (
        TO_SCHEDULER,
        Place(request_id=R, attempt=0, num_prompt_tokens=40, hits=[PrefixHit(P, 32)], exclude=[D]),
        (),
    ),
    "placed": (
        FROM_SCHEDULER,
        Placed(
            request_id=R,
            attempt=0,
            kind="disaggregated",
            handoff_id=H,
            policy="prompt_tree",
            reason="r",
            prefill=Target(instance=P, epoch=Epoch(7), role="prefill", endpoint="tcp://127.0.0.1:1"),
            decode=Target(instance=D, epoch=Epoch(8), role="decode", endpoint="tcp://127.0.0.1:2"),
        ),
        (),
    ),
    "rejected": (FROM_SCHEDULER, Rejected(request_id=R, attempt=0, code="no_instance", reason="none"), ()),
    "hello": (
        REPORTS,
        HELLO,
        (),
    ),
    "hello-cost": (
        REPORTS,
        replace(
            HELLO,
            role="colocated",
            cost=CostCoefficients(
                shape=ModelShape(
                    num_layers=4,
                    hidden_size=128,
                    intermediate_size=256,
                    num_heads=4,
                    num_kv_heads=2,
                    head_dim=32,
                    vocab_size=1000,
                ),
                device="cpu",
                matmul_ms_per_gflop=20.5,
                step_overhead_ms=3.25,
                num_samples=20,
            ),
        ),
        (),
    ),
    "report": (REPORTS, Report(instance=P, epoch=Epoch(7), seq=3, num_running=2), ()),
    "report-cost": (
        REPORTS,
        Report(
            instance=P,
            epoch=Epoch(7),
            seq=4,
            prefill_correction=1.25,
            decode_correction=0.5,
            queued_prefill_ms=81.5,
            links={"peer": LinkRate(gb_per_s=320.0, latency_ms=0.5)},
        ),
        (),
    ),
    "attach": (TO_MEMPOOL, Attach(kind="engine", instance=P, description=DESCRIPTION, quota_pages=8), ()),
    "attached": (
        FROM_MEMPOOL,
        Attached(boot_generation=Epoch(5), attachment=1, num_pages=10, page_bytes=65536),
        (),
    ),
    "granted": (FROM_MEMPOOL, Granted(pages=b"\x01\x00\x00\x00", epochs=b"\x05" + b"\x00" * 7), ()),
    "sealed": (
        TO_MEMPOOL,
        Sealed(
            pages=b"\x01\x00\x00\x00",
            epochs=b"\x05" + b"\x00" * 7,
            hashes=HASH,
            parents=HASH,
            valid_tokens=b"\x20\x00\x00\x00",
        ),
        (),
    ),
    "step-layers": (
        TO_MEMPOOL,
        StepLayers(
            handoff_id=H,
            target=D,
            step=5,
            pages=u32_bytes([7]),
            epochs=u64_bytes([100]),
            hashes=HASH,
            cached=HASH,
            traceparent="00-1-2-01",
        ),
        (),
    ),
    "layers-sealed": (TO_MEMPOOL, LayersSealed(step=5, pages=u32_bytes([7]), epochs=u64_bytes([100])), ()),
    "layer-words-call": (TO_MEMPOOL, LayerWordsCall(call_id=4), ()),
    "layer-words": (FROM_MEMPOOL, LayerWords(call_id=4), ()),
    "attach-caller": (
        TO_MEMPOOL,
        AttachCaller(
            instance=InstanceId("p"),
            pages_of=InstanceId("d"),
            space=SpaceId(3),
            reads_only=True,
            memory_id=Epoch(9),
        ),
        (),
    ),
    "caller-attached": (
        FROM_MEMPOOL,
        CallerAttached(
            boot_generation=Epoch(5),
            num_pages=8,
            page_bytes=1 << 21,
            pages_per_slab=2,
            memory_id=Epoch(9),
            absent_slabs=u32_bytes([1]),
            device="cuda:ab",
            content_key="k",
        ),
        (),
    ),
    "detached": (FROM_MEMPOOL, Detached(), ()),
    "unpin": (TO_MEMPOOL, Unpin(pages=u32_bytes([7, 9]), epochs=u64_bytes([100, 101])), ()),
    "release-memory": (TO_MEMPOOL, ReleaseMemory(call_id=2, num_bytes=1 << 35, wait_ms=3_000, space=1), ()),
    "regain-memory": (TO_MEMPOOL, RegainMemory(call_id=3), ()),
    "memory-changed": (FROM_MEMPOOL, MemoryChanged(call_id=2, num_bytes=1 << 35, released_bytes=1 << 36), ()),
    "vacate": (
        FROM_MEMPOOL,
        Vacate(number=9, pages=u32_bytes([7, 9]), epochs=u64_bytes([100, 101])),
        (),
    ),
    "vacated": (TO_MEMPOOL, Vacated(number=9), ()),
    "unmap": (FROM_MEMPOOL, Unmap(slabs=u32_bytes([3, 4])), ()),
    "unmapped": (TO_MEMPOOL, Unmapped(slabs=u32_bytes([3, 4])), ()),
    "map-slabs": (FROM_MEMPOOL, MapSlabs(slabs=u32_bytes([3])), ()),
    "mapped": (TO_MEMPOOL, Mapped(slabs=u32_bytes([3])), ()),
    "handoff-ready": (TO_MEMPOOL, HandoffReady(handoff_id=H, hashes=HASH, ttl_ms=30_000), ()),
    "acquire": (TO_MEMPOOL, Acquire(call_id=1, hashes=HASH, handoff_id=H, wait_ms=2000), ()),
    "acquired": (
        FROM_MEMPOOL,
        Acquired(
            call_id=1,
            lease_id=LeaseId("l"),
            fencing_token=Epoch(2),
            num_blocks=1,
            pages=b"\x01\x00\x00\x00",
            epochs=b"\x05" + b"\x00" * 7,
        ),
        (),
    ),
    "acquired-late": (
        FROM_MEMPOOL,
        Acquired(
            call_id=1,
            lease_id=LeaseId(""),
            fencing_token=Epoch(0),
            num_blocks=0,
            blocks_late=12,
            late_us=998_000,
        ),
        (),
    ),
    "keeper-hello": (TO_KEEPER, KeeperHello(boot_generation=Epoch(5)), ()),
    "keeper-keep": (
        TO_KEEPER,
        Keep(space="s@cuda:0", kind="cuda-page", first_page=4, count=253, meta=b"m"),
        (),
    ),
    "keeper-fetch": (TO_KEEPER, Fetch(space="s", kind="table", after=3), ()),
    "keeper-forget": (TO_KEEPER, Forget(space="s", kind="process", first_page=77, count=1), ()),
    "keeper-list-spaces": (TO_KEEPER, ListSpaces(), ()),
    "keeper-welcome": (FROM_KEEPER, Welcome(previous_generation=Epoch(4), num_fds=2, max_fds=100), ()),
    "keeper-held": (FROM_KEEPER, Held(first_page=4, count=253, meta=b"m"), ()),
    "keeper-end": (FROM_KEEPER, End(), ()),
    "keeper-done": (FROM_KEEPER, Done(num_closed=2), ()),
    "keeper-spaces": (
        FROM_KEEPER,
        Spaces(
            spaces=[SpaceSummary(space="s", num_fds={"pages": 1, "table": 1})], highest_generation=Epoch(5)
        ),
        (),
    ),
    "keeper-refused": (
        FROM_KEEPER,
        Refused(code="epoch.stale", reason="r", highest_generation=Epoch(9)),
        (),
    ),
}

SAMPLES |= MEMPOOL_API_SAMPLES
SAMPLES |= MEMPOOL_LENDING_SAMPLES
SAMPLES |= MEMPOOL_PEER_SAMPLES
SAMPLES |= MEMPOOL_SWAP_SAMPLES
SAMPLES |= MEMPOOL_FAR_SAMPLES
SAMPLES |= PLACEMENT_SAMPLES


def main() -> None:
    """Write golden files for samples that have none."""
    folder = Path(__file__).parent / "golden"
    folder.mkdir(exist_ok=True)
    for name, (channel, message, raw) in SAMPLES.items():
        path = folder / f"{name}.hex"
        if not path.exists():
            path.write_text("\n".join(part.hex() for part in channel.pack(message, seq=1, raw=raw)) + "\n")
    for name, body in LENDING_SAMPLES.items():
        path = folder / f"lending-{name}.json"
        if not path.exists():
            path.write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n")


if __name__ == "__main__":
    main()
