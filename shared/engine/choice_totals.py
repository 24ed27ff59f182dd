"""What several choices of one request did with KV, as one account. No vLLM import.

vLLM runs each choice as a request of its own, which tells figures of its own with its first output and at its end, and
a front that is slow may see only those of the last. So the engine core's side adds up: who tells last tells of all.
"""

import re
from collections import OrderedDict
from typing import Any

Said = dict[str, Any]

MAX_FAMILIES = (
    4_096  # requests with several choices that are remembered: all that run, and the last that ended
)
_CHILD = re.compile(
    r"\d+_(.+)"
)  # vLLM's id of one choice: its number and the request's own id, which is unique
_LARGEST = frozenset({"tokens_loaded", "fetch_ms"})  # the prompt is one, and loads run side by side


class ChoiceTotals:
    """One per engine core."""

    def __init__(self) -> None:
        self._so_far: OrderedDict[str, Said] = OrderedDict()

    def add(self, request_id: str, said: Said) -> Said:
        """What a choice, or an only one, has to tell that it has not told: joined with what the request's others told.

        Figures are numbers or lists.
        """
        child = _CHILD.match(request_id)
        if child is None:
            return said
        family = child.group(1)
        total = self._so_far[family] = _joined(self._so_far.pop(family, {}), said)
        if len(self._so_far) > MAX_FAMILIES:
            self._so_far.popitem(last=False)
        return total


def _joined(one: Said, other: Said) -> Said:
    out = dict(one)
    for name, value in other.items():
        before = out.get(name, type(value)())
        out[name] = max(before, value) if name in _LARGEST else before + value
    return out
