"""A process that crashes ends at once, and its log says where it was: `die_when_crashed()`."""

import ctypes
import faulthandler
import importlib.util
import signal
import threading
from pathlib import Path

STDERR = 2  # by number: whatever is the process' log by then


def die_when_crashed() -> None:
    """Python's stacks of all threads go to standard error, and the signal ends the process.

    Does nothing but in a main thread. vLLM's grammars load a library (TVM FFI) whose own handler of SIGSEGV allocates
    memory: one that comes within malloc() then waits for ever for the lock that it holds, and nobody is told of the
    death. It is loaded here, 17 ms, so that the last word is not its.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # nobody else may set handlers
    spec = importlib.util.find_spec("tvm_ffi")
    for folder in (spec and spec.submodule_search_locations) or ():
        library = Path(folder, "lib", "libtvm_ffi.so")
        if library.is_file():
            ctypes.CDLL(str(library))
    faulthandler.disable()  # or it would hand on to whom it found
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    faulthandler.enable(file=STDERR)
