"""The page of alerts knows every rule, action and option."""

from pathlib import Path

import pytest

from covey.config.alerts import ALERT_ACTIONS, ALERT_RULES
from covey.config.options import GROUPS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "alerts.md").read_text()
TROUBLES = (DOCS / "troubleshooting.md").read_text()


@pytest.mark.parametrize("rule", ALERT_RULES)
def test_every_rule_has_one_entry_and_a_remedy_that_it_links_to(rule):
    assert PAGE.count(f"\n| [`{rule}`](troubleshooting.md#{rule}) (") == 1
    assert TROUBLES.count(f"\n### {rule}\n") == 1


@pytest.mark.parametrize("rule", ALERT_RULES)
def test_every_rule_is_found_by_what_is_seen(rule):
    by_symptom = TROUBLES[: TROUBLES.index("\n## ")]
    assert f"(#{rule})" in by_symptom


@pytest.mark.parametrize("name", [*ALERT_ACTIONS, *GROUPS["alerts"]])
def test_every_action_and_option_is_explained(name):
    assert f"\n| `{name}` | " in PAGE
