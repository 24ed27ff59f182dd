"""What several spaces ask for at once, so that nobody hears of a page before its word is written. No I/O."""

from services.mempool.core.actions import (
    Action,
    ApiSend,
    Disconnect,
    MapFarPages,
    OfferSlabs,
    Send,
    SendLayerWords,
    SendSlabs,
    TellPeer,
    WriteEntries,
    WriteWords,
)

_TELLS = (Send, SendSlabs, OfferSlabs, SendLayerWords, MapFarPages, TellPeer, ApiSend, Disconnect)
_WRITES = (WriteWords, WriteEntries)


def told_last(actions: list[Action]) -> list[Action]:
    """The same actions: what tells a peer something comes behind the last word or entry of any space.

    Each space writes its words before it speaks, but an answer may be about pages of another space: blocks that an
    engine's space moved to host memory. A mempool that dies between the two would have promised what its successor does
    not find. All other actions stay in their order. Cost: a look at each.
    """
    last = max((i for i, action in enumerate(actions) if isinstance(action, _WRITES)), default=-1)
    head, tail = actions[: last + 1], actions[last + 1 :]
    told = [action for action in head if isinstance(action, _TELLS)]
    if not told:
        return actions
    return [action for action in head if not isinstance(action, _TELLS)] + told + tail
