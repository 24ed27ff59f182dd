"""UCX through ucxx, the successor of UCX-Py, for those who ask for it: `pip install "ucxx-cu13==0.52.*"`. Optional:
NIXL is the path between hosts.

ucxx's Python interface has no one-sided operation, so a pull is a question, and one tagged message a piece comes back.
Limits, as measured or read in its source (ucxx-cu13 0.52): host memory only here; endpoints that notice a dead peer go
over TCP and lose CMA (1.5 against 2.9 GB/s), those that keep CMA hang, and the first kind is used; the wheel has no
RDMA; a message a piece costs 30 to 50 us. A receive cannot be taken back, so pages of a failed pull stay quarantined
until the source has sent everything after all, or is proven dead.
"""

import importlib
import itertools
from typing import Any

import msgspec

from shared.errors import PeerProtocolError
from shared.kernels.copy_pages.host_memory import view
from shared.transfer.describe import EndDescription, RegionDescription, decode
from shared.transfer.errors import PathUnavailable, PeerLost, TransferError, TransferFailed
from shared.transfer.interface import PathName, Peer, Region, RegionKind
from shared.transfer.link import BaseLink
from shared.transfer.pieces import Pieces
from shared.transfer.provider import BaseTransport
from shared.transfer.quarantine import Quarantine
from shared.transfer.served import AskedAttempt
from shared.transfer.served_link import MaySend, Sending, ServedLink
from shared.transfer.transfer_job import Attempt
from shared.wire.codec import MALFORMED

PIECE_BITS = 17  # of a tag: interface.MAX_PIECES
NUMBER_BITS = 34  # transfers of one link
ATTEND_CONNECT_S = 2.0


class UcxxEnd(msgspec.Struct, frozen=True):
    """The payload of a description: the worker's address."""

    address: bytes


class Ucxx:
    """The library's few calls, on the transport's thread."""

    def __init__(self) -> None:
        """Raises: PathUnavailable."""
        try:
            self.lib: Any = importlib.import_module("ucxx._lib.libucxx")
            self._array: Any = importlib.import_module("ucxx._lib.arr").Array
            self._worker: Any = self.lib.UCXWorker(self.lib.UCXContext())
        except Exception as error:
            raise PathUnavailable(f"ucxx is not here: {error}") from error

    def address(self) -> bytes:
        """Of this worker, for connect() at the other end."""
        return bytes(memoryview(self._worker.address))

    def connect(self, address: bytes) -> Any:
        """An endpoint that fails when its peer dies. Raises: TransferFailed."""
        try:
            far = self.lib.UCXAddress.create_from_buffer(address)
            return self._worker.create_endpoint_from_worker_address(far, endpoint_error_handling=True)
        except Exception as error:
            raise TransferFailed(f"ucxx: {error}") from error

    def progress(self) -> None:
        """UCX's own work."""
        self._worker.progress()

    def start(self, call: Any, address: int, num_bytes: int, tag: int) -> Any:
        """tag_send or tag_recv of host memory. Raises: PeerLost."""
        try:
            return call(self._array(view(address, num_bytes)), self.lib.UCXXTag(tag))
        except Exception as error:
            raise PeerLost(f"ucxx: {error}") from error


class Messages:
    """Tagged messages in flight, of one transfer. They keep their memory in use until `over`."""

    def __init__(self, requests: list[Any]) -> None:
        self._left = requests
        self._error = ""

    def poll(self) -> bool:
        """True when all have come. Raises: PeerLost once all have ended, some of them badly."""
        still = []
        for request in self._left:
            if not request.completed:
                still.append(request)
                continue
            try:
                request.check_error()
            except Exception as error:  # noqa: BLE001  as in Ucxx.connect
                self._error = f"ucxx: {type(error).__name__} {error}"
        self._left = still
        if not still and self._error:
            raise PeerLost(self._error)
        return not still

    @property
    def over(self) -> bool:
        """Whether none is in flight."""
        return not self._left


class UcxxPull:
    """Ask, then receive what was sent; see link.Attempt."""

    def __init__(self, link: "UcxxLink", asked: AskedAttempt, target: Region, pieces: Pieces) -> None:
        self._link = link
        self._asked = asked
        self._target = target
        self._pieces = pieces
        self._messages: Messages | None = None

    def poll(self) -> bool:
        """See link.Attempt."""
        if self._messages is None:
            if not self._asked.poll():
                return False
            self._messages = self._link.receive(self._asked.number, self._target, self._pieces)
        try:
            return self._messages.poll()
        except PeerLost as error:
            self._link.peer_lost(error.message)
            raise

    def cancel(self, *, peer_is_dead: bool) -> bool:
        """A late answer still brings its messages; they are received, and then the pages are free."""
        if self._asked.answer is None:
            return self._asked.cancel(peer_is_dead=peer_is_dead)
        if self._asked.answer.outcome in ("refused", "failed"):
            return True
        try:
            if self._messages is None and not peer_is_dead:
                self._messages = self._link.receive(self._asked.number, self._target, self._pieces)
            return self._messages is None or self._messages.poll()
        except TransferError:
            return self._messages is None or self._messages.over


class Posted:
    """Sends that are under way: the puller may receive now; see served_link.Sending."""

    over = True  # what is sent goes where the puller receives it, and nowhere else

    def poll(self) -> bool:
        """Posted is enough: the puller's lease keeps the source pages until it has received them."""
        return True


class UcxxLink(ServedLink):
    """One endpoint."""

    path = PathName.UCXX

    def __init__(self, ucxx: Ucxx, endpoint: Any, number: int, **common: Any) -> None:
        super().__init__(**common)
        self._ucxx = ucxx
        self._endpoint = endpoint
        self._next = (
            number << NUMBER_BITS
        )  # tags of all links meet at one worker: numbers differ between links
        self._sends: list[Messages] = []

    def _begin(self, source: RegionDescription, target: Region, pieces: Pieces, deadline_s: float) -> Attempt:
        return UcxxPull(self, self.ask(source.name, target.name, pieces, deadline_s), target, pieces)

    def receive(self, number: int, target: Region, pieces: Pieces) -> Messages:
        """Post a receive for each piece. Raises: PeerLost."""
        return self._post(self._endpoint.tag_recv, number, target.address, pieces.target_offsets, pieces)

    def _send_pieces(self, number: int, mine: Region, theirs: RegionDescription, pieces: Pieces) -> Sending:
        self._sends = [each for each in self._sends if not _ended(each)]
        self._sends.append(
            self._post(self._endpoint.tag_send, number, mine.address, pieces.source_offsets, pieces)
        )
        return Posted()

    def _post(self, call: Any, number: int, base: int, offsets: Any, pieces: Pieces) -> Messages:
        rows = zip(offsets.tolist(), pieces.sizes.tolist(), strict=True)
        return Messages(
            [
                self._ucxx.start(call, base + offset, size, number << PIECE_BITS | place)
                for place, (offset, size) in enumerate(rows)
            ]
        )

    def _disconnect(self) -> None:
        self._endpoint.close_blocking()
        self._sends = []


def _ended(messages: Messages) -> bool:
    try:
        return messages.poll()
    except PeerLost:
        return True


class UcxxTransport(BaseTransport):
    """See interface.Transport."""

    path = PathName.UCXX

    def __init__(
        self,
        instance: str,
        *,
        quarantine: Quarantine | None = None,
        may_send: MaySend = lambda region, pages: True,
    ) -> None:
        """Raises: PathUnavailable without ucxx."""
        self._ucxx: Ucxx | None = None
        super().__init__(instance, quarantine=quarantine, progress=self._progress)
        self._may_send = may_send
        self._numbers = itertools.count(1)
        try:
            self._ucxx = self._thread.call(Ucxx).result()
        except PathUnavailable:
            self._thread.close()
            raise

    @property
    def ucxx(self) -> Ucxx:
        """Only the thread may use it."""
        assert self._ucxx is not None
        return self._ucxx

    def register(self, region: Region) -> None:
        """See interface.Transport."""
        if region.kind is not RegionKind.HOST:
            raise PathUnavailable("the ucxx path moves host memory only")
        super().register(region)

    def _payload(self) -> bytes | None:
        return msgspec.msgpack.encode(UcxxEnd(self._thread.call(self.ucxx.address).result()))

    def _open(self, peer: Peer) -> BaseLink:
        end = decode(peer.description)
        address = _address_of(end)
        endpoint = self._thread.call(lambda: self.ucxx.connect(address)).result()
        self._thread.attend(ATTEND_CONNECT_S)
        return UcxxLink(
            self.ucxx,
            endpoint,
            next(self._numbers),
            channel=peer.channel,
            may_send=self._may_send,
            thread=self._thread,
            regions=self.regions,
            peer=end,
            reason="asked for; UCX without one-sided operations",
            quarantine=self._quarantine,
            on_settled=peer.on_settled,
            on_lost=self._lost,
        )

    def _progress(self) -> None:
        if self._ucxx is not None:
            self._ucxx.progress()

    def _release(self) -> None:
        self._ucxx = None


def _address_of(end: EndDescription) -> bytes:
    if PathName.UCXX.value not in end.payloads:
        raise PathUnavailable(f"{end.instance} runs without ucxx")
    try:
        return msgspec.msgpack.decode(end.payloads[PathName.UCXX.value], type=UcxxEnd).address
    except MALFORMED as error:
        raise PeerProtocolError(f"bad ucxx payload of {end.instance}: {error}") from error
