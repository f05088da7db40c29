"""Pages that list things list all of them, and links between pages lead somewhere."""

import re
from pathlib import Path

from covey import options

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_refused_and_inert_option_is_in_the_page_for_trl_users():
    page = (ROOT / "docs" / "from-trl.md").read_text()
    for name, said in {**options.REFUSED, **options.INERT}.items():
        assert f"| `{name}` | {said} |" in page, f"docs/from-trl.md does not say what becomes of {name}"


def test_links_between_pages_lead_somewhere():
    links = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())]
    broken = [
        f"{page.name} links to {target}"
        for page, target in links
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken, "\n" + "\n".join(broken)
