"""A temporary folder that goes at the latest when another of its kind is made: no kill leaves it for good."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class OwnFolder:
    """Until remove(). Locked while this process, or one forked from it, lives: what killed ones have left goes first.

    Args: kind: how the folder's name begins; nothing else in the temporary folder may begin so.
    Raises: OSError when it cannot be made.
    """

    def __init__(self, kind: str) -> None:
        _remove_left(kind)
        # locked before it has the name that others look for
        made = tempfile.mkdtemp(prefix=f".new-{kind}")
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # a file system without locks: then nobody else can lock it either
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.replace(f".new-{kind}", kind)
        Path(made).rename(self.path)

    def remove(self) -> None:
        """Harmless when removed already."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_left(kind: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{kind}*"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where one of its processes lives
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
