"""Which request a span belongs to. A client may send one trace for all requests of its session."""

from collections.abc import Hashable, Iterable
from typing import TypeVar

REQUEST = "gateway.receive"  # a request's span, whoever its trace began with; profiles of workers have none
K = TypeVar("K", bound=Hashable)


def owners(spans: Iterable[tuple[K, K, bool]]) -> dict[K, K]:
    """The key of the nearest request above each span, or its own; where none is, of the first span above that is not
    here: a request's own is written when it ends. Cost: O(spans).

    Args: spans: (key, its parent's key, whether it is a request's own). What points at itself in a circle is left out.
    """
    parents: dict[K, K] = {}
    found: dict[K, K | None] = {}
    for key, parent, is_request in spans:
        parents[key] = parent
        if is_request:
            found[key] = key
    for key in parents:
        at, path = key, list[K]()
        while at in parents and at not in found:
            found[at] = None  # until it is known; ends circles
            path.append(at)
            at = parents[at]
        found.update(dict.fromkeys(path, found.get(at) if at in parents else at))
    return {key: owner for key, owner in found.items() if owner is not None}
