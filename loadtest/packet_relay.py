"""A network between two namespaces that delays, reorders and loses packets: a process that passes them on by hand.

    python -m loadtest.packet_relay FD FD --delay-ms 2 --jitter-ms 1 --loss-share 0.01 --seed 1

`tc netem` does the same where a kernel has it; a TUN device each (FD) is there in nearly all. What comes out of one
goes into the other, after the delay and a share of the jitter of its own, or not at all. Ends with SIGTERM, then says
how many packets it passed on and how many it lost, as JSON.
"""

import argparse
import fcntl
import heapq
import json
import os
import random
import select
import signal
import struct
import sys
import time

TUN = "/dev/net/tun"
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MAX_PACKET_BYTES = 1 << 16
MAX_QUEUED = 100_000  # packets; further ones are lost


def open_tun(name: str) -> int:
    """A new TUN device of this name in this process's network namespace; it is gone when the descriptor is closed.

    Raises: OSError without the right to, or without TUN in the kernel.
    """
    fd = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        os.close(fd)
        raise
    return fd


class Relay:
    """Packets between two descriptors. run() until stop() is called from a signal's handler."""

    def __init__(self, fds: tuple[int, int], options: argparse.Namespace) -> None:
        self.num_passed = self.num_lost = 0
        self._other = {fds[0]: fds[1], fds[1]: fds[0]}
        self._delay_s, self._jitter_s = options.delay_ms / 1000, options.jitter_ms / 1000
        self._loss_share = options.loss_share
        self._random = random.Random(options.seed)
        self._queue: list[tuple[float, int, int, bytes]] = []  # due, number, into, packet
        self._is_over = False

    def stop(self) -> None:
        """run() returns soon."""
        self._is_over = True

    def run(self) -> None:
        """Until stop()."""
        number = 0
        while not self._is_over:
            wait_s = max(0.0, self._queue[0][0] - time.monotonic()) if self._queue else 0.1
            for fd in select.select(list(self._other), [], [], min(wait_s, 0.1))[0]:
                for packet in self._read_all(fd):
                    number += 1
                    self._take(number, self._other[fd], packet)
            now_s = time.monotonic()
            while self._queue and self._queue[0][0] <= now_s:
                _, _, into, packet = heapq.heappop(self._queue)
                self._write(into, packet)

    def _read_all(self, fd: int) -> list[bytes]:
        found = []
        try:
            while len(found) < 64:  # then the other side has a turn
                found.append(os.read(fd, MAX_PACKET_BYTES))
        except BlockingIOError:
            pass
        return found

    def _take(self, number: int, into: int, packet: bytes) -> None:
        if self._random.random() < self._loss_share or len(self._queue) >= MAX_QUEUED:
            self.num_lost += 1
            return
        late_s = self._delay_s + self._jitter_s * self._random.uniform(-1, 1)
        heapq.heappush(self._queue, (time.monotonic() + max(0.0, late_s), number, into, packet))

    def _write(self, into: int, packet: bytes) -> None:
        try:
            os.write(into, packet)
            self.num_passed += 1
        except OSError:  # its queue is full, or the device is not up: lost, as anywhere
            self.num_lost += 1


def main(argv: list[str]) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.packet_relay", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "fds", type=int, nargs=2, metavar="FD", help="descriptor of a TUN device, non-blocking"
    )
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of every packet (default: %(default)s)")
    parser.add_argument(
        "--jitter-ms",
        type=float,
        default=0.0,
        help="more or less than that, at random (default: %(default)s)",
    )
    parser.add_argument(
        "--loss-share", type=float, default=0.0, help="of the packets, 0 to 1 (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    relay = Relay(tuple(options.fds), options)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: relay.stop())
    print("{}", flush=True)  # it listens
    relay.run()
    print(json.dumps({"passed": relay.num_passed, "lost": relay.num_lost}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
