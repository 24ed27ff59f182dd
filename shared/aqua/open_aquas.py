"""The Aquas of this process, so that a tensor need not name its own where there is one."""

import weakref
from typing import TYPE_CHECKING

from shared.errors import InvalidRequest

if TYPE_CHECKING:
    from shared.aqua.consumer import Aqua

opened: "weakref.WeakSet[Aqua]" = weakref.WeakSet()


def the_one() -> "Aqua":
    """The open Aqua of this process. Raises: InvalidRequest when there is none, or more than one."""
    found = [aqua for aqua in opened if not aqua.is_closed]
    if len(found) != 1:
        raise InvalidRequest(f"{len(found)} Aquas are open in this process: name the one to use")
    return found[0]
