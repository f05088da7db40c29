"""The documentation site out of the Markdown of this folder: `make docs`.

Pages are copied to .site/pages, with the README, CONTRIBUTING and CHANGELOG, a page of each example, and one of each public module,
whose text is its docstrings. The navigation is the table of index.md. Zensical makes .site/html of them. The pages of docs/zh are a site
of their own in .site/html/zh, with their navigation, search and language. Every link and anchor of the result is then followed. A
warning is an error.

    python docs/site.py            # build
    python docs/site.py --serve    # build, then show it at http://127.0.0.1:8000/
"""

from __future__ import annotations

import ast
import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[1]
DOCS, SITE = ROOT / "docs", ROOT / ".site"
PAGES, HTML = SITE / "pages", SITE / "html"
CHINESE = PAGES / "zh"
"""Place of the Chinese pages on the site; until the site is built they are in .site/pages-zh."""
OF_CHINESE = {
    "docs_dir: pages": "docs_dir: pages-zh",
    "site_dir: html": "site_dir: html/zh",
    "language: en": "language: zh",
    "link: index.html": "link: ../index.html",
    "link: zh/index.html": "link: index.html",
    "name: Dark": "name: 深色",
    "name: Light": "name: 浅色",
}
"""Lines of mkdocs.yml as the Chinese site has them."""
BESIDE = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the repository's root, under their names on the site."""
EXAMPLES, LANGUAGES = ROOT / "examples", {".py": "python", ".yaml": "yaml", ".sh": "bash", ".sbatch": "bash"}
MODULES = (
    "covey",
    "covey.algorithms",
    "covey.rewards",
    "covey.data",
    "covey.rollout",
    "covey.environments",
    "covey.serving",
    "covey.ensembles",
    "covey.merging",
    "covey.runs",
    "covey.testing",
    "covey.errors",
    "covey.types",
)
"""Modules whose public names the reference describes."""
LINK = re.compile(r"\]\(([^)\s#]*)(#[^)\s]*)?\)")
BY_FILE = re.compile(r"\[([\w-]+\.md)\]\(((?:[\w.-]+/)*\1)")
"""A link that is named as its file is."""


def main(arguments: list[str]) -> int:
    """Build the site; returns the exit code."""
    copy_pages()
    for settings in ("mkdocs.yml", "mkdocs-zh.yml"):
        built = subprocess.run(
            [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file", str(SITE / settings)],
            cwd=SITE,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        print(built.stdout.strip())
        if built.returncode:
            return built.returncode
    broken = [f"{page} is not in the table of its index" for page in unlisted()] + broken_links(HTML)
    broken += [f"{name} is public and has no docstring" for name, is_said in described().items() if not is_said]
    print("\n".join(broken) or f"{len(list(HTML.rglob('*.html')))} pages in {HTML}, every link leads somewhere")
    if not broken and "--serve" in arguments:
        serve()
    return 1 if broken else 0


def copy_pages() -> None:
    """Fill .site/pages."""
    shutil.rmtree(SITE, ignore_errors=True)
    sources = {page: PAGES / page.relative_to(DOCS) for page in sorted(DOCS.rglob("*.md"))}
    sources |= {ROOT / name: PAGES / new for name, new in BESIDE.items()}
    shown = {**sources, **{path: page_of_example(path) for path in examples()}}
    for source, target in sources.items():
        file_of(target).parent.mkdir(parents=True, exist_ok=True)
        file_of(target).write_text(on_site(source, target, shown), encoding="utf-8")
    for path, text in examples().items():
        page_of_example(path).parent.mkdir(parents=True, exist_ok=True)
        page_of_example(path).write_text(text, encoding="utf-8")
    for other in (*DOCS.glob("*.css"), *DOCS.rglob("*.png"), *DOCS.rglob("*.svg"), *DOCS.rglob("*.ipynb")):
        (PAGES / other.relative_to(DOCS)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(other, PAGES / other.relative_to(DOCS))
    shutil.copy(DOCS / "site.css", file_of(CHINESE / "site.css"))
    (PAGES / "reference").mkdir()
    for name, text in reference().items():
        (PAGES / "reference" / name).write_text(text, encoding="utf-8")
    settings = (DOCS / "mkdocs.yml").read_text(encoding="utf-8")
    write_settings("mkdocs.yml", settings, navigation())
    for line, chinese in OF_CHINESE.items():
        assert line in settings, f"docs/mkdocs.yml has no {line}"
        settings = settings.replace(line, chinese)
    write_settings("mkdocs-zh.yml", settings, chinese_navigation())


def file_of(target: Path) -> Path:
    """The file of a page until the site is built."""
    return SITE / "pages-zh" / target.relative_to(CHINESE) if target.is_relative_to(CHINESE) else target


def write_settings(name: str, settings: str, topics: list[dict[str, list]]) -> None:
    """Write the settings of a site with its navigation."""
    (SITE / name).write_text(f"{settings}\nnav: {json.dumps(topics, ensure_ascii=False)}\n", encoding="utf-8")


def navigation() -> list[dict[str, list]]:
    """Sections and their pages: the table of docs/index.md, and the reference."""
    code = [entry(page_of_example(path).relative_to(PAGES).as_posix()) for path in examples()]
    return [
        *(
            {topic: [*map(entry, pages), *(code if topic == "Examples" else [])]}
            for topic, pages in sections(DOCS / "index.md").items()
        ),
        {"Reference": ["reference/index.md", *(f"reference/{page_of(module)}" for module in MODULES)]},
    ]


def chinese_navigation() -> list[dict[str, list]]:
    """Sections and their pages: the table of docs/zh/index.md."""
    return [
        {topic: [entry(page, SITE / "pages-zh") for page in pages]}
        for topic, pages in sections(DOCS / "zh" / "index.md").items()
    ]


def sections(index: Path) -> dict[str, list[str]]:
    """Pages by topic out of the table of an index; a row without a topic belongs to the one above."""
    found: dict[str, list[str]] = {}
    topic = ""
    for row in re.findall(r"^\|(.*?)\|(.*)\|$", index.read_text(encoding="utf-8"), flags=re.MULTILINE):
        topic = row[0].strip(" *") or topic
        pages = [BESIDE.get(link.removeprefix("../"), link) for link in re.findall(r"\]\(([^)#]+\.md)\)", row[1])]
        found[topic] = found.get(topic, []) + [page for page in pages if not page.startswith("zh/")]
    found = {topic: pages for topic, pages in found.items() if pages}
    found[next(iter(found))].insert(0, "index.md")
    return found


def unlisted() -> list[str]:
    """Pages that the navigation leaves out."""
    left_out = []
    for folder, topics in ((PAGES, navigation()), (SITE / "pages-zh", chinese_navigation())):
        listed = json.dumps(topics)
        pages = [page.relative_to(folder).as_posix() for page in folder.rglob("*.md")]
        left_out += [page for page in pages if f'"{page}"' not in listed]
    return left_out


def entry(page: str, folder: Path = PAGES) -> dict[str, str]:
    """A page under the first words of its title."""
    if page == "readme.md":
        return {"Quick start": page}
    return {title_of(folder / page): page}


def title_of(page: Path) -> str:
    """The first words of a page's title."""
    title = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert title, f"{page} has no title"
    return re.split(r"[:\uff1a]", title[1])[0].replace("`", "")


def examples() -> dict[Path, str]:
    """Pages of code by their path in `examples`: one a file, and one a folder, with all of its files."""
    files = [path for path in sorted(EXAMPLES.rglob("*")) if path.suffix in LANGUAGES]
    code = {path: f"````{LANGUAGES[path.suffix]}\n{path.read_text(encoding='utf-8')}````\n" for path in files}
    pages = {path: f"# {path.relative_to(EXAMPLES).as_posix()}\n\n{code[path]}" for path in files}
    for folder in sorted({path.parent for path in files} - {EXAMPLES}):
        parts = [f"## {path.name}\n\n{code[path]}" for path in files if path.parent == folder]
        pages[folder] = "\n".join([f"# {folder.relative_to(EXAMPLES).as_posix()}/\n", *parts])
    return pages


def page_of_example(path: Path) -> Path:
    """The page of an example, or of a folder of them."""
    return PAGES / "code" / f"{path.relative_to(EXAMPLES).as_posix()}.md"


def on_site(source: Path, target: Path, sources: dict[Path, Path]) -> str:
    """A page with its links as they are on the site, named by titles instead of files; what the site has not, such as a folder of code, is named without a link."""

    def moved(link: re.Match[str]) -> str:
        path, anchor = link[1], link[2] or ""
        if not path or "://" in path or path.startswith("mailto:"):
            return link[0]
        found = (source.parent / path).resolve()
        if found == EXAMPLES:
            return f"]({between(PAGES / 'examples.md', target)})"
        if found in sources:
            return f"]({between(sources[found], target)}{anchor})"
        if found.is_relative_to(DOCS):  # a picture or a notebook
            return f"]({relative(PAGES / found.relative_to(DOCS), target.parent)}{anchor})"
        return f"]({between(PAGES / 'readme.md', target)})"

    def titled(link: re.Match[str]) -> str:
        page = (source.parent / link[2]).resolve()
        return f"[{title_of(page)}]({link[2]}" if page in sources else link[0]

    # a list or a table right below a paragraph is one on a repository's page, and must be one here
    text = source.read_text(encoding="utf-8").replace('"docs/pictures/', '"pictures/')  # the README's own are HTML
    return spaced(outside_code(text, lambda part: LINK.sub(moved, BY_FILE.sub(titled, part))))


def between(page: Path, target: Path) -> str:
    """The link to a page from another; to the site of the other language it leads to what is built."""
    is_other = page.is_relative_to(CHINESE) != target.is_relative_to(CHINESE)
    return relative(page.with_suffix(".html") if is_other else page, target.parent)


def outside_code(text: str, change) -> str:
    """The text with all but its fenced blocks changed."""
    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def spaced(text: str) -> str:
    """The text with an empty line before each list that follows a paragraph."""
    item = r"(?:[*-]|\d+\.) "
    return outside_code(
        text, lambda part: re.sub(rf"^(?!{item}|\s|\||#)(.+)\n(?={item})", r"\1\n\n", part, flags=re.MULTILINE)
    )


def relative(path: Path, start: Path) -> str:
    """The path as written in a page of the folder `start`."""
    up = 0
    while not path.is_relative_to(start):
        start, up = start.parent, up + 1
    return "../" * up + path.relative_to(start).as_posix()


def reference() -> dict[str, str]:
    """Pages of the reference by file name: the index, and one a module with a directive for each public name."""
    pages, rows = {}, ["# Python", "", "Every public name, from its docstring.", "", "| module | |", "|---|---|"]
    for module in MODULES:
        tree = ast.parse(module_file(module).read_text(encoding="utf-8"))
        said = (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")
        names = [
            name for name in public_names(tree) if f"{module}.{name}" not in MODULES and is_described(module, name)
        ]
        file = page_of(module)
        rows.append(f"| [`{module}`]({file}) | {said} |")
        pages[file] = "\n".join([f"# {module}", "", said, "", *(f"::: {module}.{name}\n" for name in names)])
    pages["index.md"] = "\n".join(rows) + "\n"
    return pages


def page_of(module: str) -> str:
    """The file of a module's page."""
    return f"{module.removeprefix('covey.')}.md"


def module_file(module: str) -> Path:
    """The source of a module."""
    path = ROOT / "src" / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public_names(tree: ast.Module) -> list[str]:
    """What `__all__` lists, else what the module defines without an underscore."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(one, ast.Name) and one.id == "__all__" for one in node.targets
        ):
            return list(ast.literal_eval(node.value))
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [name for name in defined if not name.startswith("_")]


@functools.cache
def described() -> dict[str, bool]:
    """Whether griffe finds a docstring, by full name of the public names; modules, which have pages of their own, are left out."""
    import griffe

    loader = griffe.GriffeLoader(search_paths=[str(ROOT / "src")])
    loader.load("covey")
    loader.resolve_aliases()
    found = {}
    for module in MODULES:
        for name in public_names(ast.parse(module_file(module).read_text(encoding="utf-8"))):
            try:
                one = loader.modules_collection[f"{module}.{name}"]
                if not one.is_module:
                    found[f"{module}.{name}"] = bool(one.docstring)
            except (KeyError, griffe.AliasResolutionError):
                found[f"{module}.{name}"] = False
    return found


def is_described(module: str, name: str) -> bool:
    """Whether the reference has something to say about a name."""
    return described().get(f"{module}.{name}", False)


class Page(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note what the tag links to and is called."""
        given = dict(attributes)
        self.anchors |= {value for key in ("id", "name") if (value := given.get(key))}
        self.links += [value for key in ("href", "src") if (value := given.get(key)) and tag != "base"]


def broken_links(folder: Path) -> list[str]:
    """Links of the site's pages that lead nowhere, one sentence each."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    return [
        f"{path.relative_to(folder.resolve())} links to {link}"
        for path, page in pages.items()
        if path.name != "404.html"
        for link in dict.fromkeys(page.links)
        if not leads_somewhere(path, link, pages)
    ]


def leads_somewhere(path: Path, link: str, pages: dict[Path, Page]) -> bool:
    """Whether a link of a page is to another site, or to a file or an anchor that exists."""
    if re.match(r"[a-z]+:|//", link):
        return True
    file, _, anchor = link.partition("#")
    target = (path.parent / unquote(file)).resolve() if file else path
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        return False
    return not anchor or target not in pages or unquote(anchor) in pages[target].anchors | {"__top"}


def serve() -> None:
    """Show the built site until Ctrl-C."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(HTML))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 8000), handler) as server:
        print("http://127.0.0.1:8000/")
        server.serve_forever()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
