"""`python -m services.mempool.keeper --socket .quire/run/keeper.sock`: hold descriptors, do nothing else."""

import ctypes
import gc
import signal
import sys
import time
from pathlib import Path

import msgspec

from services.mempool.keeper import config
from services.mempool.keeper.server import MAX_CONNECTIONS, KeeperServer
from shared.errors import SettingsError
from shared.transport.unix_socket import take_all_descriptors
from shared.wire.keeper import MAX_FDS

EXIT_SETTINGS = 2
LEVELS = ("debug", "info", "warning", "error")
# Open files that are not kept: streams, sockets, and what arrives on every connection before it is judged.
RESERVED_FDS = 32 + MAX_CONNECTIONS * (MAX_FDS + 1)


class Log:
    """JSON lines on stderr in the form of shared.observe.log, which would cost ten MiB here."""

    def __init__(self, level: str) -> None:
        self._least = LEVELS.index(level)
        self._encoder = msgspec.json.Encoder()

    def __call__(self, event: str, *, level: str = "info", **fields: object) -> None:
        if LEVELS.index(level) < self._least:
            return
        now = time.time()
        stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03d}Z"
        line = {
            "time": stamp,
            "service": "keeper",
            "instance": "keeper",
            **fields,
            "event": event,
            "level": level,
        }
        try:
            sys.stderr.write(self._encoder.encode(line).decode() + "\n")
            sys.stderr.flush()
        except OSError:  # a full disk or a closed pipe is no reason to give up the memory
            return


def raise_limit(settings: config.KeeperSettings, log: Log) -> int:
    """Use all open files that this process may have; how many of them it can keep for others."""
    hard = take_all_descriptors()
    reserved = min(RESERVED_FDS, hard // 4)
    keepable = min(settings.max_fds, hard - reserved)
    if keepable < settings.expected_fds:
        log(
            "open_files_limit_too_low",
            level="warning",
            hard_limit=hard,
            can_keep=keepable,
            expected=settings.expected_fds,
            advice=f"every GPU page takes one open file; set the hard limit to at least "
            f"{settings.expected_fds + RESERVED_FDS}: `ulimit -Hn`, LimitNOFILE= of systemd, or "
            "ulimits.nofile of keeper and mempool in compose. Host memory needs two per space and is not affected.",
        )
    return keepable


def trim_heap() -> None:
    """Give back what importing took for a while: a third of this process."""
    gc.collect()
    gc.freeze()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def main() -> int:
    """Exit status 0 after SIGTERM or SIGINT, 2 on wrong settings."""
    if not __debug__:
        print("quire does not run with -O: it relies on its assertions", file=sys.stderr)  # noqa: T201
        return EXIT_SETTINGS
    try:
        settings = config.load(sys.argv[1:])
        log = Log(settings.log_level)
        max_fds = raise_limit(settings, log)
        server = KeeperServer(Path(settings.socket), max_fds, log)
    except SettingsError as error:
        print(f"keeper: {error.message}", file=sys.stderr)  # noqa: T201
        return EXIT_SETTINGS
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    log("keeper_listening", socket=settings.socket, max_fds=max_fds)
    trim_heap()
    server.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
