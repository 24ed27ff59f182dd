"""Parts of a prompt into token ids or words: seeded, by position, the same in every process.

Token i of a content is a hash of (content, i), so that any run of it can be made without what comes before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadtest.workloads.request import Answer, Part, Segment, content_id

_WORDS = (
    Path(__file__).parents[1].joinpath("prompts.txt").read_text().replace("?", "").replace(".", " ").split()
)
_GOLDEN, _MIX_A, _MIX_B = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Ids from `first` to below `end`: inside the model's vocabulary and outside its special tokens."""

    first: int = 256
    end: int = 4096

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end - 1:
            raise ValueError(f"token ids {self.first} to {self.end} are no range; try 256:4096")


def pseudo_tokens(content: int, num_tokens: int, ids: TokenRange, *, offset: int = 0) -> np.ndarray:
    """int64 [num_tokens]. Cost: about 10 ns a token (splitmix64 over positions)."""
    with np.errstate(over="ignore"):
        at = np.arange(offset + 1, offset + num_tokens + 1, dtype=np.uint64)
        z = np.uint64(content) + at * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _MIX_A
        z = (z ^ (z >> np.uint64(27))) * _MIX_B
        z = z ^ (z >> np.uint64(31))
    return (z % np.uint64(ids.end - ids.first)).astype(np.int64) + ids.first


def planned_answer(answer: Answer) -> Segment:
    """What stands for an answer that nobody gave: in traces, and where histories are not the real ones."""
    return Segment(content_id("answer", answer.of), answer.num_tokens)


def prompt_ids(
    prompt: Sequence[Part], ids: TokenRange, *, answered: Callable[[int], Sequence[int] | None] | None = None
) -> list[int]:
    """Token ids of a prompt.

    Args: answered: token ids that request n was really answered, of which the part's num_tokens are taken; None there:
    the planned pseudo-tokens.
    """
    out: list[int] = []
    for part in prompt:
        if isinstance(part, Answer):
            real = answered(part.of) if answered is not None else None
            if real is not None:
                out += real[: part.num_tokens]
                continue
            part = planned_answer(part)
        out += pseudo_tokens(part.content, part.num_tokens, ids, offset=part.offset).tolist()
    return out


def words(segment: Segment) -> str:
    """About a token a word, for servers that take text only."""
    picks = pseudo_tokens(
        segment.content, segment.num_tokens, TokenRange(0, len(_WORDS)), offset=segment.offset
    )
    return " ".join(_WORDS[index] for index in picks)


def _first_words(text: str, most: int) -> str:
    """The same text where it has no more."""
    found = text.split(maxsplit=most)
    return text if len(found) <= most else text[: -len(found[most])].rstrip()


def messages(
    prompt: Sequence[Part], *, answered: Callable[[int], str | None] | None = None
) -> list[dict[str, str]]:
    """A prompt as chat messages: answers are the assistant's, all between them is one user message.

    Args: answered: what request n was really answered, of which as many words are taken as the part has tokens.
    """
    out: list[dict[str, str]] = []
    for part in prompt:
        if isinstance(part, Answer):
            real = answered(part.of) if answered is not None else None
            content = words(planned_answer(part)) if real is None else _first_words(real, part.num_tokens)
            out.append({"role": "assistant", "content": content})
        elif out and out[-1]["role"] == "user":
            out[-1]["content"] += " " + words(part)
        else:
            out.append({"role": "user", "content": words(part)})
    return out
