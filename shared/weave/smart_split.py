"""Where a step's tokens are cut in two: the parts take no more waves than the whole (TokenWeave 3.1). No I/O."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from shared.weave.waves import Gemm


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """Tokens [0, first) and [first, first + second) of a step.

    `waves` of the whole and `extra_waves` of the parts beyond it, both over all products of a layer;
    `extra_ratio`: what the extra waves cost, of what all waves of the whole do.
    """

    first: int
    second: int
    waves: int
    extra_waves: int
    extra_ratio: float


@dataclass(frozen=True, slots=True)
class SplitRules:
    """Args:
    num_sms: multiprocessors that compute has, those of a communication kernel taken off.
    least_share: of the tokens, in either part. One part's communication hides under the other's compute while
        share / (1 - share) is at least communication over compute: 0.25 is enough up to one third.
    max_extra_ratio: 0: the waves never grow, and what cannot be cut so is not cut.
    """

    num_sms: int
    least_share: float = 0.25
    max_extra_ratio: float = 0.0

    def __post_init__(self) -> None:
        """Raises: ValueError naming the rule."""
        if self.num_sms < 1:
            raise ValueError(f"num_sms: {self.num_sms}")
        if not 0.0 < self.least_share <= 0.5:
            raise ValueError(f"least_share: {self.least_share} is not in (0, 0.5]")
        if not 0.0 <= self.max_extra_ratio <= 1.0:
            raise ValueError(f"max_extra_ratio: {self.max_extra_ratio} is no share")


class SmartSplit:
    """Chooses the cut for any number of tokens. Same arguments, same answer: every rank cuts at the same token.

    Args: gemms: the products of one layer on one rank.
    """

    def __init__(self, gemms: Sequence[Gemm], rules: SplitRules) -> None:
        """Raises: ValueError without products."""
        if not gemms:
            raise ValueError("no products to cut")
        self._gemms = tuple(gemms)
        self._rules = rules
        step = lcm(*(gemm.tile.tokens for gemm in gemms))
        self._step = step if step <= LARGEST_STEP else max(gemm.tile.tokens for gemm in gemms)
        self._found: dict[int, TokenSplit | None] = {}

    def choose(self, num_tokens: int) -> TokenSplit | None:
        """The cut with the cheapest extra waves, of those the most equal one; None: leave the step whole.

        Cuts lie between tiles, so that no tile is computed twice, unless tiles are too odd for that. Cost: at most
        num_tokens / tile tokens cuts are looked at, the first time; most often the first one without an extra wave is
        near the middle.
        """
        if num_tokens not in self._found:
            if len(self._found) >= MAX_REMEMBERED:
                self._found.clear()
            self._found[num_tokens] = self._choose(num_tokens)
        return self._found[num_tokens]

    def _choose(self, num_tokens: int) -> TokenSplit | None:
        sms = self._rules.num_sms
        whole = [gemm.waves(num_tokens, sms) for gemm in self._gemms]
        whole_cost = sum(waves * gemm.wave_cost for waves, gemm in zip(whole, self._gemms, strict=True))
        best: TokenSplit | None = None
        for first in self._cuts(num_tokens):
            second = num_tokens - first
            extra = [
                gemm.waves(first, sms) + gemm.waves(second, sms) - waves
                for waves, gemm in zip(whole, self._gemms, strict=True)
            ]
            cost = sum(waves * gemm.wave_cost for waves, gemm in zip(extra, self._gemms, strict=True))
            ratio = cost / whole_cost
            if best is None or ratio < best.extra_ratio:
                best = TokenSplit(first, second, sum(whole), sum(extra), ratio)
                if not cost:
                    break
        if best is None or best.extra_ratio > self._rules.max_extra_ratio:
            return None
        return best

    def _cuts(self, num_tokens: int) -> Iterator[int]:
        """Between tiles, from the most equal to the least equal one, the shorter first part before its mirror."""
        step, least = self._step, self._rules.least_share * num_tokens
        down = num_tokens // 2 // step * step
        up = down + step
        while True:
            down_fits = down > 0 and min(down, num_tokens - down) >= least
            up_fits = up < num_tokens and min(up, num_tokens - up) >= least
            if not down_fits and not up_fits:
                return
            if down_fits and (not up_fits or num_tokens - 2 * down <= 2 * up - num_tokens):
                yield down
                down -= step
            else:
                yield up
                up += step


LARGEST_STEP = 1024  # tokens between two cuts that are looked at
MAX_REMEMBERED = 4096  # sizes of steps; forgotten all at once
