"""Machine code without a compiler on the user's machine: numba (which vLLM brings) makes the few instructions that
Python has no words for: call a C function by its address, load and store a 64-bit word with acquire and release order.

Importing this costs about 0.5 s and raises VmmUnavailable without numba. The first use compiles once (about 2 s) into
numba's cache.
"""

from typing import Any

from shared.vmm.errors import VmmUnavailable

try:
    from llvmlite import ir
    from numba import njit, types
    from numba.extending import intrinsic as _intrinsic
except ImportError as error:
    raise VmmUnavailable(f"no numba: {error}") from error

intrinsic: Any = (
    _intrinsic  # its results are called with other arguments than those of the decorated function
)
_WORD: Any = ir.IntType(64)


@intrinsic
def call6(_typing: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    """The C function at the address `function`, with up to six integer arguments.

    Surplus arguments lie in registers that the function does not read (System V on x86-64, AAPCS64), and of a narrower
    result only its own bits are defined.
    """
    return _call_of(6)


@intrinsic
def call8(_typing: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
    """As call6(), with exactly eight: on x86-64 the last two go by the stack."""
    return _call_of(8)


def _call_of(num: int) -> Any:
    """What numba wants to know of a call with so many 64-bit arguments."""
    signature = types.int64(*[types.int64] * (num + 1))

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_WORD, [_WORD] * num)
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return signature, generate


@intrinsic
def load_acquire(_typing: Any, address: Any) -> Any:
    """The aligned 64-bit word at the address; nothing behind the load is done before it."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _WORD.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_release(_typing: Any, address: Any, value: Any) -> Any:
    """Write the aligned 64-bit word at the address; everything before the store is done first."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _WORD.as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


COLUMNS = 8  # of a ring row: op code, address, size, a, b, c, d, unused
DONE, FAILED, HEAD, STOP = 0, 8, 16, 24  # words of the control block, a cache line apart


@njit(nogil=True, cache=True)
def drain_forever(
    ring: Any, control: int, functions: Any, read: int, write: int, wake_fd: int, done_fd: int, buffer: int
) -> int:
    """Execute the ring's rows in order, and sleep in read(wake_fd) without any. Told to stop, it does the rest first.

    Args:
        ring: int64 [num_rows, COLUMNS], a power of two of rows.
        control: address of the control block: words DONE, FAILED, HEAD, STOP.
        functions: int64, addresses by op code.
        read, write: addresses of libc's; wake_fd, done_fd: eventfds; buffer: address of 16 writable bytes.
    Returns: 0, or the result of the call that failed, row in FAILED.
    """
    mask = len(ring) - 1
    tail = load_acquire(control + 8 * DONE)
    store_release(buffer + 8, 1)
    while True:
        head = load_acquire(control + 8 * HEAD)
        while tail < head:
            row = ring[tail & mask]
            code, address, size, a = row[0], row[1], row[2], row[3]
            result = 0
            if code == 1:  # mmap
                result = call6(functions[1], address, size, a, row[4], row[5], row[6])
                failed = result == -1
            else:
                if code == 2:  # cuMemMap(address, size, offset, handle, flags)
                    result = call6(functions[2], address, size, 0, a, 0, 0)
                elif code == 3:  # cuMemSetAccess(address, size, descriptor, count)
                    result = call6(functions[3], address, size, a, 1, 0, 0)
                elif code == 5:  # usleep(microseconds); one that a signal cuts short has paused enough
                    call6(functions[5], address, 0, 0, 0, 0, 0)
                else:  # cuMemUnmap(address, size)
                    result = call6(functions[4], address, size, 0, 0, 0, 0)
                result &= 0xFFFFFFFF
                failed = result != 0
            if failed:
                store_release(control + 8 * FAILED, tail + 1)
                call6(write, done_fd, buffer + 8, 8, 0, 0, 0)
                return result
            tail += 1
            store_release(control + 8 * DONE, tail)
        call6(write, done_fd, buffer + 8, 8, 0, 0, 0)
        if not load_acquire(control + 8 * STOP):
            call6(read, wake_fd, buffer, 8, 0, 0, 0)
        elif load_acquire(control + 8 * HEAD) == tail:  # what came before the word is done, too
            return 0


@njit(cache=True)
def publish(address: int, value: int) -> None:
    """store_release for callers in Python."""
    store_release(address, value)


@njit(cache=True)
def observe(address: int) -> int:
    """load_acquire for callers in Python."""
    return load_acquire(address)
