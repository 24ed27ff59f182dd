"""What a look-up found, for each instance: blocks that it holds, and blocks within its reach. No I/O.

A space of a mempool serves instances; its row says which, and through which medium (the *audience*): an instance whose
engine works in the pages has them as its own ("hbm"), one that copies them into a cache of its own has them "dram"
away. What lies behind the space in host memory is "dram" for all of them.

A row also names who was attached there and is no more (*remembered*): it may come back, and what it left is fetched
under its name. That counts unless the instance publishes itself or is attached to a space: then it lives elsewhere.
"""

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from shared.ids import BlockHash, InstanceId
from shared.wire.placement import Medium, PrefixHit

SEPARATOR = "\x1f"  # between the instances of an audience
# A capital: remembered. Earlier versions read every letter but "h" as "d".
_LETTERS: dict[Medium, str] = {"hbm": "h", "dram": "d"}


class Depths(NamedTuple):
    """Leading blocks of a prompt. Never more held than reached."""

    held: int  # by the instance itself
    reached: int  # with the memory behind it


Found = dict[InstanceId, Depths]


def pack_audience(
    media: Mapping[InstanceId, Medium], remembered: Collection[InstanceId] = frozenset()
) -> str:
    """The end of a space's row, remembered instances first. One whose name has the separator in it is left out.

    Args: remembered: those in `media` that are not attached to the space now.
    """
    named = ((name, _LETTERS[medium]) for name, medium in media.items() if SEPARATOR not in name)
    return SEPARATOR.join(sorted((c.upper() if name in remembered else c) + name for name, c in named))


def short_hashes(hashes: Sequence[BlockHash]) -> bytes:
    """What scripts.LOOKUP takes: the first 16 bytes of each. Cost: 5 us for 256, a third of slicing them."""
    words = array("Q", b"".join(hashes))  # four of each
    out = array("Q", bytes(len(words) * 4))
    out[0::2], out[1::2] = words[0::4], words[1::4]
    return out.tobytes()


def parse_reply(reply: Sequence[Sequence[bytes | int] | int]) -> tuple[Found, int]:
    """What scripts.LOOKUP answered: the depths, and the version of what was retracted.

    Raises: ValueError or TypeError on a reply that the script cannot have made.
    """
    engines, spaces, version, everybody = reply
    if isinstance(engines, int) or isinstance(spaces, int) or not isinstance(version, int):
        raise TypeError("a look-up's reply has other parts")
    found: Found = {}
    for name, depth in zip(engines[::2], engines[1::2], strict=True):
        _add(found, _text(name), int(depth), int(depth))
    living = {each[1:] for each in _text(everybody).split(SEPARATOR) if each and each[0] not in "HD"}
    for own, reached, audience in zip(spaces[::3], spaces[1::3], spaces[2::3], strict=True):
        for each in _text(audience).split(SEPARATOR):
            if each and not (each[0] in "HD" and each[1:] in living):
                _add(found, each[1:], int(own) if each[0] in "hH" else 0, int(reached))
    return found, version


def _text(word: object) -> str:
    if not isinstance(word, bytes):
        raise TypeError(f"{word} where a name was expected")
    return word.decode()


def _add(found: Found, name: str, held: int, reached: int) -> None:
    instance = InstanceId(name)
    known = found.get(instance)
    if known is not None:
        held, reached = max(held, known.held), max(reached, known.reached)
    found[instance] = Depths(held, reached)


def as_hits(found: Iterable[tuple[InstanceId, Depths]], block_tokens: int) -> list[PrefixHit]:
    """For the scheduler: one hit for what an instance holds, a later one where more is within its reach."""
    out = []
    for instance, (held, reached) in found:
        if held:
            out.append(PrefixHit(instance, held * block_tokens))
        if reached > held:
            out.append(PrefixHit(instance, reached * block_tokens, "dram"))
    return out
