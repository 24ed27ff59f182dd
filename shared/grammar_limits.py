"""How large a grammar may be, told from its text: gateways and workers refuse the same. No I/O, no engine.

What a grammar costs an engine is not in its length: the guidance backend writes an array's `minItems` and `maxItems`
out, about 100 bytes an item of the one and 1,100 of the other. A billion took the host's memory. What no text shows
(references that are merged, schemas inside of grammars) workers find by trying: shared/engine/grammar_checks.py.
"""

import json
from functools import lru_cache
from typing import Any

from shared.wire.requests import StructuredSpec

MAX_GRAMMAR_CHARS = 128 << 10  # of a grammar, in any of its forms
MAX_ARRAY_ITEMS = 1 << 16  # all minItems and maxItems of a schema together: 70 MB and half a second at most
_BOUNDS = ("minItems", "maxItems")


def too_large(spec: StructuredSpec) -> str:
    """Why no engine shall see this grammar; "": none of what is looked at here. Without the field's name and a period.

    Cost: for a schema with such bounds, up to 20 ms once; the last ones are remembered.
    """
    text = spec.value
    if len(text) > MAX_GRAMMAR_CHARS:
        return f"the grammar exceeds {MAX_GRAMMAR_CHARS} characters"
    if spec.kind == "json_schema" and ("Items" in text or "\\" in text):  # "\" may spell it in escapes
        items = _array_items(text)
        if items > MAX_ARRAY_ITEMS:
            return (
                f"minItems and maxItems add up to {items}, at most {MAX_ARRAY_ITEMS} are allowed in a schema"
            )
    return ""


@lru_cache(maxsize=32)
def _array_items(text: str) -> int:
    """All bounds of arrays in this schema. 0 for what is no JSON, which the engine says better."""
    try:
        left: list[Any] = [json.loads(text)]
    except (ValueError, RecursionError):
        return 0
    total = 0
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        elif isinstance(node, dict):
            left += node.values()
            bounds = [node.get(key) for key in _BOUNDS]
            total += sum(bound for bound in bounds if type(bound) is int and bound > 0)
    return total
