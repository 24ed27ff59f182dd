"""In what pieces, and when, a prompt's blocks go from prefill to decode (MemServe 5.2, Figure 5).

| mode           | what goes at once                                 | begun                                          |
|----------------|---------------------------------------------------|------------------------------------------------|
| by-request-agg | pages: all layers of a block are one piece        | when the prompt is computed                    |
| by-request     | a layer of all blocks, then the next one          | when the prompt is computed                    |
| by-layer       | the layers that are computed and not sent yet     | when the first layer of its step is computed   |

A layer's K and V of a block are one piece where they lie side by side, else two (layer-major pages of a GPU).
"""

from enum import StrEnum

from shared.kv.layout import EngineDescription


class TransferMode(StrEnum):
    """The setting `transfer_mode`, of a mempool and of its workers."""

    BY_REQUEST_AGG = "by-request-agg"
    BY_REQUEST = "by-request"
    BY_LAYER = "by-layer"


def layer_bytes_of(description: EngineDescription) -> int:
    """Of one layer's K and V of a block where layers follow each other; 0 where they do not ("token-major")."""
    layers = description.num_layers
    if description.layout not in ("layers-blocks", "layer-major") or layers <= 0 or description.pp_size > 1:
        return 0
    return 0 if description.block_bytes % layers else description.block_bytes // layers
