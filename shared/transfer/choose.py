"""Which path a pair of regions takes, and why. Pure: both descriptions in, path and reason out.

The order is the measured one (facts.md): nothing to move; memcpy or copy engine over memory of the same host that
is mapped here (319 to 362 GB/s between GPUs); NCCL for GPU slabs in a fixed pair (67 GB/s for 2 MiB pages); NIXL; and
through host memory that both ends map, when pages cannot be imported.
"""

from dataclasses import dataclass

from shared.transfer.describe import EndDescription, RegionDescription
from shared.transfer.interface import PathName, RegionKind

NIXL_KINDS = frozenset(
    (RegionKind.HOST, RegionKind.CUDA_SLAB)
)  # UCX's wheels cannot export cuMemCreate pages


@dataclass(frozen=True, slots=True)
class Reach:
    """What link-up found out beside the descriptions."""

    has_fds: bool = False  # the source region's fds came over a unix socket
    has_peer_access: bool = True  # the two GPUs can map each other
    in_nccl_pair: bool = False  # a communicator of exactly these two processes is up
    has_nixl: bool = False  # the library is here and the peer sent its metadata
    has_staging: bool = False  # both ends map a staging region, and there is a channel


@dataclass(frozen=True, slots=True)
class Choice:
    """`path` None: there is no way; `reason` says what is missing."""

    path: PathName | None
    reason: str


def choose(
    mine: EndDescription,
    theirs: EndDescription,
    source: RegionDescription,
    target: RegionDescription,
    reach: Reach,
) -> Choice:
    """The path for pulls from `source` (the peer's) to `target` (mine)."""
    if source.page_bytes != target.page_bytes:
        reason = f"pages of {source.page_bytes} and {target.page_bytes} bytes: reslice first"
        return Choice(None, reason)
    same_host = bool(mine.boot_id) and mine.boot_id == theirs.boot_id
    if same_host and source.memory_key == target.memory_key:
        return Choice(PathName.ALIAS, "the same memory")
    if same_host and reach.has_fds:
        found = _on_one_host(source, target, reach)
        if found is not None:
            return found
    both_gpu = source.kind is not RegionKind.HOST and target.kind is not RegionKind.HOST
    if reach.in_nccl_pair and both_gpu:
        return Choice(PathName.NCCL, "GPUs of a fixed pair" + ("" if same_host else " on two hosts"))
    if reach.has_nixl and source.kind in NIXL_KINDS and target.kind in NIXL_KINDS:
        where = "one host without fds" if same_host else "two hosts"
        return Choice(PathName.NIXL, f"{where}; UCX can register both regions")
    if same_host and reach.has_staging:
        return Choice(PathName.STAGED, "one host, pages not imported: through shared host memory")
    return Choice(None, _missing(source, target, reach, same_host=same_host))


def _on_one_host(source: RegionDescription, target: RegionDescription, reach: Reach) -> Choice | None:
    if source.kind is RegionKind.HOST and target.kind is RegionKind.HOST:
        return Choice(PathName.SHM, "host memory of one host, mapped by fd")
    if source.kind is RegionKind.HOST or target.kind is RegionKind.HOST:
        return Choice(PathName.IMPORTED, "host and GPU of one host, both mapped here")
    if source.kind is not RegionKind.CUDA_PAGES:
        return None
    if source.device_uuid == target.device_uuid:
        return Choice(PathName.IMPORTED, "two regions of one GPU")
    if reach.has_peer_access:
        return Choice(PathName.IMPORTED, "GPUs of one host that map each other")
    return None


def _missing(source: RegionDescription, target: RegionDescription, reach: Reach, *, same_host: bool) -> str:
    wanting = []
    if same_host and not reach.has_fds:
        wanting.append("the source's fds")
    if not reach.has_nixl:
        wanting.append("NIXL at both ends")
    elif source.kind not in NIXL_KINDS or target.kind not in NIXL_KINDS:
        wanting.append("memory that UCX can register (host, or a cudaMalloc slab)")
    if same_host and not reach.has_staging:
        wanting.append("a staging region")
    return f"no path from {source.kind} to {target.kind}: missing {', '.join(wanting) or 'peer access'}"
