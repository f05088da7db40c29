"""The page of alerts knows every rule, action and option."""

from pathlib import Path

from covey.config.alerts import ALERT_ACTIONS, ALERT_RULES
from covey.config.options import GROUPS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "alerts.md").read_text()
TROUBLES = (DOCS / "troubleshooting.md").read_text()


def test_every_rule_has_one_entry_and_a_remedy_that_it_links_to():
    entries = {rule: PAGE.count(f"\n| [`{rule}`](troubleshooting.md#{rule}) (") for rule in ALERT_RULES}
    remedies = {rule: TROUBLES.count(f"\n### {rule}\n") for rule in ALERT_RULES}
    assert entries == remedies == dict.fromkeys(ALERT_RULES, 1)


def test_every_rule_is_found_by_what_is_seen():
    by_symptom = TROUBLES[: TROUBLES.index("\n## ")]
    assert [rule for rule in ALERT_RULES if f"(#{rule})" not in by_symptom] == []


def test_every_action_and_option_is_explained():
    assert [name for name in (*ALERT_ACTIONS, *GROUPS["alerts"]) if f"\n| `{name}` | " not in PAGE] == []
