"""Lengths, arrivals and sharing of published production traces, as quantiles; `like_*` make requests of that kind.

Azure LLM inference 2023 (Patel et al., ISCA'24, CC-BY-4.0) and Mooncake (Qin et al., FAST'25, Apache-2.0). Quantiles
with many knots were computed from the files, the others are the published ones. The files are not part of this
repository: trace_files.py reads them, and the tests compare where they are given.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtest.workloads.arrivals import Arrivals, Gamma, OnOff, Poisson, Quantised
from loadtest.workloads.distributions import Distribution, Draws, Knots, Linear, Lognormal
from loadtest.workloads.request import Part, Request, Segment, content_id, first_tokens

FIVES = (0.01, *(n / 20 for n in range(1, 20)), 0.99)
THREES = (0.001, *(n / 100 for n in range(2, 100, 3)), 0.99, 0.999)

AZURE_CONV_PROMPT = Knots(
    THREES,
    (8, 91, 181, 201, 212, 317, 378, 387, 394, 398, 402, 406, 414, 433, 863, 972, 1002, 1020, 1036, 1050, 1065,
     1081, 1097, 1116, 1139, 1171, 1249, 1315, 1508, 2032, 2584, 4073, 4083, 4098, 4142, 6179),
    high=14_050,
)  # fmt: skip
AZURE_CONV_OUTPUT = Knots(
    THREES,
    (12, 24, 41, 49, 57, 64, 71, 77, 82, 86, 90, 93, 96, 100, 105, 110, 118, 129, 141, 156, 169, 190, 217, 375,
     387, 394, 396, 400, 407, 414, 420, 429, 451, 540, 601, 954),
    high=1_000,
)  # fmt: skip
AZURE_CODE_PROMPT = Knots.stated(1_469, 5_194, 7_436, mean_of_log=7.00, high=7_500)
AZURE_CODE_OUTPUT = Knots.stated(13, 55, 252, mean_of_log=2.79, high=1_500)

AZURE_CONV_RATE, AZURE_CODE_RATE = 5.5, 2.5  # requests/s
MOONCAKE_SYNTHETIC_RATE, MOONCAKE_CONVERSATION_RATE = 3.9, 3.4


def azure_conv_arrivals(rate_per_s: float) -> Arrivals:
    """Gamma shape 0.84 (CV 1.09); 10 s counts have an index of dispersion of 3.9 at 5.5/s, most of it slow drift."""
    return Gamma(rate_per_s, 0.84, drift=0.225)


def azure_code_arrivals(rate_per_s: float) -> Arrivals:
    """Very bursty: 10 s counts have an index of dispersion of 72 and a peak of 12.8 times the mean."""
    return OnOff(rate_per_s, peak=12.8, dispersion=72, window_requests=10 * AZURE_CODE_RATE)


def mooncake_synthetic_arrivals(rate_per_s: float) -> Arrivals:
    """Poisson: CV 1.01."""
    return Poisson(rate_per_s)


def mooncake_conversation_arrivals(rate_per_s: float) -> Arrivals:
    """Nearly Poisson (index of dispersion 1.10), times quantised to 3 s."""
    return Quantised(Poisson(rate_per_s), 3_000)


@dataclass(frozen=True, slots=True)
class Reuse:
    """How prompts begin with what earlier prompts held.

    follower_share: of the requests, with `prompt` and `output` of their own; the others are fresh.
    cached_ratio: of a follower's prompt; bent by one exponent until hit_ratio holds over all tokens.
    gap_s: since the prompt that it continues. common_tokens: with which every prompt begins.
    """

    fresh_prompt: Distribution
    fresh_output: Distribution
    prompt: Distribution
    output: Distribution
    follower_share: float
    cached_ratio: Distribution
    gap_s: Distribution
    hit_ratio: float
    common_tokens: int = 0


MOONCAKE_SYNTHETIC = Reuse(
    fresh_prompt=Knots(
        FIVES,
        (16, 20, 24, 28, 33, 42, 58, 86, 142, 302, 573, 1136, 3953, 13388, 15089, 16512, 18247, 21411, 26914,
         37093, 55167),
        high=191_378,
    ),
    fresh_output=Knots(
        FIVES,
        (2, 4, 8, 18, 33, 63, 101, 131, 165, 192, 215, 238, 259, 282, 307, 331, 360, 403, 478, 614, 778),
        high=893,
    ),
    prompt=Knots(
        FIVES,
        (42, 2736, 3183, 4414, 5524, 6694, 11083, 13626, 15556, 17054, 17843, 19426, 22894, 26599, 31028, 35042,
         37563, 39251, 45720, 54970, 68582),
        high=191_378,
    ),
    output=Knots(
        FIVES, (2, 2, 2, 3, 4, 6, 7, 8, 10, 12, 16, 19, 24, 32, 42, 55, 68, 82, 105, 162, 524), high=893
    ),
    follower_share=0.446,
    cached_ratio=Linear((0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 1), (0.4, 0.815, 0.921, 0.964, 0.982, 0.994, 1, 1)),
    gap_s=Lognormal(math.log(64.7), 1.2, high=1_000),
    hit_ratio=0.651,
)  # fmt: skip

_CONVERSATION_PROMPT = Knots.stated(6_909, 27_367, 85_401, mean_of_log=8.74, high=130_000)
_CONVERSATION_OUTPUT = Knots.stated(350, 597, 1_120, mean_of_log=5.34, high=2_000)
MOONCAKE_CONVERSATION = Reuse(
    fresh_prompt=_CONVERSATION_PROMPT,
    fresh_output=_CONVERSATION_OUTPUT,
    prompt=_CONVERSATION_PROMPT,
    output=_CONVERSATION_OUTPUT,
    follower_share=1.0,  # all begin with the same 512 tokens; what is less than a block more is fresh
    cached_ratio=Linear((0, 0.25, 0.5, 0.75, 0.9, 1), (0, 0.07, 0.36, 0.71, 0.95, 1)),
    gap_s=Lognormal(5.02, 0.98),
    hit_ratio=0.374,
    common_tokens=512,
)

REUSE_BLOCK_TOKENS = 512
NEAR_FITS = 64  # earlier prompts considered for each follower: those that are just long enough
MOST_CREDIT_RATIO = 0.2  # of a prompt: how much of what earlier followers missed one may make up for


@dataclass(slots=True)
class _Plan:
    prompt_tokens: int
    output_tokens: int
    ratio: float
    gap_s: float


@dataclass(slots=True)
class _Past:
    """Prompts so far, by length."""

    by_length: list[tuple[int, int]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    turns: dict[str, int] = field(default_factory=dict)

    def add(self, request: Request) -> None:
        bisect.insort(self.by_length, (request.prompt_tokens, len(self.requests)))
        self.requests.append(request)
        self.turns[request.session] = request.turn + 1

    def find(self, num_tokens: int, near_ms: float) -> Request | None:
        """Of those that are just long enough (or else the longest), the one that arrived nearest to a time."""
        if not self.by_length:
            return None
        at = min(bisect.bisect_left(self.by_length, (num_tokens, -1)), len(self.by_length) - 1)
        fits = [self.requests[index] for _, index in self.by_length[at : at + NEAR_FITS]]
        return min(fits, key=lambda one: abs(one.arrival_ms - near_ms))


def like_mooncake(seed: int, reuse: Reuse, times_ms: Sequence[float]) -> list[Request]:
    """Requests at these times with the given lengths, hit ratio of an infinite cache, and gaps between uses.

    Who goes on where another one was is sent after the answer to that one. What blocks round away, and what no earlier
    prompt was long enough for, the next followers make up for.
    """
    plans = _plans(seed, reuse, len(times_ms))
    past, credit = _Past(), 0.0
    common = Segment(content_id(seed, "common"), reuse.common_tokens)
    for number, (plan, at_ms) in enumerate(zip(plans, times_ms, strict=True)):
        own = content_id(seed, "mooncake", number)
        target = plan.ratio * plan.prompt_tokens
        wanted = target + min(credit, MOST_CREDIT_RATIO * plan.prompt_tokens) if plan.ratio else 0.0
        blocks = int(min(wanted, plan.prompt_tokens - 1) // REUSE_BLOCK_TOKENS)
        parent = past.find(blocks * REUSE_BLOCK_TOKENS, at_ms - plan.gap_s * 1000) if blocks else None
        begin: tuple[Part, ...] = ()
        if parent is not None:
            blocks = min(blocks, parent.prompt_tokens // REUSE_BLOCK_TOKENS)
            begin = first_tokens(parent.prompt, blocks * REUSE_BLOCK_TOKENS)
        if not begin and reuse.common_tokens:
            parent, begin = None, first_tokens((common,), plan.prompt_tokens)
        held = sum(part.num_tokens for part in begin)
        if number:
            credit += target - (held // REUSE_BLOCK_TOKENS * REUSE_BLOCK_TOKENS)
        rest = plan.prompt_tokens - held
        before = parent if parent is not None and held > reuse.common_tokens else None
        session = before.session if before is not None else f"trace-{number}"
        past.add(
            Request(
                request_id=number,
                arrival_ms=round(at_ms, 3),
                session=session,
                turn=past.turns.get(session, 0),
                prompt=(*begin, Segment(own, rest)) if rest else begin,
                output_tokens=plan.output_tokens,
                depends_on=before.request_id if before is not None else None,
            )
        )
    return past.requests


def _plans(seed: int, reuse: Reuse, num_requests: int) -> list[_Plan]:
    names = ("follows", "prompt", "fresh", "output", "fresh output", "ratio", "gap")
    draws = {name: Draws(seed, "mooncake", name) for name in names}
    plans = []
    for _ in range(num_requests):
        if draws["follows"]() < reuse.follower_share:
            plan = _Plan(
                draws["prompt"].tokens(reuse.prompt),
                draws["output"].tokens(reuse.output),
                min(1.0, max(0.0, draws["ratio"].of(reuse.cached_ratio))),
                draws["gap"].of(reuse.gap_s),
            )
        else:
            fresh = draws["fresh"].tokens(reuse.fresh_prompt)
            plan = _Plan(fresh, draws["fresh output"].tokens(reuse.fresh_output), 0.0, 0.0)
        plans.append(plan)
    _bend(plans, reuse.hit_ratio)
    return plans


def _bend(plans: Sequence[_Plan], hit_ratio: float) -> None:
    """One exponent for all ratios, so that their mean over tokens is hit_ratio (or as near as ratios in [0, 1] get)."""
    total = sum(plan.prompt_tokens for plan in plans)
    low, high = 0.02, 50.0
    for _ in range(60):
        power = math.sqrt(low * high)
        mean = sum(plan.prompt_tokens * plan.ratio**power for plan in plans if plan.ratio) / max(1, total)
        low, high = (power, high) if mean > hit_ratio else (low, power)
    for plan in plans:
        if plan.ratio:
            plan.ratio **= math.sqrt(low * high)
