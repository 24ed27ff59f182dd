"""CUDA C++ compiled at run time. Importing this needs neither the compiler nor a GPU.

cuda.bindings ships with torch; NVRTC's library does too (nvidia-cuda-nvrtc), so that a kernel compiles on a machine
without a GPU.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ResourceError

FLAGS = ("--std=c++17", "-lineinfo")


class CompilerUnavailable(ResourceError):
    """No NVRTC here."""

    code = "kernel.no_compiler"
    retryable = False


class SourceRefused(ResourceError):
    """The compiler refused the source; the message has its log."""

    code = "kernel.source_refused"
    retryable = False


@dataclass(frozen=True, slots=True)
class Binary:
    """What a compilation gave: machine code, and the PTX that it came from."""

    cubin: bytes
    ptx: str


def compile_source(
    source: Path, arch: str, *, defines: Mapping[str, object] | None = None, headers: Sequence[Path] = ()
) -> Binary:
    """Machine code of one file; `arch` as "sm_90a"; `headers`: what it includes, by their names. Needs no GPU.

    Raises: CompilerUnavailable, SourceRefused.
    Cost: 0.1 s to a second.
    """
    try:
        nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise CompilerUnavailable(f"no NVRTC: {(str(error).splitlines() or [''])[0]}") from error
    given = (defines or {}).items()
    options = [f"--gpu-architecture={arch}", *FLAGS, *(f"-D{key}={value}" for key, value in given)]

    def call(name: str, *args: Any) -> Any:
        status, *values = getattr(nvrtc, name)(*args)
        if int(status) != 0:
            raise SourceRefused(f"{name}: {status.name}")
        return values[0] if values else None

    def text(kind: str) -> bytes:
        size = call(f"nvrtcGet{kind}Size", program)
        body = b" " * size
        call(f"nvrtcGet{kind}", program, body)
        return body

    bodies = [header.read_bytes() for header in headers]
    names = [header.name.encode() for header in headers]
    program = call("nvrtcCreateProgram", source.read_bytes(), source.name.encode(), len(names), bodies, names)
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if int(status) != 0:
            log = text("ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise SourceRefused(f"{source.name} for {arch}: {status.name}\n{log}")
        return Binary(text("CUBIN"), text("PTX").rstrip(b"\0").decode())
    finally:
        nvrtc.nvrtcDestroyProgram(program)
