"""Instances of other hosts' mempools in the nine calls (api.py): who serves which, calls to them, their pages. No I/O.

    WhoIsHere ---> Here(instances)       every second, to each mempool that the setting api_peers names: Api.add_peer
    CallPeer ----> PeerCall              Api.on_call there, as a caller of the other host; PeerReply: Api.on_peer_reply
    MovePages ---> PullRemote            from such an instance, for each pair of spaces, by the paths of remote.py
              ---> CheckEpochs(held)     after the last byte; EpochsChecked: Api.on_moved

Why no byte can be wrong: the source's mempool holds the pages (Moves._hold) until it hears how the transfer ended, or
has told its caller that it failed, and after the last byte its word says whether this transfer is still under way and
each page still has the epoch of its address. It gives only pages that a transfer under way names. Pages lie in host
memory at both ends: a path to others is refused, and the transfer fails. A peer whose link is lost is unknown until it
answers again, an instance until it is named again; calls to them fail at once. Who was called answers, nobody else.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from services.mempool.core.actions import Action, AskPeer, PullRemote, TellPeer
from services.mempool.core.api import Api
from services.mempool.core.api_moves import MAX_LATE
from services.mempool.core.api_state import CallPeer, MovePages, side_by_side
from shared.errors import InvalidRequest, PeerProtocolError
from shared.ids import InstanceId, PageId
from shared.kv.words import u32_bytes, u32_list, u64_bytes
from shared.wire import mempool_api as wire
from shared.wire import mempool_peer as peer_wire

FIRST_CONNECTION = 1 << 48  # of callers on other hosts: apart from those on sockets of this one
FIRST_NUMBER = 1 << 40  # of pulls here: apart from those of remote.py, which has the same links
ASK_EVERY_MS = 1_000
CHECK_TIMEOUT_MS = 2_000  # for the source's word after the last byte
MAX_HERE = 4_096  # instances of one peer

Ended = Callable[[int, bool, Collection[int], bool], None]  # copy, failed, pages in doubt, stale


@dataclass(slots=True)
class _Pull:
    """Pages of one space there into one space here: the copy `number` of api_spaces.py."""

    address: str
    source_space: int
    pages: list[PageId]
    epochs: list[int]
    order: int  # the source's number of the transfer
    check_due_ms: int | None = None  # all bytes are here


class ApiPeers:
    """After every method, take_actions().

    Args: ended: told the end of each pull that move() began, once.
    """

    def __init__(self, api: Api, ended: Ended) -> None:
        self.addresses: tuple[str, ...] = ()  # of other mempools, set before anything is asked
        self._api = api
        self._ended = ended
        self._out: list[Action] = []
        self._numbers = count(FIRST_NUMBER)
        self._ask_at_ms: int | None = None
        self._here: dict[str, set[InstanceId]] = {}
        self._pulls: dict[int, _Pull] = {}
        self._orders: dict[
            int, tuple[str, list[tuple[int, int]]]
        ] = {}  # by call: whom, and which pages it may read
        self._readable: Counter[tuple[int, int]] = Counter()  # (space, page)
        self._asked: OrderedDict[int, str] = OrderedDict()  # by call, whose answer counts

    def take_actions(self) -> list[Action]:
        """What was decided since the last call."""
        out, self._out = self._out, []
        return out

    # -- who is there -------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Ask the peers who they serve; give up what is due."""
        if self.addresses and (self._ask_at_ms is None or now_ms >= self._ask_at_ms):
            self._ask_at_ms = now_ms + ASK_EVERY_MS
            self._out += [AskPeer(address, peer_wire.WhoIsHere()) for address in self.addresses]
        for number, pull in list(self._pulls.items()):
            if pull.check_due_ms is not None and now_ms >= pull.check_due_ms:
                self._end(number, failed=True)

    def next_deadline_ms(self) -> int | None:
        """When tick() has something to do."""
        due = [pull.check_due_ms for pull in self._pulls.values() if pull.check_due_ms is not None]
        if self.addresses:
            due.append(self._ask_at_ms or 0)
        return min(due, default=None)

    def _on_here(self, address: str, message: peer_wire.Here) -> None:
        said = set(message.instances[:MAX_HERE])
        found = {name for name in said if name not in self._api.homes}  # what has come here is served here
        known, number = self._here.get(address, set()), self.addresses.index(address)
        # their spaces have ended: of another mempool there on_lost() comes first
        gone = [name for name in sorted(known - said) if self._api.peers.get(name) == number]
        for holder in self._api.holders.values():
            for instance in gone:
                self._api.moves.free_at(instance, sorted(holder.remote.get(instance, ())))
        for action in self._api.lose(gone):
            if isinstance(action, CallPeer) and isinstance(action.message, wire.FreeMem):
                self._out.append(AskPeer(address, peer_wire.PeerCall(call=action.message)))
            else:
                self._api.out.append(action)
        self.expire(self._api.moves.forwarded)  # their callers hear that they failed, and may write
        for instance in sorted(name for name in found if name not in known or name not in self._api.peers):
            try:
                self._api.add_peer(instance, number)
            except InvalidRequest:
                self._api.counters["instances_of_one_key"] += 1
        self._here[address] = found

    def on_lost(self, address: str) -> list[int]:
        """The mempool is not reached, or not any more. Returns: the peers that Api.lose_peer is to forget."""
        self._here.pop(address, None)
        for number, pull in list(self._pulls.items()):
            if pull.address == address and pull.check_due_ms is not None:  # others end by on_pulled
                self._end(number, failed=True)
        for call_id in [call_id for call_id, whom in self._asked.items() if whom == address]:
            self._close_order(call_id)
        return [number for number, each in enumerate(self.addresses) if each == address]

    # -- calls to peers -----------------------------------------------------------------------------

    def call(self, action: CallPeer) -> None:
        """To the mempool that serves the instance; a peer that was lost meanwhile has been told of already."""
        number = self._api.peers.get(action.instance)
        if number is None or not isinstance(action.message, peer_wire.CallOfPeer):
            return
        message, address = action.message, self.addresses[number]
        if isinstance(message, wire.PullPages):
            stretches = wire.unpack_stretches(message.order.sources)
            pages = [(int(each.space), int(page)) for each in stretches for page in each.pages]
            self._orders[message.call_id] = address, pages
            self._readable.update(pages)
        if not isinstance(message, wire.FreeMem):  # nobody waits for its answer
            self._asked[message.call_id] = address
            if len(self._asked) > MAX_LATE + len(self._api.moves.forwarded):
                self._close_order(next(iter(self._asked)))
        self._out.append(AskPeer(address, peer_wire.PeerCall(call=message)))

    def names(self, order: int, space: int, pages: Iterable[int]) -> bool:
        """Whether this transfer is under way and names all of these; 0, of an earlier version: any transfer."""
        if not order:
            return self.may_read(space, pages)
        _, named = self._orders.get(order, ("", []))
        return {(space, page) for page in pages} <= set(named)

    def may_read(self, space: int, pages: Iterable[int]) -> bool:
        """Whether a transfer that is under way names all of these. From any thread."""
        return all((space, page) in self._readable for page in pages)

    def on_answer(self, address: str, message: peer_wire.ToReader, now_ms: int) -> wire.ApiReply | None:
        """An answer of a peer, or of nobody's concern here. Returns: what Api.on_peer_reply is to hear."""
        match message:
            case peer_wire.PeerReply():
                if self._asked.get(message.reply.call_id) != address:
                    return None
                self._close_order(message.reply.call_id)
                return message.reply
            case peer_wire.Here() if address in self.addresses:
                self._on_here(address, message)
            case peer_wire.EpochsChecked() | peer_wire.CallRefused():
                self._on_checked(address, message)
        return None

    def is_mine(self, message: peer_wire.ToReader) -> bool:
        """Whether on_answer() is who asked."""
        if isinstance(message, peer_wire.EpochsChecked | peer_wire.CallRefused):
            return message.call_id >= FIRST_NUMBER
        return isinstance(message, peer_wire.PeerReply | peer_wire.Here)

    def expire(self, unanswered: Container[int]) -> None:
        """Pages of transfers that were given up are not read any more."""
        for call_id in [call_id for call_id in self._orders if call_id not in unanswered]:
            self._close_order(call_id)

    def _close_order(self, call_id: int) -> None:
        self._asked.pop(call_id, None)
        _, pages = self._orders.pop(call_id, ("", []))
        for page in pages:
            self._readable[page] -= 1
            if not self._readable[page]:
                del self._readable[page]

    # -- pages of peers -----------------------------------------------------------------------------

    def move(self, action: MovePages, take: Callable[[int, int, list[PageId]], None]) -> None:
        """Bring pages of a peer's instance. Args: take: told of each copy (number, space, pages) before it begins."""
        number = self._api.peers.get(action.source)
        groups: dict[tuple[int, int], tuple[list[PageId], list[int], list[PageId]]] = {}
        for source, target in side_by_side(action.sources, action.targets):
            found = groups.setdefault((int(source.space), int(target.space)), ([], [], []))
            found[0].extend(source.pages)
            found[1].extend(source.epochs)
            found[2].extend(target.pages)
        for (source_space, space), (pages, epochs, into) in sorted(groups.items()):
            copy_id = next(self._numbers)
            take(copy_id, space, into)
            address = self.addresses[number] if number is not None else ""
            self._pulls[copy_id] = _Pull(address, source_space, pages, epochs, action.order or 0)
            if address:
                self._out.append(
                    PullRemote(copy_id, address, space, into, source_space, pages, action.timeout_ms)
                )
        if number is None:  # its peer was lost in this moment
            for copy_id in [n for n, pull in self._pulls.items() if not pull.address]:
                self._end(copy_id, failed=True)

    def on_pulled(self, number: int, *, failed: bool, in_doubt: Collection[int], now_ms: int) -> bool:
        """The bytes are here, or not. False: not a pull of ours."""
        pull = self._pulls.get(number)
        if pull is None:
            return number >= FIRST_NUMBER  # given up before
        if failed:
            self._end(number, failed=True, in_doubt=in_doubt)
            return True
        pull.check_due_ms = now_ms + CHECK_TIMEOUT_MS
        question = peer_wire.CheckEpochs(
            call_id=number, space=pull.source_space, pages=u32_bytes(pull.pages), epochs=u64_bytes(pull.epochs),
            held=True, order=pull.order,
        )  # fmt: skip
        self._out.append(AskPeer(pull.address, question))
        return True

    def _on_checked(self, address: str, message: peer_wire.EpochsChecked | peer_wire.CallRefused) -> None:
        pull = self._pulls.get(message.call_id)
        if pull is None or pull.address != address or pull.check_due_ms is None:
            return
        stale: Sequence[int] = ()
        failed = isinstance(message, peer_wire.CallRefused)
        if isinstance(message, peer_wire.EpochsChecked):
            try:
                stale = u32_list(message.stale)
            except ValueError:
                failed = True
        self._end(message.call_id, failed=failed, stale=bool(stale))

    def _end(
        self, number: int, *, failed: bool = False, in_doubt: Collection[int] = (), stale: bool = False
    ) -> None:
        del self._pulls[number]
        self._ended(number, failed, in_doubt, stale)

    # -- callers on other hosts ---------------------------------------------------------------------

    @staticmethod
    def connection_of(link: int) -> int:
        """Of the mempool of another host, as a caller."""
        return FIRST_CONNECTION + link

    def reply(self, connection: int, message: wire.FromMempoolApi) -> None:
        """To a caller on another host. Raises: PeerProtocolError on what is no answer to a call."""
        if not isinstance(message, wire.ApiReply):
            raise PeerProtocolError(f"{type(message).__name__} is for callers on this host")
        self._out.append(TellPeer(connection - FIRST_CONNECTION, peer_wire.PeerReply(reply=message)))

    def tell_who_is_here(self, link: int) -> None:
        """Answer WhoIsHere."""
        here = sorted(self._api.homes)[:MAX_HERE]
        self._out.append(TellPeer(link, peer_wire.Here(instances=list(here))))
