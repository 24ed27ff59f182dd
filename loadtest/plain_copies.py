"""What the machine does without us: python -m loadtest.plain_copies cuda|cpu BYTES prints a JSON list of timed copies.

To GPU 0, from GPU 1 and from page-locked host memory, one plain copy after the other of a buffer of PIECE_BYTES until
so many bytes went; on a CPU the same from host memory to host memory, for both, so that scripts can be tried.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

PIECE_BYTES = 2 << 30
REPEATS = 5


def timed(copy: Callable[[], object], wait: Callable[[], object], num_bytes: int, piece: int) -> list[float]:
    """Seconds of each repetition; one before them warms up."""
    count = -(-num_bytes // piece)
    out = []
    for _ in range(REPEATS + 1):
        wait()
        begin_s = time.perf_counter()
        for _ in range(count):
            copy()
        wait()
        out.append(time.perf_counter() - begin_s)
    return out[1:]


def rows(device: str, num_bytes: int) -> list[dict[str, Any]]:
    """Samples of both ways."""
    piece = min(PIECE_BYTES, num_bytes)
    cuda = device == "cuda"
    target = torch.empty(piece, dtype=torch.uint8, device="cuda:0" if cuda else "cpu")
    host = torch.empty(piece, dtype=torch.uint8, pin_memory=cuda)
    sources = {"dram": host, "peer": torch.empty(piece, dtype=torch.uint8, device="cuda:1") if cuda else host}

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)

    out = []
    for tier, source in sources.items():
        taken = timed(lambda source=source: target.copy_(source, non_blocking=True), wait, num_bytes, piece)
        copied = -(-num_bytes // piece) * piece
        out += [{"tier": tier, "bytes": copied, "seconds": round(seconds, 6)} for seconds in taken]
    return out


def main(argv: Sequence[str]) -> int:
    """Print them."""
    print(json.dumps(rows(argv[0], int(argv[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
