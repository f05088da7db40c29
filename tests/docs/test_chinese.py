"""The Chinese pages keep up with the code: what they name exists, and every alert has its place."""

import re
from pathlib import Path

import pytest

from covey.algorithms.presets import PRESETS
from covey.config.alerts import ALERT_RULES

PAGES = Path(__file__).parents[2] / "docs" / "zh"
ALGORITHMS = (PAGES / "algorithms.md").read_text(encoding="utf-8")
TROUBLES = (PAGES / "troubleshooting.md").read_text(encoding="utf-8")


def test_presets_of_the_table_exist_and_hardly_any_is_left_out():
    table = ALGORITHMS.partition("## 预设")[2].partition("## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for cell in rows for name in re.findall(r"`(\w+)`", cell)]
    assert len(named) == len(set(named))
    assert set(named) <= set(PRESETS)
    assert len(named) >= 0.8 * len(PRESETS)  # new ones come to the English page first


@pytest.mark.parametrize("rule", ALERT_RULES)
def test_every_alert_has_a_remedy_and_is_found_by_what_is_seen(rule):
    assert TROUBLES.count(f"\n### {rule}\n") == 1
    assert f"(#{rule})" in TROUBLES[: TROUBLES.index("\n## ")]


def test_the_page_from_trl_counts_the_same_behaviours():
    held, of_trl = re.search(r"(\d+) of (\d+) behaviours", (PAGES.parent / "from-trl.md").read_text()).groups()
    assert f"{of_trl} 项行为" in (page := (PAGES / "from-trl.md").read_text(encoding="utf-8"))
    assert f"，{held} 项在这里完全一致" in page
