"""Logs on stderr, one JSON object a line: time, service, instance, event, level, then ids as keys."""

import contextlib
import io
import logging
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog
from structlog.typing import EventDict

from shared.observe.log_file import LogFile

_encoder = msgspec.json.Encoder(enc_hook=repr)


class _Lossy(io.TextIOWrapper):
    """Loses what its file refuses."""

    def write(self, text: str, /) -> int:
        """All of it counts as written."""
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """What cannot be written now is lost."""
        with contextlib.suppress(OSError):
            super().flush()


def bear_full_disk() -> None:
    """Stdout and stderr of this process, and of those forked from it, raise no OSError from now on.

    Python ends a forked process whose last flush raises, and with it an engine, over a line that nobody needs.
    """
    for name, fd in (("stdout", 1), ("stderr", 2)):
        with contextlib.suppress(OSError):  # it is closed
            raw: Any = io.FileIO(fd, "w", closefd=False)  # no buffer: that would keep what was refused
            setattr(sys, name, _Lossy(raw, encoding="utf-8", errors="backslashreplace", write_through=True))


def flush_streams() -> None:
    """Stdout and stderr; what a full disk refuses is lost."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


class _StdlibHandler(logging.Handler):
    """Warnings and errors of libraries, in the same form as our own lines. As every handler it raises nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {}
        try:
            fields["message"] = record.getMessage()
            if record.exc_info:
                fields["exception"] = logging.Formatter().formatException(record.exc_info)
        except Exception as error:  # noqa: BLE001 - whatever a library's arguments do when they are formatted
            fields["message"] = f"{record.msg!r}: not formatted, {type(error).__name__}"
        log = get_logger(record.name)
        (log.error if record.levelno >= logging.ERROR else log.warning)("library_message", **fields)


def _render(_logger: Any, _name: str, event: EventDict) -> bytes:
    try:
        return _encoder.encode(event)
    except UnicodeEncodeError:  # a path that is no UTF-8
        return _encoder.encode(_printable(event))


def _printable(value: Any) -> Any:
    """Half of a surrogate pair, which JSON cannot have, as `\\udc80`."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_printable(key): _printable(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_printable(each) for each in value]
    return value


def setup(service: str, instance: str, level: str = "info") -> None:
    """Configure the process's logs. `level`: debug, info, warning or error. No logger raises where stderr fails."""
    number = getattr(logging, level.upper(), None)
    if not isinstance(number, int):
        raise ValueError(f"log level {level!r}: use debug, info, warning or error")

    def add_origin(_logger: Any, _name: str, event: EventDict) -> EventDict:
        stamp = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
        return {"time": stamp.replace("+00:00", "Z"), "service": service, "instance": instance, **event}

    def lost(num_lines: int) -> bytes:
        event = {"component": "log", "event": "log_lines_lost", "level": "warning", "num_lines": num_lines}
        return _encoder.encode(add_origin(None, "", event)) + b"\n"

    file: Any = LogFile(sys.stderr, lost)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            add_origin,
            _render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.BytesLoggerFactory(file=file),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers = [h for h in root.handlers if not isinstance(h, _StdlibHandler)]
    root.addHandler(_StdlibHandler(logging.WARNING))


def get_logger(name: str) -> Any:
    """A logger: `log.info("lease_granted", lease_id=...)`. Events are snake_case words, ids are keys."""
    return structlog.get_logger(component=name)
