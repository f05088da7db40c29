"""Columns that describe rows: checked by hand, by another formula, and on the shipped model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import datasets
import pytest
import torch

from covey.cli import main
from covey.data import PromptStream, load
from covey.data.features import add_features, readability
from covey.data.features.columns import Embedder, relevance
from covey.errors import DataError
from kit import tiny_model, tiny_tokenizer

CHILD = "The cat sat on the mat. It was warm."
PAPER = "Heterogeneous organizational methodologies necessitate comprehensive interdisciplinary investigation."


def table() -> datasets.Dataset:
    rows = [{"prompt": CHILD, "answer": CHILD}, {"prompt": PAPER, "answer": "no"}, {"prompt": "¿Cuántas manzanas tiene ella si él le da más de las que son para su casa?", "answer": ""}]  # fmt: skip
    return datasets.Dataset.from_list(rows)


def test_readability_is_fleschs_formula():
    # 9 words, 2 sentences, 9 syllables
    assert readability(CHILD) == pytest.approx(206.835 - 1.015 * 9 / 2 - 84.6 * 9 / 9)
    assert readability("Make the home.") == pytest.approx(206.835 - 1.015 * 3 - 84.6)  # no silent e is spoken
    assert readability(PAPER) < 0 < readability(CHILD)
    assert readability("") is None
    assert readability("12 + 3 = ?") is None


def test_features_of_text_are_added_beside_the_rows():
    found = add_features(table(), ["length", "language", "readability"])
    assert found.column_names == ["prompt", "answer", "length", "language", "readability"]
    assert found["length"][:2] == [len(CHILD), len(PAPER)]
    assert found["language"][2] == "es"
    assert found["prompt"] == table()["prompt"]


def test_length_is_in_tokens_with_a_tokenizer_and_reads_messages():
    chat = datasets.Dataset.from_list(
        [{"prompt": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}]
    )
    tokenizer = tiny_tokenizer()
    assert add_features(chat, ["length"])["length"] == [len("ab\ncd")]
    assert add_features(chat, ["length"], tokenizer=tokenizer)["length"] == [len(tokenizer("ab\ncd")["input_ids"])]


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder(tiny_model("qwen2").base_model.eval(), tiny_tokenizer(), max_tokens=32)


def test_vectors_are_means_of_hidden_states_whatever_the_batch(embedder: Embedder):
    texts = [CHILD, "abc", PAPER, ""]
    vectors = embedder(texts)
    ids = embedder.tokenizer("abc", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        mean = embedder.model(ids).last_hidden_state[0].mean(0)
    assert torch.allclose(vectors[1], mean / mean.norm(), atol=1e-5)
    assert torch.allclose(vectors, embedder(texts, batch_size=1), atol=1e-5)
    assert vectors.norm(dim=-1).tolist() == pytest.approx([1, 1, 1, 0], abs=1e-5)


def test_relevance_is_the_cosine(embedder: Embedder):
    found = add_features(table(), ["relevance", "embedding"], embedder=embedder)
    assert found["relevance"][0] == pytest.approx(1.0, abs=1e-5)
    assert found["relevance"][1] < 0.999
    assert found["relevance"][2] == 0.0  # no answer
    assert len(found["embedding"][0]) == 32
    assert relevance(torch.eye(2), torch.tensor([[0.0, 1.0], [0.0, 1.0]])) == [0.0, 1.0]


def test_pass_rates_become_difficulty():
    found = add_features(table(), ["difficulty", "pass_rate"], pass_rates=lambda dataset: [1.0, 0.25, math.nan])
    assert found["pass_rate"] == [1.0, 0.25, None]
    assert found["difficulty"] == [0.0, 0.75, None]


@pytest.mark.parametrize(
    "names, options, sentence",
    [
        (["lenght"], {}, "no feature.*Did you mean length"),
        (["relevance"], {}, "need an embedding model"),
        (["difficulty"], {}, "need a model and a reward"),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_sentence(names, options, sentence):
    with pytest.raises(DataError, match=sentence):
        add_features(table(), names, **options)


def test_a_column_of_the_same_name_is_kept_unless_told():
    data = table().add_column("length", [1, 2, 3])
    with pytest.raises(DataError, match="has a column 'length' already"):
        add_features(data, ["length"])
    assert add_features(data, ["length"], overwrite=True)["length"][0] == len(CHILD)


def test_the_command_grades_prompts_by_the_shipped_model_and_a_curriculum_reads_them(tmp_path: Path, capsys):
    output = tmp_path / "graded.jsonl"
    words = ["features", "demo", "--features", "length,difficulty", "--model", "demo", "--reward", "demo", "--max-prompts", "24",
             "--num-samples", "4", "--max-tokens", "12", "--output", str(output)]  # fmt: skip
    assert main(words) == 0
    told = capsys.readouterr()
    assert "24 rows" in told.out
    assert "Creating json" not in told.err, "a file that is written at once needs no bar"
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert {row["difficulty"] for row in rows} <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert len({row["difficulty"] for row in rows}) > 1  # some are harder than others
    graded = load(output)
    prompts = PromptStream(graded, tiny_tokenizer(), curriculum="difficulty", seed=0).take(24)
    order = [prompt.columns["difficulty"] for prompt in prompts]
    assert order == sorted(order)
    assert main(words) == 2  # the file is there already
    assert "graded.jsonl is there already" in capsys.readouterr().err


def test_the_rows_of_a_mixture_get_their_own_pass_rates(tmp_path: Path):
    for name, answers in (("a", "10"), ("b", "01100111")):
        rows = [{"prompt": f"{name} {i}", "answer": answer} for i, answer in enumerate(answers)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.py").write_text(
        "def right(completions, answer, **columns):\n    return [float(a) for a in answer]\n"
    )
    output, sets = tmp_path / "graded.jsonl", f"0.5*{tmp_path}/a.jsonl + 0.5*{tmp_path}/b.jsonl"
    words = ["features", sets, "--features", "pass_rate", "--model", "demo", "--reward", f"{tmp_path}/r.py:right",
             "--num-samples", "1", "--max-tokens", "1", "--output", str(output)]  # fmt: skip
    assert main(words) == 0
    graded = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["pass_rate"] for row in graded] == [float(row["answer"]) for row in graded]


@pytest.mark.parametrize(
    "words, sentence",
    [
        ([], "needs a data set"),
        (["demo"], "needs --features"),
        (["demo", "--features", "length"], "--output is missing: name a file that ends in .jsonl or .parquet."),
        (["demo", "--features", "length", "--output", "x.txt"], "must be a file that ends in .jsonl or .parquet"),
        (
            ["demo", "--features", "difficulty", "--output", "x.jsonl"],
            "need --model, which writes the answers, and --reward",
        ),
        (["demo", "--features", "embedding", "--output", "x.jsonl"], "need --embedding-model"),
    ],
)
def test_the_command_says_what_is_missing(words, sentence, capsys):
    assert main(["features", *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("place", ["a-file/rows.jsonl", "folder.jsonl"])
def test_an_output_that_cannot_be_written_is_told_before_the_rows_are_read(place, tmp_path, capsys):
    (tmp_path / "a-file").touch()
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "a.jsonl").write_text("no rows")
    words = [str(tmp_path / "a.jsonl"), "--features", "length", "--output", str(tmp_path / place), "--overwrite"]
    assert main(["features", *words]) == 74
    assert f"{tmp_path / place} cannot be written" in capsys.readouterr().err


def test_rows_that_cannot_be_described_leave_the_file_that_was_there(tmp_path):
    data, path = tmp_path / "a.jsonl", tmp_path / "out" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text("earlier")
    data.write_text("no rows")
    assert main(["features", str(data), "--features", "length", "--output", str(path), "--overwrite"]) == 2
    assert [file.read_text() for file in path.parent.iterdir()] == ["earlier"]
