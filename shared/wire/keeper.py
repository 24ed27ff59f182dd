"""mempool <-> keeper, over the keeper's unix socket: descriptors and what they are, nothing about policy.

One request, one reply, in order, on each connection. A *space* is one pool of pages (an engine's description
on one device) under a name that the mempool chooses; the keeper never looks into `meta`. Kinds:

    pages       one memfd for `count` pages           one descriptor
    table       the page table's memfd                one descriptor
    cuda-page   one exported handle per page          `count` descriptors, one a page, in order
    process     pidfds of the processes that may touch the pages; "page" is the mempool's number of the process

Descriptors travel with Keep and Held, at most MAX_FDS a message. Everything but Hello and ListSpaces needs the
floor: it belongs to the connection whose Hello named the highest boot generation so far.
"""

from typing import Literal

from msgspec import Struct

from shared.ids import Epoch
from shared.wire.codec import Channel

MAX_FDS = 253  # what Linux passes in one message (SCM_MAX_FD)
MAX_MESSAGE_BYTES = 64 << 10
MAX_META_BYTES = 8 << 10
MAX_SPACE_CHARS = 256

Kind = Literal["pages", "table", "cuda-page", "process"]
KINDS: tuple[Kind, ...] = ("pages", "table", "cuda-page", "process")


class KeeperHello(Struct, frozen=True, kw_only=True, tag="keeper_hello"):
    """Take the floor. Answered by Welcome, or Refused when a higher generation has had it."""

    boot_generation: Epoch


class Keep(Struct, frozen=True, kw_only=True, tag="keep"):
    """Hold these descriptors. What was kept of the same pages before is closed. Answered by Done."""

    space: str
    kind: Kind
    first_page: int
    count: int
    meta: bytes = b""


class Fetch(Struct, frozen=True, kw_only=True, tag="fetch"):
    """The next run of a space, from page `after` of `kind` on. Answered by Held, or End when there is none.

    A run at a time, so that neither end ever has more than one message's descriptors in flight.
    """

    space: str
    kind: Kind
    after: int = 0


class Forget(Struct, frozen=True, kw_only=True, tag="forget"):
    """Close what is kept of these pages. Answered by Done, also when nothing was kept."""

    space: str
    kind: Kind
    first_page: int
    count: int


class ListSpaces(Struct, frozen=True, kw_only=True, tag="list_spaces"):
    """Which spaces are kept? Answered by Spaces."""


class Welcome(Struct, frozen=True, kw_only=True, tag="keeper_welcome"):
    """The floor is the sender's. `num_fds` are kept of at most `max_fds`."""

    previous_generation: Epoch  # who had it before; 0: nobody since the keeper started
    num_fds: int
    max_fds: int


class Held(Struct, frozen=True, kw_only=True, tag="held"):
    """One run: its descriptors (the receiver's own copies) come with it. Ask on from first_page + count."""

    first_page: int
    count: int
    meta: bytes


class End(Struct, frozen=True, kw_only=True, tag="end"):
    """No further run."""


class Done(Struct, frozen=True, kw_only=True, tag="done"):
    """Performed. `num_closed` descriptors of before were closed."""

    num_closed: int = 0


class SpaceSummary(Struct, frozen=True, kw_only=True):
    """Descriptors of one space, by kind."""

    space: str
    num_fds: dict[str, int]


class Spaces(Struct, frozen=True, kw_only=True, tag="spaces"):
    """Answer to ListSpaces."""

    spaces: list[SpaceSummary]
    highest_generation: Epoch


class Refused(Struct, frozen=True, kw_only=True, tag="keeper_refused"):
    """Nothing was changed. `code`: epoch.stale (another mempool has the floor), keeper.full, keeper.range."""

    code: str
    reason: str
    highest_generation: Epoch


ToKeeper = KeeperHello | Keep | Fetch | Forget | ListSpaces
FromKeeper = Welcome | Held | End | Done | Spaces | Refused

TO_KEEPER: Channel[ToKeeper] = Channel(b"quire.keeper/1", ToKeeper)
FROM_KEEPER: Channel[FromKeeper] = Channel(b"quire.keeper-reply/1", FromKeeper)
