"""Plain words: identifiers are the field's terms; a docstring or comment begins with the name of the thing, not with a relative word."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator

from sources import FILES, SRC, nodes_of, text_of

BEGINS_BADLY = re.compile(r"(?:^|[.?!] )(?:What|Whether|Whoever|Whatever|Whose|Nobody)\b", re.IGNORECASE)

PRIVATE = frozenset(
    ("found", "given", "said", "known", "wanted", "asked", "told", "kept", "own", "taught", "branched", "beside")
)
"""Words that say nothing of a value; none is a part of an identifier."""
PRIVATE_NAMES = frozenset(("one", "Against", "Compared", "_Desk", "_Hearing"))
WRITTEN = "said"
"""A key of events, alerts and findings as they are written: an attribute and a keyword of their classes."""
PUBLIC = {
    ("monitor/history.py", "said"),  # a parameter of `history.alert`, which users' detectors call
    ("doctor/data_check/clean_copy.py", "kept"),  # a key of `covey data clean --json`
    ("cli/data.py", "kept"),
    ("rollout/vllm/client.py", "NOT_FOUND"),  # http.HTTPStatus
    ("rollout/vllm/server.py", "NOT_FOUND"),
}

STILL_PRIVATE: dict[str, int] = {}
"""Uses of private words by room; a number may only fall. Rooms that are not here have none."""

MAY_BEGIN_BADLY = re.compile(r"#.*\b(?:What|Whether|Whoever|Whatever|Whose|Nobody)\b", re.IGNORECASE)


def private_uses_of(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of every use of an identifier with a private word."""
    for node in nodes:
        name = identifier_of(node)
        is_written = isinstance(node, ast.Attribute | ast.keyword) and name == WRITTEN
        if name and is_private(name) and not is_written:
            yield getattr(node, "lineno", 0), name


def identifier_of(node: ast.AST) -> str:
    """The identifier that a node binds, uses or passes by keyword; empty for other nodes. Fields of written classes are exempt."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.keyword(arg=str(name)):
            return name
        case ast.alias():
            return node.asname or ""
    return ""


def is_private(name: str) -> bool:
    return name in PRIVATE_NAMES or not PRIVATE.isdisjoint(name.lower().split("_"))


def written_fields_of(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Names of annotated class fields that are keys of written files, as in `said: str`."""
    for node in nodes:
        for statement in node.body if isinstance(node, ast.ClassDef) else ():
            target = statement.target if isinstance(statement, ast.AnnAssign) else None
            if isinstance(target, ast.Name) and target.id == WRITTEN:
                yield target


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


def test_the_check_finds_private_identifiers_and_leaves_written_keys():
    source = (
        "def taught(given, *, x):\n    for one in given:\n        f(known_ids=one.asked)\n"
        "class Alert:\n    said: str\n    own: int\nAlert(said=alert.said, twenty_one=1)\n"
    )
    nodes = list(ast.walk(ast.parse(source)))
    exempt = set(written_fields_of(nodes))
    uses = private_uses_of(node for node in nodes if node not in exempt)
    assert sorted(name for _, name in uses) == ["asked", "given", "given", "known_ids", "one", "one", "own", "taught"]


def test_identifiers_are_the_fields_terms():
    """The private words are in PRIVATE: a value is named by what it is, such as `rows`, `checkpoint` or `reply`."""
    uses: dict[str, list[str]] = {}
    for file in FILES:
        exempt = set(written_fields_of(nodes_of(file)))
        path = file.relative_to(SRC).as_posix()
        for line, name in private_uses_of(node for node in nodes_of(file) if node not in exempt):
            if (path, name) not in PUBLIC:
                uses.setdefault(path.partition("/")[0], []).append(f"{path}:{line}: {name}")
    more = {room: lines for room, lines in uses.items() if len(lines) > STILL_PRIVATE.get(room, 0)}
    counts = ", ".join(f"{room} {len(lines)} of {STILL_PRIVATE.get(room, 0)}" for room, lines in more.items())
    assert not more, f"{counts}\n" + "\n".join(line for lines in more.values() for line in lines)


def test_no_comment_or_docstring_says_beside():
    """Next to, in addition to, in the same folder as, at the same time as: the relation that is meant."""
    offences = [
        f"{file.relative_to(SRC)}:{line}: {text[:120]}"
        for file in FILES
        if file.relative_to(SRC).parts[0] not in STILL_PRIVATE and "beside" in text_of(file).lower()
        for line, text in [*docstrings_of(nodes_of(file)), *comments_of(text_of(file))]
        if re.search(r"\bbeside\b", text, re.IGNORECASE)
    ]
    assert not offences, "\n" + "\n".join(offences)
