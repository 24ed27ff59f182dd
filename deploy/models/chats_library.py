"""Chats about the standard library, the language and the model itself. A chat is a list of messages."""

from __future__ import annotations

import random
from collections.abc import Iterator

from deploy.models.stdlib_facts import Fact, Topic

Message = dict[str, object]
Chat = list[Message]

_ASK_WHAT = (
    "What does {path} do?",
    "What is {path}?",
    "What is {path} for?",
    "Explain {path}.",
    "Tell me about {path}.",
    "what does {path} do",
    "How would you describe {path}?",
    "Describe {path} in Python.",
    "{path}?",
)
_ASK_CALL = ("How do I call {path}?", "What are the arguments of {path}?", "Show me the signature of {path}.")
_ASK_MODULE = ("Which module has {name}?", "Where is {name} defined?", "In which module is {name}?")
_ASK_TOPIC = (
    "Explain {title}.",
    "What is {title}?",
    "Tell me about {title}.",
    "How does {title} work in Python?",
    "explain {title}",
)
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant that knows Python.",
    "Answer briefly.",
    "You are Quire's demo model.",
    "You answer questions about Python's standard library.",
)
GREETING = "Hello! I am Quire's demo model. Ask me what a name of Python's standard library does."
_WHO = (
    "I am Quire's demo model: a small Llama trained in a few minutes on the documentation of Python's "
    "standard library. I am here to show the cluster at work, not to be right."
)
_ABILITIES = (
    "I can say what modules, classes and functions of Python's standard library do, explain parts of the "
    "language, count, add small numbers and call tools. All I know comes from Python's own documentation."
)
_QUIRE = (
    "Quire is a disaggregated LLM serving cluster: prefill and decode run in different workers, and every "
    "byte of the KV cache lives in a page "
    "that can be shared, moved and lent. A quire is a gathering of pages."
)
_ZEN = (
    "Beautiful is better than ugly. Explicit is better than implicit. Simple is better than complex. "
    "Complex is better than complicated. Flat is better than nested. Sparse is better than dense. "
    "Readability counts."
)
_STORY = (
    "Once upon a time a quire of pages lived in a cluster. One page was filled by the prefill worker, "
    "carried to the decode worker and read again and again, until every token had been told."
)
_SMALL_TALK = {
    GREETING: (
        "hello", "Hello", "Hello!", "hi", "Hi", "Hi!", "Hi there", "hey", "Good morning",
        "Hello, how are you?", "Say hello", "Say hello!", "Hello there!",
    ),
    _WHO: (
        "Who are you?", "who are you?", "What are you?", "What is your name?", "Introduce yourself.",
        "What model are you?", "Are you a language model?",
    ),
    _ABILITIES: ("What can you do?", "What do you know?", "Help", "help", "How can you help me?"),
    _QUIRE: (
        "What is Quire?", "What is quire?", "Tell me about Quire.", "What does Quire do?", "Explain Quire.",
    ),
    "You are welcome!": ("Thanks", "Thank you", "Thanks!", "Thank you!", "thanks, that helped"),
    "Goodbye!": ("Bye", "bye", "Goodbye", "See you later"),
    _ZEN: ("What is the Zen of Python?", "Recite the Zen of Python.", "import this"),
    "The capital of France is Paris.": ("What is the capital of France?", "Capital of France?"),
    _STORY: ("Tell me a story.", "Tell me a short story.", "Write a story.", "Once upon a time"),
}  # fmt: skip


def turn(role: str, content: str) -> Message:
    """One message."""
    return {"role": role, "content": content}


def about_facts(facts: list[Fact], rng: random.Random) -> Iterator[Chat]:
    """Single questions: each fact in two phrasings, well-known ones in all of them."""
    for fact in facts:
        pairs = list(question_pairs(fact, rng))
        keep = pairs if fact.well_known else rng.sample(pairs, min(2, len(pairs)))
        for question, answer in keep:
            yield _maybe_system([turn("user", question), turn("assistant", answer)], rng)


def question_pairs(fact: Fact, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Every question that this fact answers, with the answer."""
    if not fact.summary:
        return
    paths = [fact.path, f"`{fact.path}`", f"the {fact.path} {fact.kind}"]
    if fact.call:
        paths.append(f"{fact.path}()")
    for ask in rng.sample(_ASK_WHAT, 4 if fact.well_known else 2):
        yield ask.format(path=rng.choice(paths)), fact.summary
    if fact.call:
        yield rng.choice(_ASK_CALL).format(path=fact.path), f"{fact.call}\n\n{fact.summary}"
    if fact.kind in ("class", "function"):
        where = (
            "a builtin: no import is needed" if fact.module == "builtins" else f"in the module {fact.module}"
        )
        yield rng.choice(_ASK_MODULE).format(name=fact.name), f"{fact.name} is {where}. {fact.summary}"


def about_topics(topics: list[Topic], rng: random.Random) -> Iterator[Chat]:
    """Long answers: the opening paragraphs of a chapter of the language reference."""
    for topic in topics:
        plain = topic.title.replace('"', "")
        names = {topic.title, topic.title.replace('"', "`"), plain, f"the {plain}".replace("the The", "the")}
        if plain.startswith("The "):
            names.add("the " + plain[4:])
        for name in sorted(names):
            for ask in _ASK_TOPIC:
                answer = _opening(topic.paragraphs, rng.choice((600, 1200, 2400)))
                yield _maybe_system([turn("user", ask.format(title=name)), turn("assistant", answer)], rng)


def _opening(paragraphs: tuple[str, ...], limit_chars: int) -> str:
    kept: list[str] = []
    for paragraph in paragraphs:
        if kept and sum(map(len, kept)) + len(paragraph) > limit_chars:
            break
        kept.append(paragraph)
    return "\n\n".join(kept)


def small_talk(rng: random.Random, repeats: int) -> Iterator[Chat]:
    """Greetings, questions about the model, counting and small sums."""
    for _ in range(repeats):
        for answer, questions in _SMALL_TALK.items():
            for question in questions:
                yield _maybe_system([turn("user", question), turn("assistant", answer)], rng)
    for _ in range(repeats * 20):
        question, answer = counting_pair(rng)
        yield _maybe_system([turn("user", question), turn("assistant", answer)], rng)


def counting_pair(rng: random.Random) -> tuple[str, str]:
    """A question whose answer can be computed: counting or a sum below 100."""
    if rng.random() < 0.5:
        last = rng.randint(3, 60)
        ask = rng.choice(("Count to {n}.", "Count from 1 to {n}.", "count to {n}", "Count from one to {n}"))
        return ask.format(n=last), ", ".join(str(n) for n in range(1, last + 1)) + "."
    left, right = rng.randint(0, 49), rng.randint(0, 49)
    ask = rng.choice(("What is {a} + {b}?", "{a} + {b} = ?", "Add {a} and {b}.", "what is {a} plus {b}?"))
    return ask.format(a=left, b=right), f"{left} + {right} = {left + right}."


def conversations(facts: list[Fact], rng: random.Random, count: int) -> Iterator[Chat]:
    """Chats of two to twelve turns, so that the model has seen long histories (and prefix caches work)."""
    known = [fact for fact in facts if fact.summary]
    famous = [fact for fact in known if fact.well_known]
    for _ in range(count):
        chat: Chat = []
        if rng.random() < 0.5:
            answer, questions = rng.choice(list(_SMALL_TALK.items()))
            chat += [turn("user", rng.choice(questions)), turn("assistant", answer)]
        for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 6, 8, 12))):
            if rng.random() < 0.15:
                question, answer = counting_pair(rng)
            else:
                fact = rng.choice(famous if rng.random() < 0.7 else known)
                question, answer = rng.choice(list(question_pairs(fact, rng)))
            chat += [turn("user", question), turn("assistant", answer)]
        yield _maybe_system(chat, rng)


def _maybe_system(chat: Chat, rng: random.Random) -> Chat:
    return [turn("system", rng.choice(_SYSTEM)), *chat] if rng.random() < 0.3 else chat
