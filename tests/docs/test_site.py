"""The site's navigation: each language has its own, and links between the languages lead to what is built."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("site_of_docs", ROOT / "docs/site.py")
site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site)
CHINESE = re.compile("[\u4e00-\u9fff]")


def test_the_navigation_of_chinese_pages_is_chinese(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "SITE", tmp_path)
    (tmp_path / "pages-zh").symlink_to(ROOT / "docs" / "zh")
    topics = site.chinese_navigation()
    titles = [title for topic in topics for entries in topic.values() for entry in entries for title in entry]
    assert len(titles) >= 11
    assert [
        title for title in [*titles, *(name for topic in topics for name in topic)] if not CHINESE.search(title)
    ] == []


def test_english_navigation_has_no_chinese_page():
    pages = [page for pages in site.sections(ROOT / "docs/index.md").values() for page in pages]
    assert len(pages) > 50
    assert [page for page in pages if page.startswith("zh/")] == []


def test_links_stay_in_a_language_and_lead_to_what_is_built_across():
    english, chinese = site.PAGES / "plan.md", site.CHINESE / "plan.md"
    assert site.between(chinese, site.CHINESE / "index.md") == "plan.md"
    assert site.between(english, site.CHINESE / "index.md") == "../plan.html"
    assert site.between(site.CHINESE / "index.md", site.PAGES / "index.md") == "zh/index.html"


def test_every_setting_of_the_chinese_site_replaces_a_line():
    settings = (ROOT / "docs/mkdocs.yml").read_text(encoding="utf-8")
    assert [line for line in site.OF_CHINESE if settings.count(line) != 1] == []


def test_links_named_by_files_get_the_titles_of_their_pages():
    docs = ROOT / "docs"
    sources = {page: site.PAGES / page.relative_to(docs) for page in docs.rglob("*.md")}
    text = site.on_site(docs / "index.md", site.PAGES / "index.md", sources)
    assert "[Options](options.md): every option" in text
    assert not re.search(r"\[[\w-]+\.md\]", text)
