"""Behaviours of TRL 1.16.0, as `recorded.json` has them, asked of Covey: all hold but those of `DIFFERS`, which the page lists too."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from probes import OWN_RUN, PROBES, World, compare, outcome

from kit import rest_nightly

pytestmark = pytest.mark.filterwarnings("ignore:.*previous-:UserWarning")  # runs into a folder that holds one
RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())["outcomes"]
PAGE = Path(__file__).parents[2] / "docs" / "from-trl.md"
DIFFERS = {
    "an_adapter_with_a_synchronised_reference": "which TRL refuses",
    "files_of_a_checkpoint_for_transformers": "`optimizer.pt`",
    "generation_kwargs_that_do_not_exist": "A misspelt name in `generation_kwargs`",
    "names_of_every_set_of_a_dict": "Every metric of a dict of evaluation sets",
    "options_saved_beside_the_model": "`training_args.bin`",
    "subclass_with_own_loss": "`compute_loss`, `_compute_loss`",
}
"""Probes whose outcome is another one here, and the words of docs/from-trl.md that say so."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World("covey", tmp_path_factory.mktemp("behaviours"))


@pytest.mark.slow
@pytest.mark.parametrize("name", rest_nightly(PROBES, set(PROBES) - set(OWN_RUN)))
def test_it_is_as_in_trl(name, world):
    problems = compare(RECORDED[name], outcome(world, name))
    if name in DIFFERS:
        assert problems, f"{name} holds now: take it off DIFFERS, and count it in docs/from-trl.md"
    else:
        assert not problems, f"{name}: {'; '.join(problems)}"


def test_the_page_counts_them_and_says_of_each_that_does_not_hold():
    assert set(RECORDED) == set(PROBES), "make record-trl"
    page = PAGE.read_text()
    held, asked = map(int, re.search(r"(\d+) of (\d+) behaviours", page).groups())
    assert (held, asked) == (len(PROBES) - len(DIFFERS), len(PROBES))
    assert not [name for name, words in DIFFERS.items() if words not in page]
    assert set(DIFFERS) <= set(PROBES)
