"""PD-Basic and PD-Caching-1, -2, -3: who names which blocks when, what is sent back, what is let go. No I/O.

MemServe 5.1, Table 4. "P" is the prefill end, "D" the decode end; a block is full, a tail is a partial last block.

| mode  | after prefill P names | handoff              | then P lets go | D, while it decodes or at its end  |
|-------|-----------------------|----------------------|----------------|------------------------------------|
| basic | nothing               | transfer             | of all         | names nothing, lets go of all      |
| 1     | the prompt's blocks   | transfer             | of all         | names nothing, lets go of all      |
| 2     | the prompt's blocks   | transfer_with_insert | of all         | names what it completed, lets go   |
| 3     | the prompt's blocks   | transfer_with_insert | of all         | as 2, and sends that back to P by  |
|       |                       |                      |                | transfer_with_insert               |

"Let go" of a block that is named is to unpin it, of one that is not, to free it. The block in which the prompt ends
is completed by D, so D names it and sends it back. The last sampled token has no KV. Sending back needs no step of
the prefill engine: its mempool pulls. Where both ends are one space (one host, one GPU) every transfer finds its
blocks there already: nothing moves, and then P also hits what D named in mode 2.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from shared.errors import InvariantBroken

End = Literal["prefill", "decode"]


class PdCaching(StrEnum):
    """The setting `pd_caching`."""

    BASIC = "basic"
    PREFILL = "1"
    BOTH = "2"
    FULL = "3"


@dataclass(frozen=True, slots=True)
class Name:
    """Insert blocks first to last (exclusive) of the request into the end's index."""

    end: End
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """P -> D: all blocks of the prompt, and its tail if there is one. `insert`: transfer_with_insert."""

    num_blocks: int
    with_tail: bool
    insert: bool


@dataclass(frozen=True, slots=True)
class PushBack:
    """D -> P, by transfer_with_insert: blocks first to last (exclusive). It may fail: P computes them then."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class LetGo:
    """The end uses these no more. `last` None: with the tail, if there is one."""

    end: End
    first: int
    last: int | None = None


PdAction = Name | HandOver | PushBack | LetGo


@dataclass(slots=True)
class PdRequest:
    """One request's KV at its two ends. Methods return what to do, in order; none does a thing twice.

    Args:
        prompt_tokens: > 0.
        eager_blocks: in mode 3 D names and sends back as soon as so many blocks are complete; 0: at the end.
    """

    mode: PdCaching
    block_tokens: int
    prompt_tokens: int
    eager_blocks: int = 0
    _prefilled: bool = False
    _at_prefill: bool = False  # P still holds its pages
    _at_decode: bool = False  # D holds pages
    _num_sent_back: int = 0  # leading blocks that P has, or was sent
    _num_named: int = 0  # leading blocks that D has named
    _over: bool = False

    def __post_init__(self) -> None:
        if self.prompt_tokens <= 0 or self.block_tokens <= 0 or self.eager_blocks < 0:
            raise InvariantBroken(
                f"a request of {self.prompt_tokens} tokens in blocks of {self.block_tokens}"
            )

    @property
    def num_prompt_blocks(self) -> int:
        """Full blocks of the prompt."""
        return self.prompt_tokens // self.block_tokens

    @property
    def has_tail(self) -> bool:
        """Whether the prompt ends within a block."""
        return self.prompt_tokens % self.block_tokens > 0

    def on_prefill_done(self, *, finished: bool = False) -> list[PdAction]:
        """P has the prompt's KV. `finished`: the first token ends the request, nothing is handed over."""
        if self._prefilled or self._over:
            return []
        self._prefilled = self._at_prefill = True
        out: list[PdAction] = []
        if self.mode is not PdCaching.BASIC:
            if self.num_prompt_blocks:
                out.append(Name("prefill", 0, self.num_prompt_blocks))
            self._num_sent_back = self.num_prompt_blocks
        if finished:
            return out + self.on_over()
        insert = self.mode in (PdCaching.BOTH, PdCaching.FULL)
        return [*out, HandOver(self.num_prompt_blocks, self.has_tail, insert)]

    def on_handed_over(self) -> list[PdAction]:
        """D has every byte: the handoff's answer."""
        if not self._at_prefill or self._over:
            return []
        self._at_prefill, self._at_decode = False, True
        if self.mode in (PdCaching.BOTH, PdCaching.FULL):
            self._num_named = self.num_prompt_blocks
        return [LetGo("prefill", 0)]

    def on_decoded(self, output_tokens: int) -> list[PdAction]:
        """D has sampled so many tokens. In mode 3, when enough blocks are complete, they are sent back now."""
        if self.mode is not PdCaching.FULL or not self.eager_blocks or not self._at_decode:
            return []
        if self._num_complete(output_tokens) - self._num_sent_back < self.eager_blocks:
            return []
        return self._keep(output_tokens)

    def on_decode_done(self, output_tokens: int) -> list[PdAction]:
        """The request is finished at D, well or by an abort: what is complete is worth keeping all the same."""
        if not self._at_decode or self._over:
            return []
        keeps = self.mode in (PdCaching.BOTH, PdCaching.FULL)
        return [*(self._keep(output_tokens) if keeps else []), *self.on_over()]

    def on_over(self) -> list[PdAction]:
        """The request ends without (more) output: a failure at either end, or no handoff. Both ends let go."""
        if self._over:
            return []
        self._over = True
        out: list[PdAction] = []
        if self._at_prefill:
            out.append(LetGo("prefill", 0))
        if self._at_decode:
            out.append(LetGo("decode", 0))
        self._at_prefill = self._at_decode = False
        return out

    def _num_complete(self, output_tokens: int) -> int:
        """Full blocks with KV of every token."""
        return (self.prompt_tokens + max(0, output_tokens - 1)) // self.block_tokens

    def _keep(self, output_tokens: int) -> list[PdAction]:
        out: list[PdAction] = []
        end = self._num_complete(output_tokens)
        if end > self._num_named:
            out.append(Name("decode", self._num_named, end))
            self._num_named = end
        if self.mode is PdCaching.FULL and end > self._num_sent_back:
            out.append(PushBack(self._num_sent_back, end))
            self._num_sent_back = end
        return out
