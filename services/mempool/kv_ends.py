"""How the engine of a space cuts a block over its ranks, as copies between unequal ends need it."""

from typing import TYPE_CHECKING

from shared.errors import ClusterError
from shared.kv.layout import EngineDescription
from shared.observe.log import get_logger

if TYPE_CHECKING:
    from shared.transfer.reslice import KvEnd

log = get_logger("mempool.spaces")


def kv_end(description: EngineDescription) -> "KvEnd | None":
    """How the engine cuts a block over its ranks; None when that is not known, so that nothing is cut anew."""
    from shared.transfer.reslice import KvEnd, Order

    if description.family_key == description.content_key:
        return None
    num_rows = description.num_layers * description.num_kv_heads * description.block_tokens * 2
    try:
        end = KvEnd(
            description.num_layers * description.pp_size, description.total_kv_heads, description.block_tokens,
            description.block_bytes // max(1, num_rows), tp_size=description.tp_size,
            pp_size=description.pp_size, order=Order(description.order),
        )  # fmt: skip
    except (ClusterError, ValueError) as error:
        log.warning("geometry_unknown", reason=str(error))
        return None
    return end if end.block_bytes(0) == description.block_bytes else None
