"""An engine that was to fuse or weave, and cannot, starts again as one that was never asked to.

On GPUs a fusing engine's steps are not compiled (decision 0021). Whether its ranks can have the operation is known only
in them, when the model is loaded: one that went on in vLLM's own way would be slower than stock vLLM for ever.
"""

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from shared.engine.rank_processes import host_ranks
from shared.kept_file import write_kept

logger = logging.getLogger(__name__)

SAID = "weave-refused"  # the file in which ranks say why

T = TypeVar("T")


class StartsAnew(RuntimeError):
    """Ends a rank, and with it this try to start the engine."""


def refuse(hosted: dict[str, Any], reason: str) -> None:
    """On every rank, with the same reason; the first that ends takes the others with it, so each says why.

    Raises: StartsAnew; returns where going on is as good as starting again: nothing was given up.
    """
    if not hosted.get("starts_anew"):
        return
    if said := hosted.get("said"):
        write_kept(Path(said), reason.encode(), "worker.weave")
    raise StartsAnew(reason)


def started(begin: Callable[[Any], T], config: Any, stock: Callable[[], Any], folder: str) -> tuple[T, Any]:
    """What `begin` makes of a vLLM configuration, and of which: `config`, or that of `stock` where ranks refused.

    Args: stock: the same engine's without fusing; what else Quire tells the engine is taken over; folder: the engine's.
    Raises: what begin() raises for another reason.
    Cost: where ranks refuse, a second start.
    """
    hosted = config.additional_config.get("quire_weave")
    if not hosted or not hosted["starts_anew"]:
        return begin(config), config
    said = Path(folder, SAID)
    hosted["said"] = str(said)
    try:
        return begin(config), config
    except RuntimeError:
        if not said.is_file():
            raise
        reason = said.read_text()
    logger.warning(
        "worker.weave = %s: vLLM's own all-reduce and norm are used, and the engine starts again with them: %s",
        hosted["mode"], reason,
    )  # fmt: skip
    host_ranks(tempfile.mkdtemp(prefix="again-", dir=folder))  # the first try's ranks have left their file
    again = stock()
    again.additional_config.update({k: v for k, v in config.additional_config.items() if k != "quire_weave"})
    if config.kv_transfer_config is not None:
        again.kv_transfer_config = config.kv_transfer_config
    return begin(again), again
