"""Teachers of a run whose processes share out the tokens of each row: the run of one process."""

from __future__ import annotations

import pytest

from combinations.combined_run import apart, moved, policy, run, teacher_folder
from kit import rest_nightly, tiny_tokenizer
from teacher_server import serving

TERMS = {
    "served": lambda folder, url: (
        f"dapo, regularizer=distill(teacher='{url}', served_model_name='m', top_k=5, weight=0.5)"
    ),
    "teacher": lambda folder, url: f"dapo, regularizer=distill(teacher='{teacher_folder(folder)}', weight=0.5)",
    "own teacher": lambda folder, url: "dapo, regularizer=distill(teacher='policy', feedback='best')",
}


@pytest.mark.nightly
@pytest.mark.parametrize("term", rest_nightly(TERMS, 1))
def test_a_teacher_teaches_as_in_one_process(term, tmp_path):
    with serving(policy(seed=7), tiny_tokenizer()) as (url, requests):
        options = {"algorithm": TERMS[term](tmp_path, url)}
        run(tmp_path / "1", options=options)
        count = len(requests)
        run(tmp_path / "2", 2, options={**options, "parallelism_config": {"cp_size": 2}})
        assert (count > 0) == (term == "served")
        tries = 2 if count else 0  # at the start, of each process; one of the two sends the others
        assert len(requests) == 2 * count + tries
    assert moved(tmp_path / "1") > 1e-3
    assert apart(tmp_path / "1", tmp_path / "2") < 2e-6


@pytest.mark.slow
def test_a_server_that_goes_away_is_missed_by_both_processes_alike(tmp_path):
    with serving(policy(seed=7), tiny_tokenizer(), lasts=9) as (url, _):
        term = TERMS["served"](tmp_path, url).replace("top_k=5", "top_k=5, when_lost='skip'")
        log = run(tmp_path / "2", 2, options={"algorithm": term, "parallelism_config": {"cp_size": 2}})
    informed = [entry["teacher/informed"] for entry in log if "teacher/informed" in entry]
    assert informed[0] == 1.0
    assert informed[-1] < 1.0


@pytest.mark.nightly
def test_a_server_that_is_gone_ends_both_processes_with_its_sentence(tmp_path):
    with serving(policy(seed=7), tiny_tokenizer(), lasts=9) as (url, _):
        term = TERMS["served"](tmp_path, url).replace("top_k=5", "top_k=5, request_seconds=1")
        with pytest.raises(AssertionError) as raised:
            run(tmp_path / "2", 2, options={"algorithm": term, "parallelism_config": {"cp_size": 2}})
    assert str(raised.value).count("Start the teacher's server again, and resume the run.") >= 2
