"""The part of mempool.py's protocol that transfer mode by-layer needs (decision 0014): blocks that leave for the decode
side while their step computes them. One-way from an engine: StepLayers, LayersSealed. A rank calls LayerWordsCall.
"""

from msgspec import Struct

from shared.ids import HandoffId, InstanceId


class StepLayers(Struct, frozen=True, kw_only=True, tag="step_layers"):
    """The step that begins completes these blocks of a prompt that goes to `target`'s engine: layer by layer they may
    be copied there, as far as the ranks' layer words say (shared/kv/layer_words.py). LayersSealed follows, always.
    With step 0 and nothing named: the prompt was given up before it was computed, nobody will ask for it."""

    handoff_id: HandoffId
    target: InstanceId
    step: int  # as in the layer words; grows
    pages: bytes
    epochs: bytes
    hashes: bytes  # 32 B each
    cached: bytes = b""  # hashes of the prompt's blocks before these, sealed by earlier steps or requests
    traceparent: str = ""


class LayersSealed(Struct, frozen=True, kw_only=True, tag="layers_sealed"):
    """The step is over. Of the blocks that StepLayers announced for it, these were sealed by it (Sealed came before
    this); what was read of the others is worth nothing."""

    step: int
    pages: bytes = b""
    epochs: bytes = b""


class LayerWordsCall(Struct, frozen=True, kw_only=True, tag="layer_words_call"):
    """From a rank: the memory in which it says how far its step is, please. Answered by LayerWords."""

    call_id: int


class LayerWords(Struct, frozen=True, kw_only=True, tag="layer_words"):
    """One fd comes with it: shared/kv/layer_words.py says what lies there."""

    call_id: int
