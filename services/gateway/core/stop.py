"""Stop strings over streamed text: nothing that may be the beginning of one is ever emitted.

Semantics are vLLM's: output ends right before the stop string that the text completes first, wherever token
borders fall; with `include` it ends right after it. No I/O.
"""

from collections.abc import Sequence


class StopSearch:
    """Feed text deltas; emit what is safe.

    Args: stops: non-empty strings; include: keep the stop string itself in the output.
    """

    __slots__ = ("_held", "_include", "_stops", "found")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None  # the stop string that ended the output

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Text that is safe to emit now; after `found` is set there is no more.

        Args: armed: False while min_tokens forbids an end: text may begin a stop string, not complete one.
        Cost: O(len(held + text) * number of stops) in C string search.
        """
        if self.found is not None:
            return ""
        pending = self._held + text
        if armed and text:
            for stop in self._stops:  # of several in one token's text the first in the list wins, as in vLLM
                # not before the first place that the new text can complete
                at = pending.find(stop, max(0, len(self._held) - len(stop) + 1))
                if at >= 0:
                    self.found, self._held = stop, ""
                    return pending[: at + len(stop)] if self._include else pending[:at]
        keep = self._longest_beginning(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """The generation ended for another reason: what was held back is output."""
        out, self._held = self._held, ""
        return out

    @property
    def held(self) -> str:
        """Text held back because a stop string may begin in it."""
        return self._held

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string begins."""
        return max((overlap(text, stop) for stop in self._stops), default=0)


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a beginning of `mark` and not all of it.

    Cost: one C search of len(mark) characters, unless the mark's first one is among them.
    """
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0:
        if mark.startswith(text[at:]):
            return len(text) - at
        at = text.find(mark[0], at + 1)
    return 0
