"""Content fingerprint of a model folder: same digest, same KV for the same tokens.

It covers config.json and the weight files by name, size and content. Up to WHOLE_BYTES in total, every byte
is read; of larger models each file gives its head and pieces spread over its length, because reading 140 GB at
every start would cost minutes; safetensors also their header, and each tensor's head, end and places between:
some layers, or experts, may be tuned alone. Edits between these do not show: of a few rows of an embedding.
"""

import hashlib
from pathlib import Path
from typing import BinaryIO

import msgspec

from shared.errors import SettingsError

WHOLE_BYTES = 64 << 20
PIECE_BYTES = 1 << 20
NUM_PIECES = 8  # per large file, the first and the last MiB included
SPOT_BYTES = 4096
SPOT_EVERY_BYTES = 16 << 20  # of a tensor, in which all experts of a layer may lie; three of each at least
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def model_fingerprint(model_dir: str, *, random_weights: bool = False) -> str:
    """Hex digest of 32 characters. With random weights, whatever lies in the folder, of config.json alone.

    Raises: SettingsError when the folder has no config.json or no weights, or cannot be read.
    Cost: one pass over at most 64 MiB, or NUM_PIECES MiB a file, 12 KiB a tensor and 4 KiB for each 16 MiB of it.
    """
    folder = Path(model_dir)
    if not (folder / "config.json").is_file():
        raise SettingsError(f"{model_dir!r} holds no config.json")
    weights = sorted(p for p in folder.iterdir() if p.suffix in WEIGHT_SUFFIXES and p.is_file())
    if random_weights:
        weights = []
    elif not weights:
        raise SettingsError(f"{model_dir!r} holds no weights ({', '.join(WEIGHT_SUFFIXES)})")
    digest = hashlib.sha256(b"quire-model-random" if random_weights else b"quire-model-1")
    try:
        whole = sum(p.stat().st_size for p in weights) <= WHOLE_BYTES
        for path in [folder / "config.json", *weights]:
            name, size = path.name.encode(), path.stat().st_size
            digest.update(len(name).to_bytes(4, "little") + name + size.to_bytes(8, "little"))
            _add_content(digest, path, size, whole=whole)
    except OSError as error:
        raise SettingsError(f"cannot read {error.filename}: {error.strerror}") from error
    return digest.hexdigest()[:32]


def _add_content(digest: "hashlib._Hash", path: Path, size_bytes: int, *, whole: bool) -> None:
    with path.open("rb") as file:
        if whole or size_bytes <= NUM_PIECES * PIECE_BYTES:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
            return
        last = size_bytes - PIECE_BYTES
        for i in range(NUM_PIECES):
            file.seek(last * i // (NUM_PIECES - 1))
            digest.update(file.read(PIECE_BYTES))
        for offset, num_bytes in _spots(file, size_bytes) if path.suffix == ".safetensors" else ():
            file.seek(offset)
            digest.update(file.read(num_bytes))


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int] = (0, 0)  # of "__metadata__", too


def _spots(file: BinaryIO, size_bytes: int) -> list[tuple[int, int]]:
    """Offset and bytes of the header and in each tensor; []: it is no such file."""
    file.seek(0)
    begin = 8 + int.from_bytes(file.read(8), "little")
    if begin > min(size_bytes, WHOLE_BYTES):
        return []
    try:
        header = msgspec.json.decode(file.read(begin - 8), type=dict[str, _Tensor])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
    spots = [(0, begin)]
    for first, end in (tensor.data_offsets for tensor in header.values()):
        if not 0 <= first <= end <= size_bytes - begin:
            return []
        last, num_bytes = max(0, end - first - SPOT_BYTES), min(SPOT_BYTES, end - first)
        most = max(3, 1 + (end - first) // SPOT_EVERY_BYTES) - 1
        spots += [(begin + first + last * i // most, num_bytes) for i in range(most + 1)]
    return spots
