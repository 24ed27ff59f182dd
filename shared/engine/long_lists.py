"""A long prompt's ids are packed once, and nobody looks at each of them again.

vLLM passes a prompt around as a list: as JSON's cousin to its core, element by element into hashes, and with
torch.tensor() into the GPU's tables, 5 to 9 ms for 100K ids on the engine core's one thread. Here a long prompt goes to
the core as the bytes in which the gateway sent it, is a list there that keeps these bytes (TokenIds), and is copied
from them. What is in a list alone (a prompt that is computed again behind its output) NumPy reads, in 2 to 4 ms.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from shared.kv.block_hash import unpack_tokens

FROM_LENGTH = 256  # below it there is nothing for NumPy to gain beside what the copy costs
_ID = np.dtype("<i4")


class TokenIds(list[int]):
    """A prompt's ids; `packed` are the first of them, all that it was made of, as u32.

    vLLM appends the output to a copy: what `packed` does not cover is in the list alone.
    """

    __slots__ = ("packed",)

    def __init__(self, packed: bytes, ids: Iterable[int] | None = None) -> None:
        super().__init__(unpack_tokens(packed) if ids is None else ids)
        self.packed = packed

    def copy(self) -> "TokenIds":
        """A list that may grow."""
        return TokenIds(self.packed, self)

    def __reduce__(self) -> tuple[Any, ...]:
        """To a rank in a process of its own."""
        return _grown, (self.packed, self[len(self.packed) // _ID.itemsize :])

    @property
    def is_whole(self) -> bool:
        """Nothing was appended."""
        return len(self) * _ID.itemsize == len(self.packed)


def _grown(packed: bytes, rest: list[int]) -> TokenIds:
    out = TokenIds(packed)
    out.extend(rest)
    return out


class StagedIds:
    """What vLLM's StagedWriteTensor gathers until it is written, of ids: in place of its list."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, ids: list[int]) -> None:
        """A list's. Raises: OverflowError for an id that is no int32."""
        if isinstance(ids, TokenIds) and ids.is_whole:
            self._add(np.frombuffer(ids.packed, dtype=_ID))
        else:
            self._add(np.array(ids, dtype=_ID))

    def append(self, token_id: int) -> None:
        """A list's."""
        self.extend([token_id])

    def clear(self) -> None:
        """A list's."""
        self._parts, self._length = [], 0

    def array(self) -> np.ndarray:
        """A copy of all."""
        return np.concatenate(self._parts)

    def _add(self, part: np.ndarray) -> None:
        self._parts.append(part)
        self._length += len(part)


def read_long_lists_by_numpy() -> None:
    """From now on in this process, whose worker has its device: the CPU's replaces this function as well. A second call
    changes nothing.
    """
    from vllm.v1.worker.gpu import buffer_utils

    stock = buffer_utils.async_tensor_h2d
    if getattr(stock, "reads_by_numpy", False):
        return

    def async_tensor_h2d(
        data: Any, device: str | torch.device, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """vLLM's: the same tensor of the same list. Raises: OverflowError for an id that is no int32 (in a short list
        torch's RuntimeError).
        """
        if type(data) is StagedIds:
            data = data.array()
        elif dtype is torch.int32 and type(data) is list and len(data) >= FROM_LENGTH:
            data = np.array(data, dtype=np.int32)
        return stock(data, device=device, dtype=dtype)

    async_tensor_h2d.reads_by_numpy = True  # type: ignore[attr-defined]
    buffer_utils.async_tensor_h2d = async_tensor_h2d


def stage_ids_packed(model_runner: Any) -> None:
    """The runner's table of all ids takes prompts as they are packed; the CPU's runner has none. Behind
    read_long_lists_by_numpy(), before the first request.
    """
    states = getattr(model_runner, "req_states", None)
    if states is None:
        return
    table = states.all_token_ids
    assert table.dtype is torch.int32
    assert not table._staged_write_contents
    table._staged_write_contents = StagedIds()
