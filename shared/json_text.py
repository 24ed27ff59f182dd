"""JSON from files that people write or edit."""

import json
from typing import Any


def loads(text: str) -> Any:
    """As json.loads, but no string has half of a surrogate pair ("\\ud800"), which no file, message or terminal takes.

    Raises: ValueError, RecursionError.
    """
    found = json.loads(text)
    if "\\ud" in text.lower():  # else the text itself was UTF-8
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            near = error.object[max(0, error.start - 20) : error.start + 1]
            raise ValueError(f"{near!a} ends with half of a surrogate pair") from error
    return found
