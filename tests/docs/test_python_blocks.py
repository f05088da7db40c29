"""The Python of the pages runs, block after block, as a reader would type it.

A model of the hub becomes the one that ships with Covey, and a run takes one step. A block that needs a server, a network or a
large model stands below a comment, `<!-- not run: why -->`: its imports are made, and the arguments of its calls are compared with
the signatures. What a page takes as given stands in `GIVEN` and `names_of`.
"""

import ast
import dataclasses
import inspect
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from covey import GRPOConfig, GRPOTrainer, cli, demo
from covey.errors import ConfigError
from covey.rewards.builtin.registry import resolve

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
BLOCK = re.compile(
    r"^(?P<not_run><!-- not run: [^\n]+ -->\n)?(?P<fence> *```python)\n(?P<code>.*?)^ *```", re.DOTALL | re.MULTILINE
)
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if BLOCK.search(page.read_text())
    and "zh" not in page.relative_to(ROOT).parts  # the same code as in English: tests/house/test_docs.py
]
ROWS = [{"prompt": f"{n} + 1 =", "question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(16)]


def the_demo(folder):
    """A first run in runs/first, as on the page before."""
    run_blocks(ROOT / "docs" / "tutorials" / "first-run.md", {})


def three_models(folder):
    """Models of one base in a, b and base."""
    for name in ("a", "b", "base"):
        shutil.copytree(demo.model_path(), folder / name)


def rows_on_disk(folder):
    """train.jsonl and test.jsonl."""
    for name, rows in (("train", ROWS), ("test", [{**row, "question": f"{row['question']} ?"} for row in ROWS[:4]])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def solutions_on_disk(folder):
    """solutions.jsonl, with a prompt and a completion a row."""
    rows = [{"prompt": row["prompt"], "completion": f" {row['answer']}"} for row in ROWS]
    (folder / "solutions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def questions_on_disk(folder):
    """train.jsonl, as the first block of the tutorial before writes it."""
    exec(BLOCK.search((TUTORIALS / "your-data.md").read_text())["code"], {})


def ideas_on_disk(folder):
    """ideas.py, with the first two blocks of the page."""
    blocks = [found["code"] for found in BLOCK.finditer((TUTORIALS / "your-algorithm.md").read_text())]
    (folder / "ideas.py").write_text("\n".join(blocks[:2]))


GIVEN = {
    "docs/sft.md": solutions_on_disk,
    "docs/tutorials/reading-a-run.md": the_demo,
    "docs/merging.md": three_models,
    "docs/data-check.md": rows_on_disk,
}
BEFORE = {"your-data.md": lambda folder: None, "your-reward.md": questions_on_disk, "your-algorithm.md": ideas_on_disk}
"""Tutorials whose commands run one after another, and what the reader has by then."""


def names_of(page):
    """What the prose of a page calls a model, a data set and so on."""
    from datasets import Dataset

    chats = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"], "room": "a"} for row in ROWS
    ]
    if page == "docs/tools.md":
        return {
            "model": str(demo.model_path()),
            "dataset": Dataset.from_list(chats),
            "args": GRPOConfig("runs/given"),
            "right_answer": lambda completions, **columns: [0.0] * len(completions),
        }
    return {"GRPOConfig": GRPOConfig, "GRPOTrainer": GRPOTrainer}


def small(code):
    """A block that takes a second."""
    code = re.sub(r'"Qwen/[\w.-]+"', repr(str(demo.model_path())), code)
    code = re.sub(r"max_steps=\d+", "max_steps=1", code)
    if "max_steps" not in code:
        code = re.sub(r"^trainer\.(train|save_model)\(.*\)$", "", code, flags=re.MULTILINE)
    return re.sub(r"\bGRPOTrainer\(\.\.\., ", "replaced(", code)


def run_blocks(page, names):
    """Run the blocks of a page in one namespace; returns it."""
    names |= {"replaced": lambda **named: inspect.signature(GRPOTrainer).bind("model", "math", **named)}
    text = page.read_text()
    for found in BLOCK.finditer(text):
        code = "\n" * (text.count("\n", 0, found.start("fence")) + 1) + found["code"]
        if found["not_run"]:
            look_at(ast.parse(code), names)
        else:
            exec(compile(small(code), str(page), "exec"), names)
    return names


def look_at(tree, names):
    """Make the imports of a block, and compare its calls of what has a name with the signatures."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) and ast.unparse(node).split()[1].split(".")[0] == "covey":
            exec(ast.unparse(node), names)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = names.get(call.func.id) if isinstance(call.func, ast.Name) else None
        if called is GRPOConfig:  # takes any name, and says itself which it does not know
            unknown = {word.arg for word in call.keywords} - {field.name for field in dataclasses.fields(GRPOConfig)}
            assert not unknown, unknown
        elif called is not None:
            by_name = [word.value for word in call.keywords if word.arg == "reward_funcs"]
            for reward in (value.value for value in by_name if isinstance(value, ast.Constant)):
                resolve(reward)
            inspect.signature(called).bind_partial(
                *call.args, **{word.arg: word.value for word in call.keywords if word.arg}
            )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory whose files can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_pages_have_code():
    assert len(PAGES) >= 18


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_the_python_of_a_page_runs(page, folder):
    place = page.relative_to(ROOT).as_posix()
    GIVEN.get(place, lambda folder: None)(folder)
    names = run_blocks(page, names_of(place))
    if isinstance(names.get("trainer"), GRPOTrainer) and re.search(r"max_steps=\d", page.read_text()):
        assert names["trainer"].state.global_step == 1


def short(line):
    """A command that takes seconds, as words."""
    words = shlex.split(re.sub(r"Qwen/[\w.-]+", str(demo.model_path()), line).replace("--seeds 5", ""))[1:]
    if words[0] == "train" and "--dry-run" not in words:
        sizes = "--per-device-train-batch-size 8 --num-generations 4" if "demo" in words else ""
        words += f"--max-steps 1 --max-completion-length 4 {sizes}".split()
        words += (
            ["--per-device-eval-batch-size", "64", "--num-generations-eval", "1"] if "--eval-dataset" in words else []
        )
    return [*words, "--max-tokens", "4", "--num-samples", "2"] if words[0] == "features" else words


@pytest.mark.slow
@pytest.mark.parametrize("page", BEFORE)
def test_the_commands_of_a_tutorial_run_in_their_order(page, folder, capsys):
    BEFORE[page](folder)
    names = {}
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```", (TUTORIALS / page).read_text(), re.DOTALL | re.MULTILINE):
        if language == "python":
            exec(small(code), names)
        for line in code.splitlines() if language == "bash" else ():
            status = cli.main(short(line))
            assert status == 0, (line, capsys.readouterr().err)


def test_a_reward_that_does_not_exist_is_noticed_in_a_block_that_is_not_run():
    with pytest.raises(ConfigError, match="'maths' is no built-in reward"):
        look_at(ast.parse("trainer = GRPOTrainer(reward_funcs='maths')"), {"GRPOTrainer": GRPOTrainer})


def test_a_wrong_option_is_noticed_in_a_block_that_is_not_run():
    with pytest.raises(AssertionError, match="learning_rat"):
        look_at(ast.parse("args = GRPOConfig('runs/x', learning_rat=1)"), {"GRPOConfig": GRPOConfig})
