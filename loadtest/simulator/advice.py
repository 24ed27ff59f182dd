"""What `quire advise` found: each layout's rates, the verdict, and both in words."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from loadtest.simulator.sustained import MOST_DOUBLINGS

GAIN = 1.05  # below this a layout is no better: the search itself is no finer
LINKS_GB_PER_S = (0.05, 1000.0)  # that are tried
SPARSE = (
    f" The trace is too sparse to tell them apart: {1 << MOST_DOUBLINGS:,} times its own rate is no load. Give one as "
    "dense as what they shall serve."
)

NO_TIME = "; whether less would do there was no time to find"
CAPPED = " A run at more would have over {:,} requests. Give what keeps them busier: fewer --gpus, or a tighter SLO."


def rounded(rate_per_s: float) -> float:
    """For scripts: four digits behind the point, or as many that count where it is below 0.1."""
    return round(rate_per_s, 4) if rate_per_s >= 0.1 else float(f"{rate_per_s:.4g}")


def rate_text(rate_per_s: float) -> str:
    """For people: a rate above 0 is never 0.00."""
    return f"{rate_per_s:.2f}" if rate_per_s >= 0.1 or not rate_per_s else f"{rate_per_s:.2g}"


@dataclass(slots=True)
class Layout:
    """One way to use the instances. Times and ratios at the trace's own rate; is_simulated: False: time ended before.

    max_rate_per_s: the highest that it sustained, 0: none that was tried. failed_rate_per_s: the lowest that it did
    not, 0: none that was tried, so the other is a least value. They lie 4% apart unless the search left it earlier.
    """

    name: str
    num_prefill: int
    num_decode: int
    num_colocated: int
    max_rate_per_s: float = 0.0
    failed_rate_per_s: float = 0.0
    good_ratio: float = 0.0
    hit_ratio: float = 0.0
    ttft_p50_ms: float = 0.0
    ttft_p99_ms: float = 0.0
    tpot_p99_ms: float = 0.0
    jct_mean_ms: float = 0.0
    is_simulated: bool = False

    @property
    def is_split(self) -> bool:
        """Disaggregated."""
        return self.num_prefill > 0

    @property
    def is_at_least(self) -> bool:
        """It sustained all that was tried."""
        return self.max_rate_per_s > 0 and not self.failed_rate_per_s

    def rate_words(self) -> str:
        """For people."""
        if not self.max_rate_per_s and not self.failed_rate_per_s:
            return "not tried"
        if self.is_at_least:
            return f"at least {rate_text(self.max_rate_per_s)}"
        if self.failed_rate_per_s <= self.max_rate_per_s * GAIN:
            return rate_text(self.max_rate_per_s)
        if self.max_rate_per_s:
            return f"{rate_text(self.max_rate_per_s)} to {rate_text(self.failed_rate_per_s)}"
        return f"below {rate_text(self.failed_rate_per_s)}"


@dataclass(frozen=True, slots=True)
class LinkNow:
    """Between engines, and where the number is from: assumed, given, or measured by whom."""

    gb_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The slowest link at which a division still sustains what colocated instances do, and which division that is.

    gb_per_s: None: none does over any link that is tried, or (is_known: False) time ended before that was known, or
    colocated instances sustain nothing, so that there is nothing to keep up with. A number with is_known: False is a
    link that is enough: time ended before the slowest such one was known.
    """

    gb_per_s: float | None = None
    layout: Layout | None = None
    is_known: bool = False


@dataclass(frozen=True, slots=True)
class Engine:
    """What each engine was taken to have. Tokens are of KV; dram_tokens: of host memory behind it."""

    memory_tokens: int
    max_running: int
    dram_tokens: int
    pd_caching: str


@dataclass(slots=True)
class Advice:
    """break_even_gb_per_s, break_even_known, break_even_layout: see BreakEven; of the best split, or of another where
    no link is enough for that one. gain_ratio: of the rates that were sustained; see Layout for what they are where
    nothing failed. within_budget: False where time ended the search.
    decided: False where it ended, or no higher rate could be tried, before one way was known to be better;
    disaggregate is False then and says nothing.
    trace_rate_per_s: of the stretch, or of all that the trace has where all of it comes at once; whole_rate_per_s: of
    all; is_burst: the stretch leaves pauses of it out. link_source, engine_sources: where
    the link's rate and the engine's sizes, by their names, are from."""

    disaggregate: bool
    prefill: int
    decode: int
    gain_ratio: float
    break_even_gb_per_s: float | None
    break_even_known: bool
    break_even_layout: str
    decided: bool
    sentence: str
    trace_rate_per_s: float
    whole_rate_per_s: float
    is_burst: bool
    simulated_requests: int
    slo_ttft_ms: float
    slo_tpot_ms: float
    good_share: float
    link_gb_per_s: float
    link_source: str
    engine: Engine
    engine_sources: dict[str, str]
    costs: str
    calibrated: bool
    within_budget: bool = True
    num_simulations: int = 0
    layouts: list[Layout] = field(default_factory=list)

    def setting_words(self) -> str:
        """What was simulated beside costs and workload, each with where it is from."""
        engine, source = self.engine, self.engine_sources
        parts = (
            f"KV of {engine.memory_tokens} tokens ({source['memory_tokens']})",
            f"at most {engine.max_running} requests at once ({source['max_running']})",
            f"{engine.dram_tokens} tokens in host memory behind it ({source['dram_tokens']})",
            f"pd_caching {engine.pd_caching} ({source['pd_caching']})",
        )
        return f"link: {self.link_gb_per_s:.3g} GB/s ({self.link_source}); an engine: {', '.join(parts)}"

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return asdict(self)


def sentence(
    colocated: Layout,
    best: Layout,
    pays: bool,
    gain: float,
    link: BreakEven,
    link_now: LinkNow,
) -> str:
    """The verdict. Args: link_now: as simulated."""
    if not colocated.max_rate_per_s and not best.max_rate_per_s:
        return "No layout keeps the SLO at any rate that was tried: loosen it, or take faster instances."
    ratio = f"{best.num_prefill} prefill to {best.num_decode} decode"
    times = _times_words(colocated, best, gain)
    if pays:
        words = _link_words(link, link_now) if link.layout is best else ""
        return (
            f"Disaggregate, {ratio}: it sustains {best.rate_words()} requests/s within the SLO, "
            f"{colocated.name} {colocated.rate_words()} ({times}). {words}"
        ).rstrip()
    if colocated.is_at_least:
        return (
            f"Keep them colocated: {colocated.name} sustain {colocated.rate_words()} requests/s within the SLO, all "
            f"that was tried; the best division ({ratio}) {best.rate_words()}."
        )
    words = _keeps_up_words(link, best) if link.is_known or link.gb_per_s else ""
    return (
        f"Keep them colocated: {colocated.name} sustain {colocated.rate_words()} requests/s within the SLO, "
        f"the best division ({ratio}) {best.rate_words()} ({times}; it takes {GAIN:g}x to be worth it). {words}"
    ).rstrip()


def undecided(layouts: Sequence[Layout]) -> str:
    """The same where time ended first."""
    found = ", ".join(f"{layout.name} {layout.rate_words()}" for layout in layouts)
    return (
        f"Undecided: time ended the search ({found} requests/s). Give fewer --requests, or a quieter machine."
    )


def untold(colocated: Layout, best: Layout, most_requests: int | None) -> str:
    """The same where the best division sustained all that was tried, and colocated instances (almost) as much. Args:
    most_requests: of one run, where that is what ended the rates; None: MOST_DOUBLINGS of the trace's own did."""
    cap = SPARSE if most_requests is None else CAPPED.format(most_requests)
    return (
        f"Undecided: {colocated.name} sustain {colocated.rate_words()} requests/s within the SLO, the best division "
        f"({best.num_prefill} prefill to {best.num_decode} decode) {best.rate_words()}, all that was tried.{cap}"
    )


def _times_words(colocated: Layout, best: Layout, gain: float) -> str:
    if not colocated.max_rate_per_s:
        return "these sustain no rate that was tried"
    return f"{'at least ' if best.is_at_least else ''}{gain:.2f}x"


def _keeps_up_words(link: BreakEven, best: Layout) -> str:
    if link.gb_per_s is None or link.layout is None:
        return f"No link up to {LINKS_GB_PER_S[1]:g} GB/s would change that."
    other = link.layout
    who = "It" if other is best else f"Another ({other.num_prefill} prefill to {other.num_decode} decode)"
    if link.gb_per_s <= LINKS_GB_PER_S[0]:
        return f"{who} keeps up with them over any link from {link.gb_per_s:g} GB/s on."
    if not link.is_known:
        return f"{who} keeps up with them over {link.gb_per_s:.3g} GB/s between instances{NO_TIME}."
    return f"{who} keeps up with them from {link.gb_per_s:.3g} GB/s between instances on."


def _link_words(link: BreakEven, link_now: LinkNow) -> str:
    gb_per_s = link.gb_per_s or 0.0
    if gb_per_s <= LINKS_GB_PER_S[0]:
        return f"Any link from {gb_per_s:g} GB/s on is enough to break even."
    told = f"{link_now.source.partition(' by ')[0]} now: {link_now.gb_per_s:.4g} GB/s"
    if not link.is_known:
        return f"{gb_per_s:.3g} GB/s between instances are enough to break even{NO_TIME} ({told})."
    return f"Below {gb_per_s:.3g} GB/s between instances disaggregation stops paying ({told})."
