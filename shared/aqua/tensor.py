"""AQUA TENSORS: PyTorch tensors whose memory is this device's while they are used, else a peer's, else the host's.

    with Aqua(AquaSettings(...)) as aqua:
        cached = AquaTensor.from_tensor(kv)      # its bytes are on a peer's GPU now, or in host memory: cached.location
        x = cached.to_compute()                  # here, at the address that cached has for life
        cached.offload()                         # x must not be used any more: an access faults
        aqua.step()                              # between two steps of the program's loop

Source: AQUA section 6 (the abstraction, elasticity) and 8 (conversion to and from tensors; moves only between steps).
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shared.aqua.consumer import Aqua
from shared.aqua.open_aquas import the_one
from shared.aqua.pages import Location, Placed


class AquaTensor:
    """Made by from_tensor(). Methods may be called from any thread; what to_compute() returns is the caller's to guard.

    `shape`, `dtype`: of the tensor. close() gives everything back; so does the garbage collector, later, once nothing
    is left of this and of what to_compute() returned.
    """

    def __init__(self, aqua: Aqua, placed: Placed, shape: torch.Size, dtype: torch.dtype) -> None:
        self._aqua, self._placed = aqua, placed
        self.shape, self.dtype = shape, dtype
        weakref.finalize(self, aqua.drop_later, placed).atexit = False

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, aqua: Aqua | None = None) -> "AquaTensor":
        """A copy of the tensor, offloaded. Of any device, strides and type; gradients stay behind.

        Args: aqua: None: the one that is open in this process.
        Raises: OutOfPages when neither peer nor host memory has room, or this device's share for tensors in use is too
            small to pass it through; InvalidRequest for an empty tensor; PeerGone without mempool.
        Cost: one copy here, one by the mempool.
        """
        found = aqua or the_one()
        num_bytes = tensor.numel() * tensor.dtype.itemsize
        with found.making(num_bytes) as placed:
            made = cls(
                found, placed, tensor.shape, tensor.dtype
            )  # here: nothing of it is left by an interrupt
            found.view(placed, tensor.shape, tensor.dtype).copy_(tensor.detach())
        return made

    @property
    def location(self) -> Location:
        """'local', 'peer' or 'dram', where its slowest page is. Cost: no call."""
        return self._aqua.location(self._placed)

    @property
    def address(self) -> int:
        """Of its first byte whenever it is local: the same for life."""
        return self._aqua.address(self._placed)

    def to_compute(self) -> torch.Tensor:
        """This device's, with its bytes: the same memory each time, until offload(). Writes to it stay.

        Raises: OutOfPages when this device's share for tensors in use is full (offload others); TensorLost; PeerGone.
        Cost: the mempool's copy, and mapping the pages; nothing when it is local already.
        """
        self._aqua.fetch(self._placed)
        return self._aqua.view(self._placed, self.shape, self.dtype, owner=self)

    def offload(self, *, changed: bool = True) -> None:
        """Done for now: its bytes go to a peer, else to host memory, and what to_compute() returned faults.

        Args: changed: False when nothing was written since to_compute(): then no byte moves, unless what is elsewhere
            was lost, or an offload() before this one failed.
        Raises: as to_compute(); then it is still local. Nothing happens when it is offloaded.
        """
        self._aqua.store(self._placed, changed=changed)

    @contextmanager
    def compute(self, *, changed: bool = True) -> Iterator[torch.Tensor]:
        """to_compute() for a block of code, offload() behind it, also where the block raises: what it raised is heard,
        with a note where the tensor could not be offloaded.
        """
        tensor = self.to_compute()
        try:
            yield tensor
        except BaseException as raised:
            try:
                self.offload(changed=changed)
            except Exception as error:  # noqa: BLE001  the device's, too, of which the block's may have come
                raised.add_note(f"and the tensor could not be offloaded: {error!r}")
            raise
        self.offload(changed=changed)

    def close(self) -> None:
        """Gives all of its memory back, wherever it is. Idempotent.

        What to_compute() returned must not be used any more: it faults, until its addresses are another tensor's. They
        are handed out in turn (AquaSettings.address_bytes): rarely soon, but nothing prevents it.
        """
        self._aqua.drop(self._placed)

    def __enter__(self) -> "AquaTensor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
