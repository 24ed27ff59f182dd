"""Chats, documents with questions, agents: sessions after MemServe 8.2, AQUA 9.1 and vAttention's long prompts.

What is published of them are means and shapes, not files; the docstrings say which is which.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.workloads.distributions import Bounded, Distribution, Draws, Exponential, Lognormal, OneOf
from loadtest.workloads.request import Answer, Part, Segment, content_id
from loadtest.workloads.sessions import Session, Turn

MAX_TURNS = 40
MAX_EMPTY = 1_000  # chats one after the other of which not even the first turn fits


@dataclass(frozen=True, slots=True)
class TurnCount:
    """1 with probability `single`; else 2 and more, geometrically, with the given overall mean."""

    single: float
    mean: float

    def quantile(self, share: float) -> float:
        """See Distribution."""
        if share < self.single:
            return 1
        more = (self.mean - self.single) / (1 - self.single) - 2
        stop = 1 / (1 + more)
        rest = (share - self.single) / (1 - self.single)
        return min(MAX_TURNS, 2 + math.floor(math.log1p(-rest) / math.log1p(-stop)))


@dataclass(frozen=True, slots=True)
class Chat:
    """ShareGPT-like: on average 161 tokens asked and 338 answered a turn, and 5.75 turns; 73% have more than one.

    Those are published (vLLM's paper; Sarathi-Serve); lognormal shapes, their widths and the think time are ours.
    """

    asked: Distribution
    answered: Distribution
    turns: Distribution
    think_ms: Distribution


CHAT = Chat(
    asked=Lognormal.of_mean(161, 1.1),
    answered=Lognormal.of_mean(338, 0.8),
    turns=TurnCount(0.27, 5.75),
    think_ms=Exponential(5_000),
)
SHAREGPT_PROMPT = Lognormal(
    math.log(1_730), math.log(5_696 / 1_730) / 1.2816
)  # median and p90, Sarathi-Serve
SHAREGPT_OUTPUT = Lognormal(math.log(415), math.log(834 / 415) / 1.2816)


def chats(
    seed: int, *, context_tokens: int = 0, think: Distribution | None = None, chat: Chat = CHAT
) -> Iterator[Session]:
    """Conversations without end; each turn sends the whole history. context_tokens ends one before it exceeds them.

    Raises: ValueError, while they are taken, where no chat fits into so few.
    """
    draws = {name: Draws(seed, "chat", name) for name in ("asked", "answered", "turns", "think")}
    number = empty = 0
    while True:
        turns: list[Turn] = []
        history: list[Part] = []
        for turn in range(int(draws["turns"].of(chat.turns))):
            asked = Segment(content_id(seed, "chat", number, turn), draws["asked"].tokens(chat.asked))
            output_tokens = draws["answered"].tokens(chat.answered)
            length = sum(part.num_tokens for part in history) + asked.num_tokens + output_tokens
            if context_tokens and length > context_tokens:
                break
            think_ms = draws["think"].of(think or chat.think_ms)
            turns.append(Turn((*history, asked), output_tokens, think_ms))
            history += [asked, Answer(turn, output_tokens)]
        empty = 0 if turns else empty + 1
        if empty >= MAX_EMPTY:
            raise ValueError(f"no chat fits into a context of {context_tokens} tokens")
        if turns:
            yield Session(f"chat-{number}", turns)
        number += 1


QUESTIONS = OneOf((1, 2, 2, 3, 3, 4, 5, 5))  # mean 3.125: 80 sessions have 250 requests


@dataclass(frozen=True, slots=True)
class Documents:
    """LooGLE-like: the first 1K tokens of a document, then up to five questions (MemServe 8.2).

    The numbers of questions are such that 80 sessions have 250 requests, as in MemServe 8.4; the lengths of questions
    and answers are ours (the paper shows them as short).
    """

    document_tokens: int
    question: Distribution
    answer: Distribution
    questions: Distribution
    think_ms: Distribution


DOCUMENTS = Documents(
    document_tokens=1_000,
    question=Lognormal(math.log(24), 0.4),
    answer=Lognormal(math.log(24), 0.6, high=128),
    questions=QUESTIONS,
    think_ms=Exponential(1_000),
)


def documents(
    seed: int, num_sessions: int, *, think: Distribution | None = None, shape: Documents = DOCUMENTS
) -> list[Session]:
    """So many documents, each with its questions; a question is asked of the document alone, without the others."""
    count = Draws(seed, "documents", "questions", strata=8)
    draws = {name: Draws(seed, "documents", name) for name in ("question", "answer", "think")}
    found = []
    for number in range(num_sessions):
        document = Segment(content_id(seed, "document", number), shape.document_tokens)
        turns = [
            Turn(
                (
                    document,
                    Segment(
                        content_id(seed, "question", number, turn), draws["question"].tokens(shape.question)
                    ),
                ),
                draws["answer"].tokens(shape.answer),
                draws["think"].of(think or shape.think_ms),
            )
            for turn in range(int(count.of(shape.questions)))
        ]
        found.append(Session(f"document-{number}", turns, (f"document-{number}",)))
    return found


@dataclass(frozen=True, slots=True)
class Agents:
    """ReAct-like: one two-shot example before every question, then thoughts with actions and what they found.

    MemServe 8.2: long prompts, a large shared prefix, comparatively long outputs. The numbers are ours.
    """

    example_tokens: int
    question: Distribution
    thought: Distribution
    found: Distribution
    steps: Distribution
    tool_ms: Distribution


AGENTS = Agents(
    example_tokens=1_500,
    question=Lognormal(math.log(30), 0.4),
    thought=Lognormal.of_mean(150, 0.6),
    found=Lognormal.of_mean(90, 0.8),
    steps=OneOf((2, 3, 4, 5, 5, 6, 7, 8)),
    tool_ms=Exponential(500),
)


def agents(seed: int, *, think: Distribution | None = None, shape: Agents = AGENTS) -> Iterator[Session]:
    """Agents without end; the two-shot example is the same for all."""
    draws = {name: Draws(seed, "agents", name) for name in ("question", "thought", "found", "steps", "tool")}
    example = Segment(content_id(seed, "two-shot"), shape.example_tokens)
    number = 0
    while True:
        question = Segment(content_id(seed, "agent", number), draws["question"].tokens(shape.question))
        history: list[Part] = [example, question]
        turns: list[Turn] = []
        for step in range(int(draws["steps"].of(shape.steps))):
            output_tokens = draws["thought"].tokens(shape.thought)
            turns.append(Turn(tuple(history), output_tokens, draws["tool"].of(think or shape.tool_ms)))
            result = Segment(content_id(seed, "found", number, step), draws["found"].tokens(shape.found))
            history += [Answer(step, output_tokens), result]
        yield Session(f"agent-{number}", turns, ("two-shot",))
        number += 1


def singles(
    seed: int,
    prompt: Distribution,
    output: Distribution,
    *,
    name: str = "request",
    long_share: float = 0.0,
    long_prefix_tokens: int = 100_000,
    long_tail_tokens: int = 256,
) -> Iterator[Session]:
    """Requests of one turn and nothing in common, lengths independent (both Azure files show no correlation).

    long_share of them, at random, are one long prompt whose last long_tail_tokens differ (AQUA 9.1, prefill caching).
    """
    lengths, outputs = Draws(seed, name, "prompt"), Draws(seed, name, "output")
    rng = random.Random(f"{seed}-{name}-long")
    prefix = Segment(content_id(seed, name, "long"), long_prefix_tokens)
    number = 0
    while True:
        own = content_id(seed, name, number)
        if rng.random() < long_share:
            parts: tuple[Part, ...] = (prefix, Segment(own, long_tail_tokens))
            yield Session(f"{name}-{number}", [Turn(parts, outputs.tokens(output))], ("long",))
        else:
            parts = (Segment(own, lengths.tokens(prompt)),)
            yield Session(f"{name}-{number}", [Turn(parts, outputs.tokens(output))])
        number += 1


ARXIV_PROMPT = Bounded(
    22_000, 45_000, 29_000
)  # vAttention's online requests: range and mean published, shape ours
ARXIV_OUTPUT = Lognormal.of_mean(348, 0.8)
