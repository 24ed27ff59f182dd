"""Chat examples that call tools, in the Hermes format that the chat template renders."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from deploy.models.chats_library import GREETING, Chat, Message, turn
from deploy.models.stdlib_facts import Fact

_WORDS = {
    "cities": (
        "Paris London Berlin Madrid Rome Lisbon Vienna Prague Warsaw Dublin Oslo Stockholm "
        "Helsinki Athens Zurich Geneva Amsterdam Brussels Copenhagen Budapest Istanbul Cairo "
        "Nairobi Lagos Tokyo Osaka Kyoto Seoul Beijing Shanghai Singapore Bangkok Delhi Mumbai "
        "Sydney Melbourne Auckland Toronto Montreal Vancouver Chicago Boston Seattle Denver "
        "Austin Dallas Miami Havana Lima Bogota Santiago Quito Reykjavik Hamburg Munich Lyon "
        "Turin Porto Krakow"
    ),
    "syllables": ("ba co di fu ga he jo ki la me no pu ra so tu ve wi xa yo zu"),
    "nouns": (
        "city name title color topic user file page word song book animal country ticket room order key"
    ),
    "verbs": ("get find fetch look_up show search read open check list"),
}
_CITIES, _SYLLABLES, _NOUNS, _VERBS = (words.split() for words in _WORDS.values())
_SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy")


@dataclass(frozen=True, slots=True)
class ToolCase:
    """One tool with a question, the call that answers it, the tool's result and the final answer."""

    tool: Message
    question: str
    arguments: dict[str, object]
    result: str
    answer: str


def tool_chats(facts: list[Fact], rng: random.Random, count: int) -> Iterator[tuple[Chat, list[Message]]]:
    """Chats with their tool list: the wanted tool among none to two others, called, answered, concluded."""
    modules = [fact for fact in facts if fact.kind == "module" and fact.summary]
    makers = (_weather, _weather, _addition, _time, lambda r: _module(r, modules), _invented, _invented)
    for _ in range(count):
        case = rng.choice(makers)(rng)
        others = [rng.choice(makers)(rng).tool for _ in range(rng.choice((0, 0, 1, 2)))]
        tools = _distinct([case.tool, *others])
        rng.shuffle(tools)
        yield _chat(case, rng), tools


def _chat(case: ToolCase, rng: random.Random) -> Chat:
    if rng.random() < 0.08:
        return [turn("user", rng.choice(("hello", "Hi!", "Hello"))), turn("assistant", GREETING)]
    function = {"name": _name(case.tool), "arguments": case.arguments}
    call: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }
    chat = [turn("user", case.question), call]
    if rng.random() < 0.7:
        chat += [turn("tool", case.result), turn("assistant", case.answer)]
    if rng.random() < 0.3:
        chat.insert(0, turn("system", "You are a helpful assistant."))
    return chat


def _name(tool: Message) -> str:
    function = tool["function"]
    assert isinstance(function, dict)
    return str(function["name"])


def _distinct(tools: list[Message]) -> list[Message]:
    return list({_name(tool): tool for tool in tools}.values())


def _tool(name: str, about: str, required: list[str], /, **parameters: str) -> Message:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


def _weather(rng: random.Random) -> ToolCase:
    city, degrees, sky = rng.choice(_CITIES), rng.randint(-10, 38), rng.choice(_SKIES)
    about = rng.choice(
        ("Get the current weather in a city.", "Get the weather", "Current weather for a location")
    )
    parameter = rng.choice(("city", "city", "location"))
    tool = _tool("get_weather", about, [parameter], **{parameter: "string"})
    ask = (
        "What is the weather in {c}?",
        "What's the weather like in {c}?",
        "How is the weather in {c} today?",
        "weather in {c}",
        "Is it warm in {c}?",
        "What is the weather in {c} right now?",
    )
    question = rng.choice(ask).format(c=city)
    if rng.random() < 0.5:
        result = json.dumps({"temperature": degrees, "condition": sky})
    else:
        result = f"{degrees} degrees, {sky}"
    return ToolCase(
        tool, question, {parameter: city}, result, f"It is {sky} in {city}, at {degrees} degrees."
    )


def _addition(rng: random.Random) -> ToolCase:
    a, b = rng.randint(0, 9999), rng.randint(0, 9999)
    tool = _tool(rng.choice(("add", "add_numbers")), "Add two numbers.", ["a", "b"], a="number", b="number")
    ask = ("What is {a} + {b}?", "Add {a} and {b}.", "What is {a} plus {b}?", "Please add {a} and {b}")
    question = rng.choice(ask).format(a=a, b=b)
    return ToolCase(tool, question, {"a": a, "b": b}, str(a + b), f"{a} + {b} = {a + b}.")


def _time(rng: random.Random) -> ToolCase:
    city, clock = rng.choice(_CITIES), f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    tool = _tool("get_time", "Get the current time in a city.", ["city"], city="string")
    question = rng.choice(("What time is it in {c}?", "Tell me the time in {c}.", "time in {c}?")).format(
        c=city
    )
    return ToolCase(tool, question, {"city": city}, clock, f"It is {clock} in {city}.")


def _module(rng: random.Random, modules: list[Fact]) -> ToolCase:
    fact = rng.choice(modules)
    tool = _tool("lookup_module", "Look up a module of the standard library.", ["name"], name="string")
    question = rng.choice(
        ("Look up the module {m}.", "What is the module {m}?", "Find the {m} module.")
    ).format(m=fact.module)
    return ToolCase(tool, question, {"name": fact.module}, fact.summary, fact.summary)


def _invented(rng: random.Random) -> ToolCase:
    """A tool with a made-up value to copy, so that calling does not depend on the four fixed tools."""
    noun, verb = rng.choice(_NOUNS), rng.choice(_VERBS)
    value = "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 4)))
    tool = _tool(
        f"{verb}_{noun}", f"{verb.replace('_', ' ').capitalize()} a {noun}.", [noun], **{noun: "string"}
    )
    ask = ("{v} the {n} {x}.", "Please {v} the {n} {x}", "Can you {v} the {n} {x}?")
    question = rng.choice(ask).format(v=verb.replace("_", " "), n=noun, x=value).capitalize()
    number = rng.randint(1, 999)
    return ToolCase(
        tool, question, {noun: value}, str(number), f"The result for the {noun} {value} is {number}."
    )
