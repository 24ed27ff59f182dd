"""What an engine of a role does where nobody said it: weave, fuse, or vLLM's own way, by measured times. No I/O.

Prefill workers weave from the threshold on and decode workers fuse (TokenWeave 4.2.2), each where it wins over vLLM as
it would be without us. Rows of fewer than LEAST_PROMPT_TOKENS tokens are decode steps, of so many requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shared.weave.threshold import MARGIN_RATIO, Timing, decide

LEAST_PROMPT_TOKENS = 512
Role = Literal["prefill", "decode", "colocated"]


@dataclass(frozen=True, slots=True)
class Choice:
    """`fuse_min_tokens`: steps from there on are fused; `full_min_tokens`: from there on woven, 0: none."""

    mode: Literal["fuse", "full"]
    fuse_min_tokens: int
    full_min_tokens: int = 0


def choose(timings: Sequence[Timing], role: Role) -> Choice | None:
    """None: vLLM's own way is as fast, or nothing is known.

    Who computes prompts and answers in one engine takes what prompts gain only where no decode step loses by it.
    """
    prompts = [timing for timing in timings if timing.num_tokens >= LEAST_PROMPT_TOKENS]
    answers = [timing for timing in timings if timing.num_tokens < LEAST_PROMPT_TOKENS]
    if role == "decode":
        fuse = decide(answers).fuse_min_tokens
        return Choice("fuse", fuse) if fuse else None
    if role == "colocated" and any(t.fuse_us > (1.0 + MARGIN_RATIO) * t.off_us for t in answers):
        return None
    rule = decide(prompts)
    if rule.full_min_tokens:
        return Choice("full", rule.fuse_min_tokens or rule.full_min_tokens, rule.full_min_tokens)
    return Choice("fuse", rule.fuse_min_tokens) if rule.fuse_min_tokens else None


def in_words(choice: Choice | None) -> str:
    """For a line of the log."""
    if choice is None:
        return "vLLM's own all-reduce and norm are used: fusing and weaving win nothing here"
    woven = f", in two parts from {choice.full_min_tokens} on" if choice.full_min_tokens else ""
    return f"steps are fused from {choice.fuse_min_tokens} tokens on{woven}"
