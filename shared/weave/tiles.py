"""Which tile a matrix product's kernel computes with, from the kernel's name. No I/O.

cuBLAS and CUTLASS write it there: `nvjet_tst_128x256_64x4_1x2_h_bz_TNT`, `cutlass_80_tensorop_bf16_s16816gemm_..._
128x64_64x3_tn_align8`, `sm90_xmma_gemm_bf16bf16_..._tilesize128x128x64_...`. torch asks cuBLAS for the transpose of a
row-major result, so the first number counts columns of ours, the second one tokens.
"""

import re

from shared.weave.waves import Tile

DEFAULT_TILE = Tile(
    tokens=128, columns=128
)  # where no name tells: the smallest common one of Hopper's kernels
_SIZES = re.compile(r"(?:_|tilesize)(\d+)x(\d+)(?=[x_])")
LEAST, MOST = 16, 512


def tile_of(kernel_name: str) -> Tile | None:
    """None where the name says nothing that could be a tile."""
    for found in _SIZES.finditer(kernel_name):
        columns, tokens = int(found[1]), int(found[2])
        if LEAST <= columns <= MOST and LEAST <= tokens <= MOST:
            return Tile(tokens=tokens, columns=columns)
    return None
