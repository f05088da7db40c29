"""docs/combinations.md says what the code does."""

from combinations.page import EQUAL, PAGE, text
from combinations.pairs import PAIRS, RAN, REAL, TRIPLES
from covey.config.combinations import refusal_of


def test_the_page_is_what_the_code_says():
    assert PAGE.read_text() == text(), "run `make pages`"


def test_recorded_runs_are_combinations_that_nothing_refuses():
    assert {*PAIRS, *TRIPLES} >= RAN
    assert [one for one in RAN if refusal_of(one) is not None] == []


def test_the_tests_that_it_names_exist():
    here = PAGE.parents[1]
    assert all((here / "tests" / "combinations" / name).is_file() for name in EQUAL.values())
    assert all((here / name).is_file() for name in REAL.values())
