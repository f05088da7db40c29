"""Plain words: a sentence of a docstring or comment begins with the name of the thing in the field, not with a relative word."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator

from sources import FILES, SRC, nodes_of, text_of

BEGINS_BADLY = re.compile(r"(?:^|[.?!] )(?:What|Whether|Whoever|Whatever|Whose|Nobody)\b", re.IGNORECASE)

MAY_BEGIN_BADLY = re.compile(r"#.*\b(?:What|Whether|Whoever|Whatever|Whose|Nobody)\b", re.IGNORECASE)


def docstrings_of(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, those of attributes included; the text on one line."""
    for node in nodes:
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield from paragraphs_of(statement.lineno, value.value)


def paragraphs_of(line: int, text: str) -> Iterator[tuple[int, str]]:
    """Line and text of each paragraph, joined into one line, so that a sentence may begin anywhere within."""
    for paragraph in re.finditer(r"(?:[^\n]|\n(?!\s*\n))+", text):
        yield line + text[: paragraph.start()].count("\n"), " ".join(paragraph[0].split())


def comments_of(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every comment; lines of comments that follow each other are one text."""
    if not MAY_BEGIN_BADLY.search(source):  # taking a file apart is slow
        return
    first, last, text = 0, 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, words = token.start[0], token.string.lstrip("#!: ")
        is_alone = not token.line[: token.start[1]].strip()
        if is_alone and text and line == last + 1:
            text, last = f"{text} {words}", line
            continue
        if text:
            yield first, text
        first, last, text = line, line, words
    if text:
        yield first, text


def comments_of_cpp(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every `//` comment of C++; lines of comments that follow each other are one text."""
    text, first = "", 0
    for line, content in enumerate([*source.splitlines(), ""], 1):
        code, _, words = content.partition("//")
        if text and words and not code.strip():
            text = f"{text} {words.strip()}"
            continue
        if text:
            yield first, text
        text, first = words.strip(), line


def offences_of(source: str, nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    for line, text in [*docstrings_of(nodes), *comments_of(source)]:
        if BEGINS_BADLY.search(text):
            yield line, text


def test_the_check_finds_docstrings_attribute_docstrings_and_comments():
    source = (
        '"""Fine. Whether\nit holds."""\nclass A:\n    x: int = 0\n    """What it is."""\n'
        "    # a comment. Nobody reads it\n    y = 1  # whose value\n    z = 2  # says what it is; whether it holds\n"
    )
    assert [line for line, _ in offences_of(source, ast.walk(ast.parse(source)))] == [1, 5, 6, 7]


def test_no_sentence_of_a_comment_in_cpp_begins_with_a_relative_word():
    assert list(comments_of_cpp("int a;  // of b. What\n// it is\nint b;")) == [(1, "of b. What it is")]
    files = sorted((SRC / "kernels" / "cpp").iterdir())
    assert files
    offences = [
        f"{file.name}:{line}: {text[:100]}"
        for file in files
        for line, text in comments_of_cpp(file.read_text())
        if BEGINS_BADLY.search(text)
    ]
    assert not offences, "\n" + "\n".join(offences)


def test_no_sentence_of_a_docstring_or_comment_begins_with_a_relative_word():
    offences = [
        f"{file.relative_to(SRC)}:{line}: {text[:100]}"
        for file in FILES
        for line, text in offences_of(text_of(file), nodes_of(file))
    ]
    assert not offences, "\n" + "\n".join(offences)
