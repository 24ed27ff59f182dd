"""The few calls of NIXL that transfers need, with its errors as ours. One agent per process, one thread for all calls.

nixl_cu13 1.5.1: without its progress thread (which burns a core), never its pickled descriptors, one registration per
region. It needs neither torch nor a CUDA driver for host memory.
"""

import gc
import importlib
import secrets
import weakref
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from shared.transfer.errors import PathUnavailable, PeerLost, TransferError, TransferFailed
from shared.transfer.pieces import U64

MAX_NAME = 64


class NixlAgent:
    """Owns the agent until close(); nothing is called after it."""

    def __init__(self, instance: str) -> None:
        """Raises: PathUnavailable without the library or its UCX plug-in."""
        try:
            self._nixl: Any = importlib.import_module("nixl_cu13")
            self._errors: Any = importlib.import_module("nixl_cu13._bindings")
        except (ImportError, OSError) as error:
            raise PathUnavailable(f"NIXL is not installed: {error}; install nixl-cu13==1.5.1") from error
        # A name of its own for every process: a restarted peer is another agent, so nothing of the old one matches.
        self.name = f"{instance[:MAX_NAME]}.{secrets.token_hex(6)}"
        try:
            config = self._nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = self._nixl.nixl_agent(self.name, config)
            self._raw: weakref.ref[Any] | None = None
        except Exception as error:
            raise PathUnavailable(f"NIXL does not start: {error}") from error
        if "UCX" not in self._agent.backends:
            raise PathUnavailable("NIXL has no UCX plug-in here")
        self.library = _library()

    def translate(self, error: Exception, doing: str) -> TransferError:
        """NIXL's exception as ours."""
        if isinstance(error, self._errors.nixlRemoteDisconnectError):
            return PeerLost(f"{doing}: the connection is gone")
        return TransferFailed(f"{doing}: {error}")

    def register(self, address: int, num_bytes: int, device: int) -> Any:
        """Pin a region for UCX; the handle goes to deregister. Raises: PathUnavailable."""
        memory = "DRAM" if device < 0 else "VRAM"
        try:
            return self._agent.register_memory([(address, num_bytes, max(0, device), "")], memory)
        except Exception as error:
            raise PathUnavailable(f"UCX cannot register {num_bytes} bytes of {memory}: {error}") from error

    def deregister(self, handle: Any) -> None:
        """Of register."""
        self._agent.deregister_memory(handle)

    def metadata(self) -> bytes:
        """For add_peer at the other end: addresses and keys of what is registered now."""
        return self._agent.get_agent_metadata()

    def add_peer(self, metadata: bytes) -> str:
        """The peer's agent name. Raises: TransferFailed when NIXL cannot read it.

        UCX reads its part without mercy: a byte that is not as its peer wrote it can end the process (SIGABRT).
        """
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise self.translate(error, "reading the peer's NIXL metadata") from error
        return name.decode() if isinstance(name, bytes) else name

    def connect(self, peer: str) -> None:
        """Begin to connect; UCX does it in progress(). Raises: TransferError."""
        try:
            self._agent.make_connection(peer)
        except Exception as error:
            raise self.translate(error, "connecting") from error

    def remove_peer(self, peer: str) -> None:
        """Disconnect: nothing of the peer can write here afterwards. Harmless when it is gone already."""
        try:
            self._agent.remove_remote_agent(peer)
        except Exception as error:
            if not isinstance(error, self._errors.nixlNotFoundError):
                raise self.translate(error, "disconnecting") from error

    def close(self) -> bool:
        """Destroy the agent: its connections are closed, so nothing can arrive in the registered memory any more (but
        for CMA between processes of one host, which needs no connection). False: something still holds it.
        """
        agent, self._agent = self._agent, None
        if agent is not None:
            self._raw = weakref.ref(agent.agent)
        del agent
        if self._raw is not None and self._raw() is not None:
            gc.collect()
        return self._raw is None or self._raw() is None

    def progress(self) -> None:
        """UCX's own work, for transfers in both directions. Notifications are not used."""
        self._agent.get_new_notifs()

    def begin(
        self,
        *,
        write: bool,
        local: U64,
        local_device: int,
        remote: U64,
        remote_device: int,
        sizes: U64,
        peer: str,
    ) -> "NixlTransfer":
        """Start to copy. Blocks for the copy itself where UCX copies with the CPU (CMA). Raises: TransferError, where
        nothing was begun; what failed halfway and may still run is returned, and fails when it is polled."""
        doing = "writing to" if write else "reading from"
        handle = None
        try:
            mine = self._agent.get_xfer_descs(*_rows(local, sizes, local_device))
            theirs = self._agent.get_xfer_descs(*_rows(remote, sizes, remote_device))
            handle = self._agent.initialize_xfer("WRITE" if write else "READ", mine, theirs, peer)
            state = self._agent.transfer(handle)
        except Exception as error:
            failure = self.translate(error, f"{doing} {peer}")
            if handle is not None:
                failed = NixlTransfer(self, self._agent, handle, "ERR", failure)
                if not failed.release():
                    return failed
            raise failure from error
        return NixlTransfer(self, self._agent, handle, state)


def _library() -> str:
    """NIXL and its version, which says that of the UCX inside, too. "": it was not installed as a package."""
    try:
        return f"nixl {version('nixl-cu13')}"
    except PackageNotFoundError:
        return ""


def _rows(addresses: U64, sizes: U64, device: int) -> tuple[np.ndarray, str]:
    devices = np.full(addresses.size, max(0, device), np.uint64)
    return np.ascontiguousarray(
        np.stack([addresses, sizes, devices], axis=1)
    ), "DRAM" if device < 0 else "VRAM"


class NixlTransfer:
    """One started request. Its memory stays in use until `over`."""

    def __init__(
        self, agent: NixlAgent, raw_agent: Any, handle: Any, state: str, failure: TransferError | None = None
    ) -> None:
        """`failure`: why it is in "ERR"; said by the first poll()."""
        self._agent = agent
        self._raw = raw_agent
        self._handle = handle
        self._state = state
        self._failure = failure
        self._released = False

    def poll(self) -> bool:
        """True when every byte is in place, at the other end too. Raises: TransferError when it failed."""
        if self._state == "PROC":
            try:
                self._state = self._raw.check_xfer_state(self._handle)
            except Exception as error:
                self._state = "ERR"
                self.release()
                raise self._agent.translate(error, "transfer") from error
        if self._state == "ERR":
            self.release()
            failure, self._failure = self._failure, None
            raise failure or TransferFailed("NIXL reports an error")
        if self._state == "DONE":
            self.release()
            return True
        return False

    @property
    def over(self) -> bool:
        """Whether nothing of it can write any more."""
        return self._released

    def release(self) -> bool:
        """Give the request back; True when NIXL agreed, which in flight it does only after the peer was removed."""
        if not self._released:
            try:
                self._handle.release()
            except Exception:  # noqa: BLE001  still in flight, says NIXL: ask again later
                return False
            self._released = True
        return True
