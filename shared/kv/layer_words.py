"""How far a rank's step is, layer by layer: one 64-bit word in memory that the rank and its host's mempool share.

    word = step << 16 | layers: of this step, so many leading layers (in the order in which they lie in a page) have
    their keys and values in the pages

The word only grows, because steps follow each other and layers within them; a later step's word says that every earlier
step is written. It is published behind the bytes that it speaks of: with release order by the CPU, in stream order by a
GPU. Whoever has read it may copy those bytes; that they are final is said by LayersSealed (shared/wire/mempool.py).
"""

LAYER_BITS = 16
ALL_LAYERS = (1 << LAYER_BITS) - 1  # of a step that another one has followed
MEMORY_BYTES = 4096  # of the shared memory; the word is its first


def layer_word(step: int, num_layers: int) -> int:
    """Raises: ValueError for more layers than there is room for."""
    if not 0 <= num_layers <= ALL_LAYERS or step < 0:
        raise ValueError(f"step {step}, {num_layers} layers")
    return step << LAYER_BITS | num_layers


def layers_written(word: int, step: int) -> int:
    """How many leading layers of `step` are written, as far as the word says; ALL_LAYERS: all of them."""
    at, layers = word >> LAYER_BITS, word & ALL_LAYERS
    return ALL_LAYERS if at > step else layers if at == step else 0
