"""A copier between host pages that a test holds, lets go or has fail."""

import threading

from shared.kernels.copy_pages.copies import CopyFailed
from shared.kernels.copy_pages.cpu_copier import CpuCopier


class Gate:
    """A copier whose sets stand still until open() (or refuse to start), and that then copies as the CPU does."""

    def __init__(self, *, is_open=False):
        self._cpu = CpuCopier()
        self._lock = threading.Lock()
        self.is_open = is_open
        self.refuse = 0  # how many of the next sets fail at once
        self.held = []
        self.comes_back = threading.Event()  # submit() hangs until it is set
        self.comes_back.set()

    def submit(self, copies, direction, *, stream=0, **_):
        self.comes_back.wait()
        with self._lock:
            if self.refuse:
                self.refuse -= 1
                raise CopyFailed("memmove", "refused by the test")
            ticket = GateTicket(self, copies)
            if self.is_open:
                ticket.move()
            else:
                self.held.append(ticket)
            return ticket

    def open(self, count=None):
        with self._lock:
            self.is_open = count is None
            for ticket in self.held[:count]:
                ticket.move()
            self.held = self.held[count:] if count is not None else []

    def close(self, timeout_s=30.0):
        pass


async def overdue(copy, *args):
    """How a copy ended that was under way at its deadline; begun again where the machine stood still before that."""
    while not (done := await copy(*args, timeout_ms=400)).quarantined:
        assert done.reason == "the deadline passed before the copy could start", done
    return done


class GateTicket:
    def __init__(self, gate, copies):
        self._gate, self._copies, self._moved = gate, copies, False

    def move(self):
        self._gate._cpu.submit(self._copies)
        self._moved = True

    def done(self):
        return self._moved
