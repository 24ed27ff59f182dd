"""The tokens that the mock engine makes: a pure function of prompt, choice and seed; the tests' oracle.

    state = blake2b-64(prompt as u32 LE || seed as i64 LE || choice as u32 LE)
    token k of the choice = visible[splitmix64(state + k) mod len(visible)]

`visible` are the first VISIBLE_IDS ids of a stride through the vocabulary that stand for printable text on
their own: no special token, no half of a UTF-8 character, so that every prefix of an answer detokenizes.
A greedy request counts as seed -1. Nothing here depends on where or in how many stages a request ran.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from shared.kv.block_hash import pack_tokens
from shared.kv.model_files import eos_token_ids, vocab_size

VISIBLE_IDS = 512
_MASK = (1 << 64) - 1


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _visible_ids(model_dir: str, size: int, eos: Sequence[int]) -> list[int]:
    path = Path(model_dir, "tokenizer.json")
    stride = max(1, size // (4 * VISIBLE_IDS))
    order = [i for start in range(stride) for i in range(start, size, stride) if i not in eos]
    if not path.is_file():
        return order[:VISIBLE_IDS]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    special = set(tokenizer.get_added_tokens_decoder())
    found: list[int] = []
    for token_id in order:
        text = "" if token_id in special else tokenizer.decode([token_id])
        if text.strip() and text.isprintable() and "\ufffd" not in text:
            found.append(token_id)
            if len(found) == VISIBLE_IDS:
                break
    return found or order[:VISIBLE_IDS]


class MockVocabulary:
    """Which ids the mock makes for one model folder."""

    def __init__(self, visible: Sequence[int], eos: int) -> None:
        if not visible:
            raise ValueError("a vocabulary without visible ids")
        self.visible = list(visible)
        self.eos = eos  # what an answer that ends by itself ends with

    @classmethod
    def of_model(cls, model_dir: str) -> "MockVocabulary":
        """Needs config.json; tokenizer.json narrows the ids to printable ones. Cost: 0.1 s."""
        size, eos = vocab_size(model_dir), eos_token_ids(model_dir)
        return cls(_visible_ids(model_dir, size, eos), eos[0] if eos else 0)

    def state(self, prompt: Sequence[int], choice: int = 0, seed: int | None = None) -> int:
        """Where the sequence of one choice begins; see token()."""
        seed_bytes = (-1 if seed is None else seed & (_MASK >> 1)).to_bytes(8, "little", signed=True)
        data = pack_tokens(prompt) + seed_bytes + choice.to_bytes(4, "little")
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

    def token(self, state: int, position: int) -> int:
        """Output token `position` (0 is the first) of a choice."""
        return self.visible[_splitmix64(state + position) % len(self.visible)]

    def tokens(
        self, prompt: Sequence[int], num_tokens: int, *, choice: int = 0, seed: int | None = None
    ) -> list[int]:
        """The oracle: the first num_tokens output tokens."""
        state = self.state(prompt, choice, seed)
        return [self.token(state, k) for k in range(num_tokens)]
