"""The local span store: one JSONL file per process, read by `quire trace` where no collector runs.

One line per span (span_record.py). A process keeps at most two files of
MAX_FILE_BYTES; a folder keeps at most MAX_FOLDER_FILES.
"""

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shared.observe.span_record import SpanRecord

MAX_FILE_BYTES = 64 << 20
MAX_FOLDER_FILES = 64
_encoder = msgspec.json.Encoder(enc_hook=str)


class JsonlSpanExporter:
    """Appends to `spans-<service>-<pid>.jsonl`; a full file becomes `.1.jsonl`, replacing the one before."""

    def __init__(self, directory: Path, service: str, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        _prune(directory)
        self._directory = directory
        self._service = service
        self._max_file_bytes = max_file_bytes
        self._fd = -1
        self._pid = 0
        self._is_torn = False  # its last line

    @property
    def path(self) -> Path:
        return self._directory / f"spans-{self._service}-{os.getpid()}.jsonl"

    def export(self, spans: Sequence[SpanRecord]) -> None:
        """Raises: OSError, also where the disk had room for a part of them. Costs 1 us a span: one call encodes all, as
        no other thread runs meanwhile."""
        if self._fd < 0 or self._pid != os.getpid():  # first use, or a forked child, with a file of its own
            self._open()
        data = _encoder.encode_lines(spans)
        found = os.fstat(self._fd)
        if not found.st_nlink:  # another process pruned it
            self._open()
        elif found.st_size + len(data) > self._max_file_bytes:
            with contextlib.suppress(FileNotFoundError):  # as above, a moment ago
                self.path.replace(self.path.with_suffix(".1.jsonl"))
            self._open()
        # behind a torn line, which is nobody's then
        whole = b"\n" + data if self._is_torn else data
        if os.write(self._fd, whole) < len(whole):
            self._is_torn = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self._is_torn = False

    def _open(self) -> None:
        if self._fd >= 0:
            closing, self._fd = self._fd, -1  # opening may fail, and the number be another file's by then
            os.close(closing)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._pid, self._is_torn = os.getpid(), False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._pid = -1, 0


def _prune(directory: Path) -> None:
    """Remove the oldest files, so that restarts do not fill the disk. A process that lives makes itself a new one."""
    stamped = []
    for path in directory.glob("spans-*.jsonl"):
        try:
            stamped.append((path.stat().st_mtime_ns, path))
        except FileNotFoundError:  # another process pruned it
            continue
    for _, path in sorted(stamped)[:-MAX_FOLDER_FILES]:
        path.unlink(missing_ok=True)
