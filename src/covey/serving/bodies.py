"""JSON bodies of requests, read within bounds: text that can be written, finite numbers, brackets that are nested a little."""

import json
from typing import Any

from covey.files.bounded import MOST_DEPTH, json_depth
from covey.serving.errors import bad


def body_of(content: bytes) -> Any:
    """The value of a JSON body. Raises APIError 400 for anything that JSON or UTF-8 does not allow."""
    if json_depth(content) > MOST_DEPTH:
        raise bad(f"The body is nested more than {MOST_DEPTH} deep.")
    try:
        text = content.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse)
        if "\\u" in text:  # half of a pair of escapes is no character
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise bad("The body holds half of a surrogate pair, which is no character.") from error
    except (ValueError, RecursionError) as error:
        raise bad(f"The body is no JSON in UTF-8: {error}.") from error
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number in JSON")
