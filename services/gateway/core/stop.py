"""Stop strings over streamed text: nothing that may be the beginning of one is ever emitted.

Semantics are vLLM's: output ends right before the stop string that the text completes first, wherever token
borders fall; with `include` it ends right after it. No I/O.
"""

from array import array
from collections.abc import Sequence

_UNKNOWN = -1


class StopStrings:
    """A request's stop strings as Aho and Corasick's automaton, which all its choices share.

    A state is a beginning of some string: the longest with which the text so far ends. Of a state `s` that goes on,
    one next state is `s + 1`, others are in `_forks`. What a state falls back to is worked out when it is first
    reached, so that long strings cost nothing until some output has matched as much of them.

    Args: strings: non-empty.
    """

    __slots__ = ("_chars", "_ends", "_fails", "_forks", "_lasts", "firsts", "num_chars", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self.firsts = frozenset(string[0] for string in strings)
        self.num_chars = array("I", [0])  # of each state
        self._forks: dict[int, dict[str, int]] = {}
        chars, path, before, ends, lasts = [""], [0], "", [], []
        for string in sorted(set(strings), reverse=True):  # so each comes after those that it begins
            shared = _num_shared(before, string)
            if shared < len(string):
                new = len(self.num_chars)
                if new > 1:
                    self._forks.setdefault(path[shared], {})[string[shared]] = new
                    chars.append(string[shared + 1 :])
                else:
                    chars.append(string)
                self.num_chars.extend(range(shared + 1, len(string) + 1))
                path[shared + 1 :] = range(new, len(self.num_chars))
                chars.append("\0")  # never looked at: the last state does not go on
                lasts.append(path[-1])
                before = string
            ends.append(path[len(string)])
        self._chars = "".join(chars)  # what leads from `s` to `s + 1`
        self._fails = array("i", [_UNKNOWN]) * len(self.num_chars)
        self._ends = bytearray(len(self.num_chars))  # 1: the text ends with a stop string
        self._lasts = bytearray(len(self.num_chars))  # 1: all of a string, and no other goes on from it
        self._fails[0] = 0
        for state in ends:
            self._ends[state] = 1
        for state in lasts:
            self._lasts[state] = 1

    def advance(self, state: int, text: str) -> tuple[int, bool]:
        """State after more text, never all of a string that no other goes on from; and whether it completed one.

        Cost: about two steps a character, however many strings there are and however long.
        """
        chars, forks, fails, ends = self._chars, self._forks, self._fails, self._ends
        completed = False
        for char in text:
            while True:
                after = 0  # nowhere
                if chars[state] == char:
                    after = state + 1
                elif state in forks:
                    after = forks[state].get(char, 0)
                if after or not state:
                    break
                state = fails[state]
            if fails[after] == _UNKNOWN:
                self._learn(after, state, char)
            state = after
            if ends[state]:
                completed = True
                if self._lasts[state]:
                    state = fails[state]
        return state, completed

    def _learn(self, state: int, parent: int, char: str) -> None:
        """Where a new state falls back to. Recursion: once for each of the strings at most."""
        fails, after = self._fails, 0
        while parent and not after:
            parent = fails[parent]
            if self._chars[parent] == char:
                after = parent + 1
            elif parent in self._forks:
                after = self._forks[parent].get(char, 0)
        if fails[after] == _UNKNOWN:
            self._learn(after, parent, char)
        if self._ends[after]:
            self._ends[state] = 1
        fails[state] = fails[after] if self._lasts[after] else after


class StopSearch:
    """Feed text deltas; emit what is safe.

    Args: stops: of the request; include: keep the stop string itself in the output.
    """

    __slots__ = ("_held", "_include", "_state", "_stops", "found")

    def __init__(self, stops: StopStrings, *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self._state = 0  # of the automaton; as long as the text held
        self.found: str | None = None  # the stop string that ended the output

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Text that is safe to emit now; after `found` is set there is no more.

        Args: armed: False while min_tokens forbids an end: text may begin a stop string, not complete one.
        Cost: one look for the strings' first characters; where one is or text is held, that of advance().
        """
        if self.found is not None:
            return ""
        stops = self._stops
        if not self._state and stops.firsts.isdisjoint(text):
            return text
        self._state, completed = stops.advance(self._state, text)
        pending = self._held + text
        if completed and armed:
            return self._end(pending)
        safe = len(pending) - stops.num_chars[self._state]
        self._held = pending[safe:]
        return pending[:safe]

    def _end(self, pending: str) -> str:
        """Text before the string found. Of several in one token's text the first in the list wins, as in vLLM."""
        for stop in self._stops.strings:
            # not before the first place that the new text can complete
            at = pending.find(stop, max(0, len(self._held) - len(stop) + 1))
            if at >= 0:
                self.found, self._held = stop, ""
                return pending[: at + len(stop)] if self._include else pending[:at]
        raise AssertionError("the automaton has seen one")

    def flush(self) -> str:
        """The generation ended for another reason: what was held back is output."""
        out, self._held, self._state = self._held, "", 0
        return out

    @property
    def held(self) -> str:
        """Text held back because a stop string may begin in it."""
        return self._held


def _num_shared(one: str, other: str) -> int:
    """How many characters two strings have in common at their beginning."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one.startswith(other[:middle]):
            least = middle
        else:
            most = middle - 1
    return least


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a beginning of `mark` and not all of it.

    Cost: one C search of len(mark) characters, unless the mark's first one is among them: for short marks alone.
    """
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0:
        if mark.startswith(text[at:]):
            return len(text) - at
        at = text.find(mark[0], at + 1)
    return 0
