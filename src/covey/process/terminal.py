"""Text that a model or a data set wrote, made safe to show in a terminal."""

import re
import unicodedata

# Complete escape sequences: CSI, OSC / DCS / APC / PM / SOS up to their end, and two-character escapes.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x90\x98\x9c-\x9f]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"
)
_ALLOWED = "\n\t"


def safe(text: str, *, keep_lines: bool = True) -> str:
    """Text without control sequences and without characters that change the reading direction.

    Escape sequences are removed; other control characters become their visible picture (`␛`, `␀`); characters that turn the
    direction of text, and lone surrogates, become `�`. Line ends and tabs stay, or become spaces without `keep_lines`.

    >>> safe("a\\x1b[31mred\\x1b]8;;http://x\\x07b\\x00")
    'aredb␀'
    """
    text = _SEQUENCE.sub("", text.replace("\r\n", "\n"))
    text = "".join(character if character in _ALLOWED else _visible(character) for character in text)
    return text if keep_lines else " ".join(text.split())


def _visible(character: str) -> str:
    kind = unicodedata.category(character)
    if kind == "Cc":
        return chr(0x2400 + ord(character)) if ord(character) < 0x20 else "␡" if character == "\x7f" else "�"
    is_turning = unicodedata.bidirectional(character) in {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    return "�" if kind == "Cs" or is_turning or character in "\u2028\u2029\u200e\u200f\u061c" else character
