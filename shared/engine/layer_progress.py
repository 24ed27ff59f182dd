"""How far the step is, as a rank says it in its layer word (shared/kv/layer_words.py).

Each attention layer's implementation is followed: when its call returns, the step's keys and values of that layer are
in the cache (CPU), or will be when the stream gets there. A GPU therefore writes the word itself, in stream order
behind the layer's kernels, into host memory that it has mapped; its default write waits for all earlier ones, so
whoever reads the word may read the layer. Nothing is written but from within a layer, because only there the current
stream is certainly the one that computes. Captured graphs are not followed: that such a step is over, the mempool hears
when the engine core does (LayersSealed).
"""

import mmap
import os
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol

import torch

from shared.errors import ResourceError
from shared.kv.layer_words import MEMORY_BYTES, layer_word
from shared.vmm.words import Words


class Word(Protocol):
    """Where a rank says how far it is."""

    def write(self, value: int) -> None:
        """Behind everything that the caller has done, or has given to the current stream."""
        ...


class HostWord:
    """Written by the CPU. Takes over `fd`. Raises: OSError."""

    def __init__(self, fd: int) -> None:
        self.memory = mmap.mmap(fd, MEMORY_BYTES)
        os.close(fd)
        self._words = Words(self.memory, 1)

    def write(self, value: int) -> None:
        """See Word."""
        self._words.store(0, value)


class DeviceWord:
    """Written by a GPU, in the order of its current stream; page-locked for the life of the process.

    Raises: OSError; ResourceError when the driver refuses.
    Cost: 2 to 3 us of the calling thread a write.
    """

    def __init__(self, fd: int, device: torch.device) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        self._device = device
        self._host = HostWord(fd)
        torch.cuda.current_stream(device)  # the context exists and is current from here on
        address = torch.frombuffer(self._host.memory, dtype=torch.int64).data_ptr()
        flags = driver.CU_MEMHOSTREGISTER_DEVICEMAP | driver.CU_MEMHOSTREGISTER_PORTABLE
        self._call("cuMemHostRegister", address, MEMORY_BYTES, flags)
        self._at = self._call("cuMemHostGetDevicePointer", address, 0)

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            raise ResourceError(f"layer words: {name}: {status.name}")
        return results[0] if results else None

    def write(self, value: int) -> None:
        """See Word. Left out while a graph is captured, which would replay it."""
        if torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._call("cuStreamWriteValue64", stream, self._at, value, 0)


class LayerProgress:
    """One rank's. Everything on the thread that runs the model."""

    def __init__(self, word: Word) -> None:
        self._word = word
        self._step = 0  # under way; 0: none
        self._last_step = 0
        self._next = 0  # layer, in the order of the page

    def follow(self, implementations: Sequence[Any]) -> None:
        """Once: `implementations` of attention, in the order in which their layers lie in a page."""
        for layer, implementation in enumerate(implementations):
            implementation.forward = self._followed(implementation.forward, layer)

    def _followed(self, forward: Callable[..., Any], layer: int) -> Callable[..., Any]:
        @wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            if self._step and layer == self._next:  # out of order, it is heard of when the step is over
                self._next += 1
                self._word.write(layer_word(self._step, self._next))
            return result

        return call

    def begin(self, step: int) -> None:
        """The step is about to run. Steps that were seen before (empty ones) are not followed."""
        if step > self._last_step:
            self._step = self._last_step = step
            self._next = 0

    def end(self) -> None:
        """The model ran, or was given to the stream. What calls its layers now is no step's."""
        self._step = 0


def open_word(fd: int, device: torch.device) -> Word:
    """The rank's. Takes over `fd`. Raises: OSError, ResourceError."""
    return HostWord(fd) if device.type == "cpu" else DeviceWord(fd, device)
