"""A self-contained HTML page, without scripts."""

from html import escape

from covey.process.terminal import safe

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page_of(title: str, style: str, body: str) -> str:
    """The whole page around a body whose texts are escaped."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(title)}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def text(value: object) -> str:
    """Escaped, without characters that a terminal or a reader would be misled by."""
    return escape(safe(str(value)))
