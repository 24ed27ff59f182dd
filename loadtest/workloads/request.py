"""One request of a workload: when it comes, what it waits for, what its prompt is made of.

A prompt is a row of parts, so that a workload of millions of tokens costs nothing until a request is sent. Equal
`content` means equal tokens, and a shorter run of a content is the beginning of a longer one: sharing is visible
without expanding anything (stats.py), and lengths can be scaled without losing it.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

MAX_PROMPT_TOKENS = 2_000_000


def content_id(*words: object) -> int:
    """The name of a run of tokens, 63 bits: the same words give the same tokens in every process."""
    text = "\0".join(str(word) for word in words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class Segment:
    """The first `num_tokens` of the content's endless row of pseudo-tokens, from `offset` on."""

    content: int
    num_tokens: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What request `of` was answered; before that is known, `num_tokens` pseudo-tokens stand for it."""

    of: int
    num_tokens: int


Part = Segment | Answer


@dataclass(frozen=True, slots=True)
class Request:
    """Times in ms from the run's beginning.

    arrival_ms: when it is sent, and never before its predecessor's answer ended think_ms ago.
    depends_on: request_id of the turn before, which is earlier in the list; None: waits for nothing.
    shared: names of what its prompt shares with other sessions ("two-shot", "doc-7"); for people and policies.
    """

    request_id: int
    arrival_ms: float
    session: str
    turn: int
    prompt: tuple[Part, ...]
    output_tokens: int
    depends_on: int | None = None
    think_ms: float = 0.0
    shared: tuple[str, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """With answers as long as planned."""
        return sum(part.num_tokens for part in self.prompt)


def check(requests: Sequence[Request]) -> None:
    """Raises: ValueError on a workload that no driver could run: wrong order, empty prompts, foreign dependencies."""
    seen: dict[int, Request] = {}
    last_ms = 0.0
    for request in requests:
        where = f"request {request.request_id}"
        if request.request_id in seen:
            raise ValueError(f"{where} is there twice")
        if request.arrival_ms < last_ms:
            raise ValueError(f"{where} arrives before the one ahead of it")
        if not all(1 <= n <= MAX_PROMPT_TOKENS for n in (request.prompt_tokens, request.output_tokens)):
            raise ValueError(
                f"{where}: {request.prompt_tokens} prompt and {request.output_tokens} output tokens"
            )
        needs = {part.of for part in request.prompt if isinstance(part, Answer)}
        if request.depends_on is not None:
            needs.add(request.depends_on)
        for other in needs:
            if other not in seen or seen[other].session != request.session:
                raise ValueError(f"{where} needs {other}, which is no earlier request of its session")
        seen[request.request_id] = request
        last_ms = request.arrival_ms


def scaled(
    requests: Iterable[Request], factor: float, *, output_factor: float | None = None
) -> list[Request]:
    """Shorter (or longer) prompts and outputs with the same sharing: equal parts stay equal.

    Every part keeps at least one token. output_factor: of outputs and of the answers in histories; None: factor.
    Raises: ValueError, also where a length is beyond what a float holds; check() finds those that are too long.
    """
    if factor <= 0 or (output_factor is not None and output_factor <= 0):
        raise ValueError(f"factors {factor} and {output_factor} must be above 0")
    of_outputs = factor if output_factor is None else output_factor

    def part(one: Part) -> Part:
        if isinstance(one, Answer):
            return replace(one, num_tokens=_times(one.num_tokens, of_outputs))
        begin = round(one.offset * factor)
        end = max(begin + 1, round((one.offset + one.num_tokens) * factor))
        return replace(one, offset=begin, num_tokens=end - begin)

    try:
        return [
            replace(
                request,
                prompt=tuple(part(one) for one in request.prompt),
                output_tokens=_times(request.output_tokens, of_outputs),
            )
            for request in requests
        ]
    except OverflowError:
        raise ValueError(f"factors {factor:g} and {of_outputs:g} make endless lengths") from None


def _times(num_tokens: int, factor: float) -> int:
    return max(1, round(num_tokens * factor))


def clipped(requests: Iterable[Request], context_tokens: int) -> list[Request]:
    """Prompts cut at their ends so that prompt and output fit in a model's context; the beginnings stay shared.

    Outputs are cut to half of the context first. Raises: ValueError when there is no room for anything.
    """
    if context_tokens < 2:
        raise ValueError(f"a context of {context_tokens} tokens holds no prompt and output")
    out = []
    for request in requests:
        output_tokens = min(request.output_tokens, context_tokens // 2)
        prompt = first_tokens(request.prompt, context_tokens - output_tokens)
        out.append(replace(request, prompt=prompt, output_tokens=output_tokens))
    return out


def first_tokens(parts: Sequence[Part], room: int) -> tuple[Part, ...]:
    """The beginning of a prompt."""
    kept: list[Part] = []
    for one in parts:
        if room <= 0:
            break
        kept.append(one if one.num_tokens <= room else replace(one, num_tokens=room))
        room -= one.num_tokens
    return tuple(kept)


def salted(requests: Iterable[Request], *salt: object) -> list[Request]:
    """The same requests with other tokens: no cache knows them from an earlier run; they share as before."""
    known: dict[int, int] = {}

    def part(one: Part) -> Part:
        if isinstance(one, Answer):
            return one
        if one.content not in known:
            known[one.content] = content_id(one.content, *salt)
        return replace(one, content=known[one.content])

    return [replace(request, prompt=tuple(part(one) for one in request.prompt)) for request in requests]
