"""Pages that list things list all of them, and links between pages lead somewhere."""

import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from covey.config import options

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_pages_of_options_are_those_of_the_declarations():
    spec = importlib.util.spec_from_file_location("option_tables", ROOT / "docs" / "option_tables.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.FROM_TRL.read_text()
    assert script.with_tables(page) == page, "docs/from-trl.md is out of date: make pages"
    assert script.every_option() == script.EVERY_OPTION.read_text(), "docs/options.md is out of date: make pages"
    for name, said in {**options.REFUSED, **options.INERT, **options.RENAMED}.items():
        assert f"| `{name}` | {said} |" in page


def test_links_between_pages_lead_somewhere():
    links = [(page, *found) for page in PAGES for found in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", prose(page))]
    broken = [
        f"{page.relative_to(ROOT)} links to {target}#{anchor}"
        for page, target, anchor in links
        if "://" not in target and not leads_somewhere((page.parent / target).resolve() if target else page, anchor)
    ]
    assert len(links) > 200
    assert not broken, "\n" + "\n".join(broken)


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^ *```.*?^ *```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def leads_somewhere(target: Path, anchor: str) -> bool:
    return target.exists() and (not anchor or anchor in anchors(target))


@cache
def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as repositories and the site make them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("folder", ["docs", "docs/zh"])
def test_the_index_lists_every_page_once(folder):
    """The site's navigation is made of it."""
    linked = re.findall(
        r"\]\(([a-z/-]+\.md)\)", (ROOT / folder / "index.md").read_text().split("\n\n| ")[-1].split("\n\n")[0]
    )
    there = [page.relative_to(ROOT / folder).as_posix() for page in (ROOT / folder).rglob("*.md")]
    pages = [name for name in there if name != "index.md" and not (folder == "docs" and re.match("zh/(?!index)", name))]
    assert sorted(linked) == sorted(pages)


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "zh").glob("*.md")), ids=lambda page: page.name)
def test_a_translated_page_has_the_code_of_its_original(page):
    english = [ROOT / "docs" / place / page.name for place in ("tutorials", ".")]
    original = next(found for found in english if found.exists())
    fenced = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
    assert fenced.findall(page.read_text()) == (fenced.findall(original.read_text()) if page.name != "index.md" else [])


def test_the_page_on_speed_is_one_page():
    before, rest = (ROOT / "docs" / "performance.md").read_text().split("<!-- gpu: begin -->")
    lines = (before + rest.split("<!-- gpu: end -->")[1]).splitlines()  # without the tables that `make gpu` writes
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 160] == []
