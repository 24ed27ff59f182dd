"""Unix-socket steps that both ends of the channel share: descriptors, credentials, a private listener."""

import array
import contextlib
import errno
import os
import resource
import socket
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.errors import PeerGone, ResourceError, SettingsError
from shared.transport.unix_framing import MAX_FDS

SO_PEERPIDFD = 77  # Linux 6.5; the socket module does not name it yet
READ_BYTES = 256 << 10
NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
NO_ROOM = NO_DESCRIPTORS | {errno.ENOBUFS, errno.ENOMEM}  # why accept() fails for a while


class OutOfDescriptors(ResourceError):
    """This process, or the machine, may open no more of them now."""

    code = "descriptors.exhausted"


def take_all_descriptors() -> int:
    """Raise this process's limit of open files as far as it may; returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


@contextlib.contextmanager
def opening() -> Iterator[None]:
    """Around calls that open descriptors. Raises: OutOfDescriptors for their OSError, where it means that."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_DESCRIPTORS:
            raise
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise OutOfDescriptors(f"{error.strerror}; RLIMIT_NOFILE is {soft} here (ulimit -n)") from error


def opened(open_one: Callable[[int], int], each: Iterable[int]) -> list[int]:
    """A descriptor of each, the caller's to close: all or none. Raises: OutOfDescriptors, and what `open_one` does."""
    made: list[int] = []
    try:
        with opening():
            for one in each:
                made.append(open_one(one))  # noqa: PERF401  those made before one fails are closed
    except BaseException:
        close_fds(made)
        raise
    return made


def duplicates(fds: Iterable[int]) -> list[int]:
    """A copy of each, the caller's to close: all of them or none. Raises: OutOfDescriptors."""
    return opened(os.dup, fds)


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """Who connected, as the kernel says. pid 0: not visible from here."""

    pid: int
    uid: int
    gid: int


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """SO_PEERCRED of a connected unix socket."""
    size = struct.calcsize("3i")
    return PeerCredentials(*struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)))


def open_peer_pidfd(sock: socket.socket, pid: int) -> int:
    """A pidfd of the peer, owned by the caller; -1 when it is gone already.

    SO_PEERPIDFD names the very process that connected; pidfd_open, for older kernels, names whoever holds its
    pid now.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        pass
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def receive(
    sock: socket.socket, *, max_fds: int = MAX_FDS, read_bytes: int = READ_BYTES
) -> tuple[bytes, list[int]]:
    """Some bytes, and the descriptors that came with them, now the caller's. b"" at the end of the stream.

    Descriptors beyond max_fds, or beyond what this process may open, are closed by the kernel.
    """
    fds = array.array("i")
    space = socket.CMSG_SPACE(max_fds * fds.itemsize)
    data, ancillary, _, _ = sock.recvmsg(read_bytes, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, body in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
    return data, list(fds)


def transmit(sock: socket.socket, data: memoryview, fds: tuple[int, ...]) -> int:
    """Write a part of `data`, with `fds` on its first byte; how many bytes went out. `fds` stay open here."""
    if not fds:
        return sock.send(data)
    return sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


def close_fds(fds: list[int] | tuple[int, ...]) -> None:
    """Close descriptors that nobody took over."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def make_socket(path: Path, flags: int = 0) -> socket.socket:
    """For a client of `path`, not connected yet. Raises: PeerGone when descriptors ran out, which may pass."""
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | flags)
    except OSError as error:
        raise PeerGone(f"cannot connect to {path}: {error}") from None


def listen_privately(path: Path, *, backlog: int) -> socket.socket:
    """A non-blocking listener at `path`, mode 0600; a socket left behind by a dead process is replaced.

    Raises: SettingsError when the path is too long, is not a socket, or another process serves it.
    """
    if len(os.fsencode(path)) > 107:
        raise SettingsError(f"socket path {path} exceeds 107 bytes; choose a shorter one")
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sock.bind(os.fspath(path))
        path.chmod(0o600)  # before listen(): nobody can have connected under another mode
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise SettingsError(f"cannot listen on {path}: {error.strerror}") from error
    return sock


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SettingsError(f"{path} exists and is not a socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise SettingsError(f"{path} cannot be checked: {error}") from error
    raise SettingsError(f"another process serves {path}; stop it or choose another path")
