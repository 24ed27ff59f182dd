"""Measurements that the next start need not take again: a file that is read whole or not at all. No failure matters."""

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)


def read_kept(path: Path, what: str) -> bytes | None:
    """None where there is none; what cannot be read is said. Args: what: it is of, for the log."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s: %s is not read: %s", what, path, error.strerror)
        return None


def write_kept(path: Path, data: bytes, what: str) -> None:
    """What cannot be written is said. Several processes may write the same file at once."""
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        logger.warning("%s: %s is not kept: %s", what, path, error.strerror)
