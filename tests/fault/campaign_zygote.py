"""Forks the campaign's processes: each starts within milliseconds, because everything is imported already.

`python -m tests.fault.campaign_zygote FD`: FD is one end of a packet socket to the conductor. Whoever is forked here
dies with this process; a mempool and a keeper run the very code of their own `__main__`.
"""

import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import traceback

import msgspec

import services.mempool.__main__ as mempool
import services.mempool.keeper.__main__ as keeper
from shared.observe import log, service
from tests.fault.campaign_actors import ACTORS, serve
from tests.fault.campaign_host_actors import HOST_ACTORS

PR_SET_PDEATHSIG = 1
MAX_ORDER_BYTES = 1 << 16


def become(order: dict, fds: list[int]) -> int:
    """In the forked child: what the order says, until its end; the exit status."""
    os.dup2(fds[0], 2)
    sys.argv = [order["role"], *order["flags"]]
    if order["role"] == "mempool":
        return service.main("mempool", mempool.config.load, mempool.run)
    if order["role"] == "keeper":
        return keeper.main()
    log.setup("actor", order["instance"], "warning")
    serve((ACTORS | HOST_ACTORS)[order["role"]](order), socket.socket(fileno=fds[1]))
    return 0


def fork(order: dict, fds: list[int], control: socket.socket, libc: ctypes.CDLL) -> int:
    """The child's pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        status = become(order, fds)
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:  # noqa: BLE001  a child must never go on as a zygote
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    assert threading.active_count() == 1, "a forked child would lack the other threads"
    gc.freeze()
    while True:
        data, fds, _, _ = socket.recv_fds(control, MAX_ORDER_BYTES, 2)
        if not data:
            return
        pid = fork(msgspec.msgpack.decode(data), fds, control, libc)
        for fd in fds:
            os.close(fd)
        control.send(msgspec.msgpack.encode(pid))


if __name__ == "__main__":
    main()
