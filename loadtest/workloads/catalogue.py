"""Every workload by name. `build("sharegpt", Options(rate_per_s=2, seconds=60, seed=1))` is a list of requests."""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from loadtest.workloads import arrivals, conversations, published
from loadtest.workloads.arrivals import Arrivals, Burst, Poisson
from loadtest.workloads.distributions import Distribution, Exponential, Fixed
from loadtest.workloads.request import Request, check
from loadtest.workloads.sessions import Session, copies, interleave


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a workload may be told; 0 or None: its own. Which uses what: Workload.takes.

    seconds, num_requests: the run ends at whichever comes first; a workload of so many sessions also ends with them.
    """

    rate_per_s: float = 0.0
    seconds: float = 0.0
    num_requests: int = 0
    seed: int = 1
    context_tokens: int = 0  # of the model: conversations end before they exceed it
    think_ms: float | None = None  # mean, exponential; 0: at once
    num_sessions: int = 80
    share_ratio: int = 1
    document_tokens: int = 1_000
    warm: int = 25
    burst_factor: float = 2.0
    burst_s: float = 60.0
    long_share: float = 0.0
    long_prefix_tokens: int = 100_000


COMMON = frozenset({"rate_per_s", "seconds", "num_requests", "seed"})
# What options may be; those that are not here, not below 0. Arrival processes say what their own may be.
_LEAST = {"share_ratio": 1, "document_tokens": 1, "long_prefix_tokens": 1}
_MOST = {"long_share": 1.0, "num_sessions": 1_000_000}


@dataclass(frozen=True, slots=True)
class Workload:
    """real_history: later turns carry what the server really answered."""

    name: str
    about: str
    rate_per_s: float
    make: Callable[[Options, float], list[Request]]
    real_history: bool = False
    takes: frozenset[str] = field(default_factory=frozenset)


def settings(texts: Iterable[str]) -> dict[str, Any]:
    """Options by name, of "NAME=VALUE" words, without those that have flags of their own.

    Raises: ValueError with what there is.
    """
    known = {one.name: one.type for one in fields(Options) if one.name not in COMMON}
    found: dict[str, Any] = {}
    for text in texts:
        name, sep, value = text.partition("=")
        if not sep or name not in known:
            raise ValueError(f"--set {text}: want NAME=VALUE with a name of {', '.join(sorted(known))}")
        kind = int if known[name] is int else float
        try:
            found[name] = kind(value)
        except ValueError:
            raise ValueError(f"--set {text}: {value!r} is no {'whole ' * (kind is int)}number") from None
    return found


def build(name: str, options: Options) -> list[Request]:
    """Requests in order of arrival. Raises: ValueError on an unknown name, an option it has no use for, or no end."""
    if name not in WORKLOADS:
        raise ValueError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
    workload = WORKLOADS[name]
    for one in fields(Options):
        if one.name not in COMMON | workload.takes and getattr(options, one.name) != one.default:
            raise ValueError(f"the workload {name} has no use for {one.name}")
    _check(options)
    requests = workload.make(options, options.rate_per_s or workload.rate_per_s)
    check(requests)
    return requests


def _check(options: Options) -> None:
    """Raises: ValueError naming what makes no sense, which would be a workload without an end, or none."""
    for one in fields(Options):
        value = getattr(options, one.name)
        if value is None or one.name == "seed":
            continue
        least, most = _LEAST.get(one.name, 0), _MOST.get(one.name, math.inf)
        if not math.isfinite(value) or not least <= value <= most:
            upto = f" to {most:g}" if most < math.inf else " or more"
            raise ValueError(f"{one.name} is {value:g}, and may be {least}{upto}")


def _times(options: Options, process: Arrivals) -> list[float]:
    return arrivals.take(process, options.seed, num_requests=options.num_requests, seconds=options.seconds)


def _think(options: Options) -> Distribution | None:
    if options.think_ms is None:
        return None
    return Exponential(options.think_ms) if options.think_ms else Fixed(0.0)


def _poisson(options: Options, rate_per_s: float, sessions: Iterator[Session]) -> list[Request]:
    return interleave(sessions, _times(options, Poisson(rate_per_s)))


def _sharegpt(options: Options, rate_per_s: float) -> list[Request]:
    sessions = conversations.chats(options.seed, context_tokens=options.context_tokens, think=_think(options))
    return _poisson(options, rate_per_s, sessions)


def _loogle(options: Options, rate_per_s: float) -> list[Request]:
    """Copies are spread over the run: sessions begin in one random order, which is the seed's."""
    shape = replace(conversations.DOCUMENTS, document_tokens=options.document_tokens)
    own = conversations.documents(options.seed, options.num_sessions, think=_think(options), shape=shape)
    sessions = copies(own, options.share_ratio)
    random.Random(f"{options.seed}-order").shuffle(sessions)
    process = Poisson(rate_per_s)
    if not options.seconds and not options.num_requests:
        num_requests = sum(len(session.turns) for session in sessions)
        return interleave(sessions, arrivals.take(process, options.seed, num_requests=num_requests))
    return interleave(sessions, _times(options, process))


def _react(options: Options, rate_per_s: float) -> list[Request]:
    return _poisson(options, rate_per_s, conversations.agents(options.seed, think=_think(options)))


def _aqua(options: Options, rate_per_s: float) -> list[Request]:
    sessions = conversations.singles(
        options.seed,
        conversations.SHAREGPT_PROMPT,
        conversations.SHAREGPT_OUTPUT,
        name="aqua",
        long_share=options.long_share,
        long_prefix_tokens=options.long_prefix_tokens,
    )
    process = Burst(rate_per_s, warm=options.warm, factor=options.burst_factor, burst_s=options.burst_s)
    return interleave(sessions, _times(options, process))


def _single(
    name: str,
    prompt: Distribution,
    output: Distribution,
    process: Callable[[float], Arrivals] = Poisson,
) -> Callable[[Options, float], list[Request]]:
    def make(options: Options, rate_per_s: float) -> list[Request]:
        sessions = conversations.singles(options.seed, prompt, output, name=name)
        return interleave(sessions, _times(options, process(rate_per_s)))

    return make


def _mooncake(
    reuse: published.Reuse, process: Callable[[float], Arrivals]
) -> Callable[[Options, float], list[Request]]:
    def make(options: Options, rate_per_s: float) -> list[Request]:
        return published.like_mooncake(options.seed, reuse, _times(options, process(rate_per_s)))

    return make


WORKLOADS = {
    one.name: one
    for one in (
        Workload(
            "sharegpt", "chats of several turns (MemServe 8.2)", 2.0, _sharegpt, True,
            frozenset({"context_tokens", "think_ms"}),
        ),
        Workload(
            "loogle", "questions about 1K-token documents, sessions shared (MemServe 8.4)", 2.0, _loogle, False,
            frozenset({"think_ms", "num_sessions", "share_ratio", "document_tokens"}),
        ),
        Workload(
            "react", "agents behind one two-shot example (MemServe 8.2)", 1.0, _react, True, frozenset({"think_ms"})
        ),
        Workload(
            "aqua", "25 prompts, then twice the rate for a minute (AQUA 9.3)", 1.0, _aqua, False,
            frozenset({"warm", "burst_factor", "burst_s", "long_share", "long_prefix_tokens"}),
        ),
        Workload(
            "aqua-long-prompt", "prompts of 8,192 tokens (AQUA 9.1)", 0.1,
            _single("aqua-long", Fixed(8_192), conversations.ARXIV_OUTPUT),
        ),
        Workload(
            "arxiv-long", "22K to 45K tokens to summarise (vAttention)", 0.2,
            _single("arxiv", conversations.ARXIV_PROMPT, conversations.ARXIV_OUTPUT),
        ),
        Workload(
            "azure-code", "code completion in bursts (Azure 2023)", published.AZURE_CODE_RATE,
            _single(
                "azure-code", published.AZURE_CODE_PROMPT, published.AZURE_CODE_OUTPUT,
                published.azure_code_arrivals,
            ),
        ),
        Workload(
            "azure-conv", "conversation (Azure 2023)", published.AZURE_CONV_RATE,
            _single(
                "azure-conv", published.AZURE_CONV_PROMPT, published.AZURE_CONV_OUTPUT,
                published.azure_conv_arrivals,
            ),
        ),
        Workload(
            "mooncake-synthetic", "long prompts, half of them repeats (Mooncake)",
            published.MOONCAKE_SYNTHETIC_RATE,
            _mooncake(published.MOONCAKE_SYNTHETIC, published.mooncake_synthetic_arrivals),
        ),
        Workload(
            "mooncake-conversation", "long conversations (Mooncake)", published.MOONCAKE_CONVERSATION_RATE,
            _mooncake(published.MOONCAKE_CONVERSATION, published.mooncake_conversation_arrivals),
        ),
    )
}  # fmt: skip
