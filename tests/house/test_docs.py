"""Pages that list things list all of them, and links between pages lead somewhere."""

import importlib.util
import re
from pathlib import Path

from covey import GRPOTrainer, demo
from covey.config import options

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


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
    links = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())]
    broken = [
        f"{page.name} links to {target}"
        for page, target in links
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken, "\n" + "\n".join(broken)


def test_the_index_lists_every_page_once():
    linked = re.findall(r"\]\(([a-z-]+\.md)\)", (ROOT / "docs" / "index.md").read_text())
    pages = [page.name for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "index.md"]
    assert sorted(linked) == pages


def test_the_page_on_speed_is_one_page():
    lines = (ROOT / "docs" / "performance.md").read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 160] == []


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        small = block.replace("Qwen/Qwen2.5-0.5B-Instruct", str(demo.model_path())).replace("trainer.train()", "")
        small = re.sub(r"^GRPOTrainer\(\.\.\..*", "", small, flags=re.MULTILINE)
        exec(compile(small, "README.md", "exec"), names)
    assert isinstance(names["trainer"], GRPOTrainer)
    assert names["mine"].advantage is names["from_median"]
