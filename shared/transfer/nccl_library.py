"""libnccl's few calls for a pair, through ctypes: no torch, no collective, every wait with a deadline.

Communicators are made non-blocking (ncclConfig_t.blocking = 0), so that a dead peer cannot hang a call; the state is
asked for (ncclCommGetAsyncError) until it is no longer "in progress". NVLink multicast stays off (NCCL_NVLS_ENABLE=0).
Layout of ncclConfig_t: nccl.h of 2.18, which later libraries accept by its version field.
"""

import ctypes
import importlib.util
from pathlib import Path
from typing import Protocol

from shared.transfer.errors import PathUnavailable, TransferFailed

SUCCESS, IN_PROGRESS = 0, 7
ID_BYTES = 128
UINT8 = 1  # ncclUint8
_MAGIC, _VERSION, _UNDEFINED = 0xCAFEBEEF, 21800, -(2**31)


class NcclLibrary(Protocol):
    """What nccl.py needs; comm and stream are plain integers. Calls raise TransferFailed when NCCL refuses."""

    def unique_id(self) -> bytes:
        """A fresh id of ID_BYTES, for both ends of one communicator."""
        ...

    def open(self, unique_id: bytes, rank: int) -> int:
        """Begin to join; ready() says when both are there."""
        ...

    def ready(self, comm: int) -> bool:
        """Whether the last call has been accepted. Raises: TransferFailed when the communicator broke."""
        ...

    def send(self, comm: int, buffers: list[tuple[int, int]], stream: int) -> None:
        """All (address, bytes) in one group to the other end."""
        ...

    def receive(self, comm: int, buffers: list[tuple[int, int]], stream: int) -> None:
        """All (address, bytes) in one group from the other end."""
        ...

    def abort(self, comm: int) -> None:
        """End the communicator; its kernels stop, its memory is no longer touched when the stream is idle."""
        ...


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * ID_BYTES)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]


class SystemNccl:
    """The libnccl of the nvidia-nccl wheel (which torch brings) or of the system."""

    def __init__(self) -> None:
        """Raises: PathUnavailable."""
        self._nccl = _load()
        for name in ("ncclSend", "ncclRecv"):
            getattr(self._nccl, name).argtypes = (
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_int,
                ctypes.c_int,
                ctypes.c_void_p,
                ctypes.c_void_p,
            )
        self._nccl.ncclCommInitRankConfig.argtypes = (
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_int,
            _UniqueId,
            ctypes.c_int,
            ctypes.POINTER(_Config),
        )
        self._nccl.ncclCommGetAsyncError.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
        self._nccl.ncclCommAbort.argtypes = (ctypes.c_void_p,)
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
        self._ranks: dict[int, int] = {}

    def unique_id(self) -> bytes:
        """See NcclLibrary."""
        found = _UniqueId()
        self._check(self._nccl.ncclGetUniqueId(ctypes.byref(found)), "ncclGetUniqueId")
        return ctypes.string_at(ctypes.byref(found), ID_BYTES)

    def open(self, unique_id: bytes, rank: int) -> int:
        """See NcclLibrary."""
        raw = _UniqueId.from_buffer_copy(unique_id)
        config = _Config(
            ctypes.sizeof(_Config), _MAGIC, _VERSION, 0, *(_UNDEFINED for _ in range(3)), None, _UNDEFINED
        )
        comm = ctypes.c_void_p()
        status = self._nccl.ncclCommInitRankConfig(ctypes.byref(comm), 2, raw, rank, ctypes.byref(config))
        self._check(status, "ncclCommInitRankConfig")
        assert comm.value is not None
        self._ranks[comm.value] = rank
        return comm.value

    def ready(self, comm: int) -> bool:
        """See NcclLibrary."""
        if comm not in self._ranks:
            raise TransferFailed("the pair has been ended")
        state = ctypes.c_int(IN_PROGRESS)
        self._check(self._nccl.ncclCommGetAsyncError(comm, ctypes.byref(state)), "ncclCommGetAsyncError")
        self._check(state.value, "communicator")
        return state.value == SUCCESS

    def send(self, comm: int, buffers: list[tuple[int, int]], stream: int) -> None:
        """See NcclLibrary."""
        self._group(self._nccl.ncclSend, comm, buffers, stream)

    def receive(self, comm: int, buffers: list[tuple[int, int]], stream: int) -> None:
        """See NcclLibrary."""
        self._group(self._nccl.ncclRecv, comm, buffers, stream)

    def abort(self, comm: int) -> None:
        """See NcclLibrary."""
        if self._ranks.pop(comm, None) is not None:
            self._check(self._nccl.ncclCommAbort(comm), "ncclCommAbort")

    def _group(
        self, call: "ctypes._NamedFuncPointer", comm: int, buffers: list[tuple[int, int]], stream: int
    ) -> None:
        other = 1 - self._ranks[comm]
        self._check(self._nccl.ncclGroupStart(), "ncclGroupStart")
        try:
            for address, num_bytes in buffers:
                self._check(call(address, num_bytes, UINT8, other, comm, stream), "ncclSend or ncclRecv")
        finally:
            self._check(self._nccl.ncclGroupEnd(), "ncclGroupEnd")

    def _check(self, status: int, doing: str) -> None:
        if status not in (SUCCESS, IN_PROGRESS):
            text = (self._nccl.ncclGetErrorString(status) or b"?").decode()
            raise TransferFailed(f"{doing}: {text}")


def _load() -> ctypes.CDLL:
    candidates = ["libnccl.so.2"]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        candidates.insert(0, str(Path(folder) / "nccl" / "lib" / "libnccl.so.2"))
    for name in candidates:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise PathUnavailable("libnccl.so.2 is not here; the nvidia-nccl wheel has it")
