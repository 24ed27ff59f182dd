"""One pull of blocks from another host's mempool, and who waits for it. No I/O. Decided in remote.py."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from services.mempool.core import parse
from services.mempool.core.claims import Claim
from services.mempool.core.entry import Entry
from services.mempool.core.pool import Pool
from services.mempool.core.pull import Reader
from services.mempool.core.readers import LATE, LATE_US
from shared.errors import PeerProtocolError
from shared.ids import BlockHash, PageId
from shared.kv.words import u32_list
from shared.wire import mempool_peer as wire


class Step(Enum):
    """How far a pull has come."""

    ASKED = auto()  # RemoteAcquire is out
    CLAIMING = auto()  # the source has pinned; pages to copy into are awaited
    PULLING = auto()  # bytes may be written
    CHECKING = auto()  # all bytes are here, CheckEpochs is out


class Back(NamedTuple):
    """Of blocks that go back to where their prompt was computed (returns.py)."""

    parent: BlockHash  # of the first one that its source has said
    traceparent: str


@dataclass(slots=True)
class RemotePull:
    """Blocks on their way from one mempool into `pool`."""

    number: int  # also of its calls: one is out at a time
    pool: Pool  # in host memory
    address: str
    first: Reader
    own: list[tuple[Pool, Entry]]  # pinned there: what comes before the missing ones
    missing: list[BlockHash]
    readers: list[tuple[Pool, Reader]]  # with the space of each
    due_ms: int  # when this step is given up; PULLING has its deadline in the shell
    step: Step = Step.ASKED
    lease: wire.RemoteAcquired | None = None
    entries: list[Entry] = field(default_factory=list)  # with pages here, once claimed
    pages: list[tuple[PageId, int]] = field(default_factory=list)  # and epochs, at the source
    claim: Claim | None = None
    ask_ms: int | None = None  # when engines are asked for pages again; None: they are not
    began_ms: int = 0  # PULLING
    timeout_ms: int = 0  # of it
    back: Back | None = None  # nobody asked for it


def shorten(pull: RemotePull, claim: Claim) -> None:
    """To its first blocks, for which there are pages."""
    claim.wanted = len(claim.pages)
    del pull.entries[claim.wanted :], pull.pages[claim.wanted :]


def say_late(pull: RemotePull, now_ms: int) -> None:
    """To its first reader: one pull says once how slow a link is. Waiting for a prompt or pages says nothing of it."""
    came = pull.first.came
    came[LATE], came[LATE_US] = len(pull.entries), (now_ms - pull.began_ms) * 1_000


def entries_of(
    pull: RemotePull, lease: wire.RemoteAcquired, block_tokens: int
) -> tuple[list[tuple[PageId, int]], list[Entry]]:
    """Pages at the source, and what will be indexed here. Raises: PeerProtocolError on lists that do not fit."""
    limit = len(pull.missing)
    pages = parse.pages(lease.pages, lease.epochs, limit)
    parents = parse.hashes(lease.parents, limit)
    try:
        valid = u32_list(lease.valid_tokens)
    except ValueError as error:
        raise PeerProtocolError(f"RemoteAcquired: {error}") from error
    if not lease.num_blocks == len(pages) == len(parents) == len(valid):
        raise PeerProtocolError("RemoteAcquired: lists of unequal length")
    if any(tokens < 1 or tokens > block_tokens for tokens in valid):
        raise PeerProtocolError(f"RemoteAcquired: valid_tokens outside 1 to {block_tokens}")
    before = [pull.own[-1][1].block_hash] if pull.own else [pull.back.parent] if pull.back else parents[:1]
    if parents != [*before, *pull.missing][: len(parents)] or parents[0] == pull.missing[0]:
        raise PeerProtocolError("RemoteAcquired: these blocks are no chain")
    entries = [
        Entry(block_hash, parent, PageId(0), tokens)
        for block_hash, parent, tokens in zip(pull.missing, parents, valid, strict=False)
    ]
    return pages, entries
