"""docs/page-geometry.md, written from geometry.py: `python -m shared.vmm.geometry_table`."""

from pathlib import Path

from shared.vmm.geometry import (
    common_models,
    host_geometry,
    layer_major_geometry,
    paged_geometry,
    token_major_geometry,
)

PATH = Path(__file__).resolve().parents[2] / "docs" / "page-geometry.md"

_HEAD = """# Page geometry

Written by `python -m shared.vmm.geometry_table` from [geometry.py](../shared/vmm/geometry.py); a test holds it
up to date.

- The **page** is the unit of physical memory: what is mapped, lent and given back. On a GPU it is one allocation, a
  multiple of 2 MiB and at least 4 MiB, because the driver's calls cost by the allocation. Host pages are multiples of
  4 KiB.
- The **block** is the unit of tokens: what is hashed, shared, moved. Prefix hits come in steps of a block, here at most
  64 tokens, which is the default on a GPU (on a CPU 32, by
  [decision 0035](decisions/0035-a-block-has-64-tokens-on-a-gpu.md)).
- Where a block in a page of its own would waste more than 1/64, several blocks share the page ("blocks a page"). The
  mempool then calls the page a slab and each block's part of it a page: states, epochs and pins stay per block, and
  the memory goes back to the system when all blocks of the page are free.
- Waste is the share of a full page that holds no KV; 16-bit KV, one rank. The last block of a request is partly empty
  besides.

## Cross-layer blocks (default; paged attention)

| model | TP | bytes a token | block, tokens | block, MiB | blocks a page | page, MiB | waste, % | host page, KiB | % |
|---|---|---|---|---|---|---|---|---|---|
"""

_CONTIGUOUS = """
## Contiguous layouts (attention without a block table), GPU pages

A page is aliased as a whole here, so it is the block, and prefix hits come in its tokens. *Token-major* keeps all
layers of a token together (vAttention 8.2): what does not divide is padding between tokens, up to 1/8; beyond that a
page has more tokens. *Layer-major* has 2N tensors (vAttention 5.1.2), and a block is 2N pages, one in each: no
padding, but growth and prefix hits in steps of so many tokens that it is for attention libraries without strides only.
Pages of 64 KiB need a modified driver (vAttention 6.2) and are not offered.

`worker.kv_layout` names the layout, `worker.block_tokens` the tokens of a block. 0, its default, is on a GPU what the
table says, for the model's own shape, and 32 on a CPU; `slot_blocks` in the worker's log has tokens and waste. On a GPU
the unit of mapping, lending and release is then one allocation: a token-major block (its page is rounded up to 2 MiB,
the tokens share the padding), or one layer's K or V of a layer-major block, whose `block_tokens` must be a multiple of
what the table says. In host memory the same holds with 4 KiB in the place of 2 MiB. Each request takes blocks for 256
tokens (host: 16) more than it has. CUDA graphs are not recorded: engines without a block table run eager.

| model | TP | token-major: tokens a page | MiB | waste, % | layer-major: tokens a page | MiB | pages a block |
|---|---|---|---|---|---|---|---|
"""


def render() -> str:
    """The whole document."""
    paged, contiguous = [], []
    for name, tp_size, shape in common_models():
        gpu, host = paged_geometry(shape), host_geometry(shape)
        paged.append(
            f"| {name} | {tp_size} | {shape.token_bytes:,} | {gpu.block_tokens} | {_mib(gpu.block_bytes)} | "
            f"{gpu.blocks_per_page} | {_mib(gpu.page_bytes)} | {_percent(gpu.waste_ratio)} | "
            f"{host.page_bytes >> 10:,} | {_percent(host.waste_ratio)} |"
        )
        tokens, layers = token_major_geometry(shape), layer_major_geometry(shape)
        contiguous.append(
            f"| {name} | {tp_size} | {tokens.block_tokens} | {_mib(tokens.page_bytes)} | "
            f"{_percent(tokens.waste_ratio)} | {layers.block_tokens:,} | {_mib(layers.page_bytes)} | "
            f"{2 * shape.num_layers} |"
        )
    return _HEAD + "\n".join(paged) + "\n" + _CONTIGUOUS + "\n".join(contiguous) + "\n"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):g}"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f}"


if __name__ == "__main__":
    PATH.write_text(render())
