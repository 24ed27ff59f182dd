"""A process that tries grammars out, each in a fork with little memory and time: what one takes, no text tells.

Run as a script, without the rest of Quire: it takes JSON lines {"kind", "value", "flexible"} (see StructuredSpec;
whether JSON may have blanks) and answers each with one line, the fault as a JSON string, "" for none. It ends with its
input.
"""

import json
import os
import resource
import sys

MEMORY_BYTES = 256 << 20  # beside what the process has before
CPU_S = 10  # of a core; 3,000 properties, more than a parser takes, need 2
MAX_FAULT_CHARS = 1_000
_FULL_ROW = "Current row has "
TOO_MUCH = (
    f"checking this grammar needs more than {MEMORY_BYTES >> 20} MiB of memory or {CPU_S} s of a processor"
)


def main() -> None:
    """Until the input ends."""
    import llguidance  # noqa: F401  before the forks: 0.2 s

    for line in sys.stdin.buffer:
        pid = os.fork()
        if pid == 0:
            _try(line)
        _, status = os.waitpid(pid, 0)
        if status:
            _answer(TOO_MUCH)


def _try(line: bytes) -> None:
    status = 1
    try:
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _answer(fault(**json.loads(line))[:MAX_FAULT_CHARS])
        status = 0
    finally:
        os._exit(status)


def _answer(text: str) -> None:
    os.write(1, json.dumps(text).encode() + b"\n")  # at once: whoever is killed has said nothing or all


def fault(kind: str, value: str, flexible: bool) -> str:
    """What the guidance backend would say of a grammar, now or at its first choice; "" when it takes it.

    Cost: milliseconds as a rule, but as much memory and time as the grammar likes.
    """
    from llguidance import LLMatcher, LLTokenizer, grammar_from

    try:
        if kind in ("json_schema", "json_object"):
            schema = value if kind == "json_schema" else '{"type": "object"}'
            grammar = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": flexible})
        else:
            grammar = grammar_from(kind, value)  # pyright: ignore[reportArgumentType]  the kinds are its own words
    except ValueError as error:
        return f"Grammar error: {error}"
    if found := LLMatcher.validate_grammar(grammar):
        return f"Grammar error: {found}"
    # Objects of more properties than a row of the parser has room for pass, and end with the first token that may
    # begin any of them. Bytes as tokens do as well as a model's: rows are counted byte by byte.
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    if forced := matcher.compute_ff_bytes():
        matcher.consume_tokens(list(forced))
    matcher.compute_bitmask()
    found = matcher.get_error().partition("\n")[0]  # then comes the parser's state
    return f"Grammar error: {found}" if _FULL_ROW in found else ""  # bytes know nothing of special tokens


if __name__ == "__main__":
    main()
