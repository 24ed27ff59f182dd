"""What a profile's runs ask: lengths of a workload or trace, at any rate, with or without a burst.

AQUA 4.1 samples requests from a deployment's own distributions of input and output tokens. Lengths are kept in pairs
and in their order; sharing and turns are not: every request has tokens of its own, so that no cache helps a run because
another run came before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.workloads import arrivals, catalogue, trace_files
from loadtest.workloads.arrivals import Arrivals, Burst, Poisson
from loadtest.workloads.request import Request, Segment, clipped, content_id, scaled
from shared.errors import SettingsError

SHAREGPT = "sharegpt"  # in the profiler: single prompts with its lengths, as AQUA's bursts have them
DRAWN = 4_096  # pairs of lengths
WARM = 25  # requests at the stable rate before a burst (AQUA 9.3)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Pairs (prompt tokens, output tokens), used in turn."""

    words: str
    pairs: Sequence[tuple[int, int]]

    def at_rate(self, rate_per_s: float, seconds: float, least: int, seed: int) -> list[Request]:
        """Poisson arrivals for so long, and at least `least` of them. Raises: SettingsError: too many."""
        process = Poisson(rate_per_s)
        times = _within(process, seed, seconds, f"--seconds {seconds:g}: at {rate_per_s:g} requests/s")
        if len(times) < least:
            times = arrivals.take(process, "profile", seed, num_requests=least)
        return self._requests(times, seed)

    def burst(self, rate_per_s: float, factor: float, burst_s: float, seed: int) -> list[Request]:
        """WARM requests at the rate, then `factor` times it for burst_s (AQUA 9.3); nothing after that.

        Raises: SettingsError: too many.
        """
        process: Arrivals = Burst(rate_per_s, warm=WARM, factor=factor, burst_s=burst_s)
        warm_ms = arrivals.take(process, "profile", seed, num_requests=WARM)[-1]
        at = f"--burst-s {burst_s:g}: at {factor:g} x {rate_per_s:g} requests/s"
        times = _within(process, seed, warm_ms / 1000 + burst_s, at)
        return self._requests(times, seed)

    def longest_tokens(self) -> int:
        """Prompt and output of the longest."""
        return max(prompt + output for prompt, output in self.pairs)

    def _requests(self, times_ms: Sequence[float], seed: int) -> list[Request]:
        begin = seed * 997  # another seed asks other lengths first
        return [
            Request(
                request_id=number,
                arrival_ms=at_ms,
                session=f"profile-{number}",
                turn=0,
                prompt=(Segment(content_id("profile", seed, number), prompt_tokens),),
                output_tokens=output_tokens,
            )
            for number, at_ms in enumerate(times_ms)
            for prompt_tokens, output_tokens in (self.pairs[(begin + number) % len(self.pairs)],)
        ]


def _within(process: Arrivals, seed: int, seconds: float, words: str) -> list[float]:
    try:
        return arrivals.take(process, "profile", seed, seconds=seconds)
    except ValueError as error:  # more than a run can hold
        raise SettingsError(f"{words} {error}; take less time") from error


def of_workload(name: str, *, seed: int = 1, scale: float = 1.0, context_tokens: int = 0) -> Lengths:
    """Raises: SettingsError on an unknown name or bad numbers."""
    single = "aqua" if name == SHAREGPT else name
    try:
        found = catalogue.build(single, catalogue.Options(num_requests=DRAWN, seed=seed))
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return _lengths(name, found, scale, context_tokens)


def of_trace(path: Path, *, scale: float = 1.0, context_tokens: int = 0) -> Lengths:
    """Lengths of a Mooncake JSONL or Azure CSV file. Raises: SettingsError naming file and line."""
    try:
        try:
            found = trace_files.read(path, limit=DRAWN)
        except trace_files.NoTimes:
            found = trace_files.read(path, limit=DRAWN, rate_per_s=1.0)  # times count for nothing here
    except trace_files.TraceError as error:
        raise SettingsError(str(error)) from error
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"{path} is not text: expected Mooncake's JSON lines, or a CSV of lengths"
        ) from error
    return _lengths(path.name, found, scale, context_tokens)


def _lengths(words: str, found: Sequence[Request], scale: float, context_tokens: int) -> Lengths:
    if not found:
        raise SettingsError(f"{words} has no requests")
    try:
        kept = scaled(found, scale) if scale != 1.0 else list(found)
        kept = clipped(kept, context_tokens) if context_tokens else kept
    except ValueError as error:
        raise SettingsError(str(error)) from error
    if scale != 1.0:
        words = f"{words} x {scale:g}"
    return Lengths(words, [(one.prompt_tokens, one.output_tokens) for one in kept])
