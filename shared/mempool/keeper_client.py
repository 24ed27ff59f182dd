"""The mempool's side of the keeper: hand descriptors over, take them back after a crash. Blocking, one thread.

Every call is answered by a process that does nothing else, within a fraction of a millisecond; each has a
deadline. Without a keeper (an empty path) every call succeeds and keeps nothing, so that callers need no branch.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from shared.errors import PeerError, PeerGone, PeerProtocolError, ResourceError, StaleEpoch
from shared.ids import Epoch
from shared.transport.unix_call import UnixCaller
from shared.transport.unix_socket import close_fds
from shared.wire import keeper as wire

CALL_TIMEOUT_MS = 2_000
CONNECT_TIMEOUT_MS = 2_000

R = TypeVar("R", wire.Welcome, wire.Done, wire.Spaces)


class KeeperStale(StaleEpoch):
    """Another mempool, of a higher generation, has the keeper: this one is an old one and must end.

    A new mempool whose clock was set back may try again with `highest_generation` + 1.
    """

    def __init__(self, message: str, highest_generation: Epoch) -> None:
        super().__init__(message)
        self.highest_generation = highest_generation


class KeeperFull(ResourceError):
    """The keeper holds as many descriptors, spaces or bytes of meta as it may."""

    code = "keeper.full"


class KeptRun(NamedTuple):
    """Pages [first_page, first_page + num_pages) with one descriptor for all, or one per page; yours to close."""

    first_page: int
    num_pages: int
    fds: list[int]
    meta: bytes


class KeeperClient:
    """connect() first. A lost connection is found by the next call, or by `fileno()` becoming readable.

    Args:
        path: of the keeper's socket; "": there is no keeper.
        generation: this mempool's boot generation; connect() may be told another one.
        hand_over_all: called with this client after a lost connection was made anew: the keeper may have
            started empty, so keep everything again (keeping twice is harmless).
    """

    def __init__(
        self,
        path: str | Path,
        generation: Epoch,
        hand_over_all: Callable[["KeeperClient"], None] | None = None,
        *,
        timeout_ms: int = CALL_TIMEOUT_MS,
    ) -> None:
        self.enabled = str(path) != ""
        self.generation = generation
        self.welcome: wire.Welcome | None = None
        self.num_reconnects = 0
        self._path = Path(path)
        self._hand_over_all = hand_over_all
        self._timeout_ms = timeout_ms
        self._caller: UnixCaller[wire.ToKeeper, wire.FromKeeper] | None = None
        self._restoring = False

    @property
    def connected(self) -> bool:
        """As far as the last call saw."""
        return self._caller is not None and self._caller.up

    def fileno(self) -> int:
        """For a loop's reader: readable means that the keeper is gone: then call restore() until it is True.

        -1 while not connected; restore() makes a new number.
        """
        return self._caller.fileno() if self._caller is not None else -1

    def connect(self, generation: Epoch | None = None) -> bool:
        """Connect unless connected, and take the floor under the generation. False: there is no keeper.

        Raises: KeeperStale when a higher generation was there; PeerError when it cannot be reached.
        """
        if not self.enabled:
            return False
        if generation is not None:
            self.generation = generation
        if not self.connected:
            self._caller = UnixCaller(
                self._path,
                out=wire.TO_KEEPER,
                into=wire.FROM_KEEPER,
                timeout_ms=CONNECT_TIMEOUT_MS,
                max_message_bytes=wire.MAX_MESSAGE_BYTES,
                max_fds=wire.MAX_FDS,
            )
        self.welcome = self._call(wire.KeeperHello(boot_generation=self.generation), wire.Welcome)
        return True

    def restore(self) -> bool:
        """Connect again after a loss and hand everything over. False: not now, try again in a while.

        Never waits for a keeper that is not there. Raises: KeeperStale; KeeperFull and other ResourceErrors of the
        hand-over: connected then, and what was handed over before is kept.
        """
        if not self.enabled:
            return True
        self.close()
        self._restoring = True
        try:
            self.connect()
            self.num_reconnects += 1
            if self._hand_over_all is not None:
                self._hand_over_all(self)
        except PeerError:
            self.close()
            return False
        finally:
            self._restoring = False
        return True

    def keep(
        self,
        space: str,
        kind: wire.Kind,
        first_page: int,
        fds: Sequence[int],
        *,
        count: int = 0,
        meta: bytes = b"",
    ) -> int:
        """Have the keeper hold these (they stay the caller's too); how many it held of before and closed.

        Args: count: pages that a single descriptor covers (`pages`, `table`); else as many as descriptors.
        Raises: KeeperFull, KeeperStale, ResourceError (keeper.range), PeerError.
        Cost: a round trip of about 50 us and 0.5 us per descriptor, per 253 of them.
        """
        if not self.enabled:
            return 0
        if kind in ("pages", "table"):
            return self._keep(space, kind, first_page, max(1, count), meta, fds)
        closed = 0
        for start in range(0, len(fds), wire.MAX_FDS):
            part = fds[start : start + wire.MAX_FDS]
            closed += self._keep(space, kind, first_page + start, len(part), meta, part)
        return closed

    def forget(self, space: str, kind: wire.Kind, first_page: int, count: int) -> int:
        """Have it close what it holds of these pages; how many that were.

        Raises: KeeperStale, ResourceError (keeper.range), PeerError.
        """
        if not self.enabled:
            return 0
        message = wire.Forget(space=space, kind=kind, first_page=first_page, count=count)
        return self._call_again(message, ()).num_closed

    def forget_space(self, space: str) -> None:
        """All of a space. Raises: as forget()."""
        for kind in wire.KINDS:
            self.forget(space, kind, 0, 1 << 32)

    def forget_all(self) -> list[str]:
        """Of every space; their names. Raises: as forget()."""
        names = [summary.space for summary in self.list_spaces()]
        for name in names:
            self.forget_space(name)
        return names

    def fetch_space(self, space: str, kind: wire.Kind) -> list[KeptRun]:
        """Everything of one kind that is kept of a space, in page order. Runs have at most 253 descriptors.

        Raises: KeeperStale, PeerError; PeerProtocolError also when this process may not open so many files.
        """
        out: list[KeptRun] = []
        try:
            out.extend(self._fetch(space, kind))
        except Exception:
            for run in out:
                close_fds(run.fds)
            raise
        return out

    def list_spaces(self) -> list[wire.SpaceSummary]:
        """What is kept, in numbers. Needs no floor. Raises: PeerError."""
        if not self.enabled:
            return []
        return self._call(wire.ListSpaces(), wire.Spaces).spaces

    def close(self) -> None:
        """End the connection; the keeper holds on. Harmless when closed already."""
        if self._caller is not None:
            self._caller.close()
            self._caller = None

    # -- parts ------------------------------------------------------------------------------------

    def _keep(
        self, space: str, kind: wire.Kind, first_page: int, count: int, meta: bytes, fds: Sequence[int]
    ) -> int:
        message = wire.Keep(space=space, kind=kind, first_page=first_page, count=count, meta=meta)
        return self._call_again(message, fds).num_closed

    def _fetch(self, space: str, kind: wire.Kind) -> Iterator[KeptRun]:
        after = 0
        while self.enabled:
            message = wire.Fetch(space=space, kind=kind, after=after)
            reply, fds = self._roundtrip(message, ())
            if isinstance(reply, wire.End):
                return
            if not isinstance(reply, wire.Held) or reply.first_page + reply.count <= after or not fds:
                close_fds(fds)
                raise PeerProtocolError(f"the keeper answered {type(reply).__name__} to Fetch")
            yield KeptRun(reply.first_page, reply.count, fds, reply.meta)
            after = reply.first_page + reply.count

    def _call_again(self, message: wire.Keep | wire.Forget, fds: Sequence[int]) -> wire.Done:
        """Once more over a new connection when the keeper was restarted meanwhile."""
        try:
            return self._call(message, wire.Done, fds)
        except PeerError:
            if self._restoring or not self.restore():
                raise
        return self._call(message, wire.Done, fds)

    def _call(self, message: wire.ToKeeper, kind: type[R], fds: Sequence[int] = ()) -> R:
        reply, got = self._roundtrip(message, fds)
        close_fds(got)
        if not isinstance(reply, kind):
            self.close()
            raise PeerProtocolError(f"the keeper answered {type(reply).__name__} to {type(message).__name__}")
        return reply

    def _roundtrip(
        self, message: wire.ToKeeper, fds: Sequence[int]
    ) -> tuple[wire.Welcome | wire.Held | wire.End | wire.Done | wire.Spaces, list[int]]:
        if self._caller is None or not self._caller.up:
            raise PeerGone(f"{self._path} is not connected")
        reply, got = self._caller.call(message, fds, timeout_ms=self._timeout_ms)
        if not isinstance(reply, wire.Refused):
            return reply, got
        close_fds(got)
        if reply.code == StaleEpoch.code:
            raise KeeperStale(reply.reason, reply.highest_generation)
        if reply.code == KeeperFull.code:
            raise KeeperFull(reply.reason)
        raise ResourceError(reply.reason)
