"""lm-eval and Inspect, each in an environment of its own, measure the shipped model through the endpoint as Covey does itself."""

import json
import os
import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey import demo
from covey.rollout import NativeSampler, SamplingParams
from serving.clients import foreign_environment, server

pytestmark = pytest.mark.nightly
COUNT = 40


@pytest.fixture(scope="module")
def problems():
    return [(row["prompt"][0]["content"], row["answer"]) for row in demo.rows("test", COUNT)]


@pytest.fixture(scope="module")
def sampler():
    tokenizer = AutoTokenizer.from_pretrained(demo.model_path())
    return NativeSampler(AutoModelForCausalLM.from_pretrained(demo.model_path(), dtype=torch.float32), tokenizer)


@pytest.fixture(scope="module")
def greedy_right(sampler, problems):
    """Which problems the model solves, greedily, by Covey's own sampler."""
    prompts = [[{"role": "user", "content": question}] for question, _ in problems]
    groups = {int(g.prompt.uid): g for g in sampler.sample(prompts, 1, SamplingParams(temperature=0, max_tokens=48))}
    ends = lambda p, answer: groups[p].completions[0].text.strip().endswith(f"#### {answer}")
    return [ends(p, answer) for p, (_, answer) in enumerate(problems)]


def run(python, *words, **environ):
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none", **environ}
    done = subprocess.run([str(python), *words], capture_output=True, text=True, timeout=600, env=environ)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def write_task(folder, name, rows, **task):
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        **task,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


def lm_eval(python, folder, model, task, arguments, *more):
    out = folder / "results"
    given = ",".join(f"{key}={value}" for key, value in arguments.items())
    run(python, "-m", "lm_eval", "run", "--model", model, "--model_args", given, "--tasks", task,
        "--include_path", str(folder), "--output_path", str(out), *more, HF_HOME=str(folder / "hf"))  # fmt: skip
    newest = max(out.rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    return json.loads(newest.read_text())["results"][task]


def test_lm_eval_generates_and_finds_the_accuracy_that_covey_finds(tmp_path, problems, greedy_right):
    python = foreign_environment("lmeval", "lm-eval[api]>=0.4.13,<0.5")
    write_task(
        tmp_path,
        "sums",
        [{"question": question, "answer": answer} for question, answer in problems],
        output_type="generate_until",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": ["\n\n"], "max_gen_toks": 48, "temperature": 0},
        filter_list=[{"name": "number", "filter": [{"function": "regex", "regex_pattern": r"#### (-?\d+)\s*$"}, {"function": "take_first"}]}],
        metric_list=[{"metric": "exact_match"}],
    )  # fmt: skip
    with server("--sampler-dtype", "float32") as (_, url):
        arguments = {"model": "demo", "base_url": f"{url}/chat/completions", "num_concurrent": 8}
        found = lm_eval(python, tmp_path, "local-chat-completions", "sums", arguments, "--apply_chat_template")
    assert found["exact_match,number"] == pytest.approx(sum(greedy_right) / COUNT)


def test_lm_eval_ranks_choices_by_the_log_likelihoods_of_a_forward_pass(tmp_path, sampler, problems):
    python = foreign_environment("lmeval", "lm-eval[api]>=0.4.13,<0.5")
    rows = []
    for question, answer in problems:
        choices = [f" {int(answer) + shift}" for shift in (0, 1, -2, 10)]
        rows.append({"question": question, "choices": choices, "label": 0})
    write_task(
        tmp_path,
        "choices",
        rows,
        output_type="multiple_choice",
        doc_to_target="label",
        doc_to_choice="choices",
        target_delimiter="",
        metric_list=[{"metric": "acc"}],
    )
    with server("--sampler-dtype", "float32") as (_, url):
        arguments = {"model": "demo", "base_url": f"{url}/completions", "num_concurrent": 4}
        found = lm_eval(python, tmp_path, "local-completions", "choices", arguments)

    def likelihood(question, choice):
        ids = [sampler.tokenizer(text)["input_ids"] for text in (question, question + choice)]
        with torch.no_grad():
            logprobs = sampler.model(input_ids=torch.tensor([ids[1]])).logits[0].log_softmax(-1)
        start = len(ids[0])
        return float(sum(logprobs[i - 1, ids[1][i]] for i in range(start, len(ids[1]))))

    best = [max(range(4), key=lambda c, row=row: likelihood(row["question"], row["choices"][c])) for row in rows]
    assert found["acc,none"] == pytest.approx(sum(one == 0 for one in best) / COUNT)


INSPECT = """
import json, sys
from inspect_ai import Task, eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.scorer import pattern
from inspect_ai.solver import generate

rows = json.load(open(sys.argv[1]))
task = Task(dataset=[Sample(input=q, target=a) for q, a in rows], solver=generate(), scorer=pattern(r"#### (-?[0-9]+)\\s*$"))
log = evaluate(task, model="openai-api/covey/demo", temperature=0, max_tokens=48, display="none", log_dir=sys.argv[2])[0]
assert log.status == "success", log.error
print(json.dumps({"accuracy": log.results.scores[0].metrics["accuracy"].value}))
"""


def test_inspect_evaluates_the_model_and_finds_the_accuracy_that_covey_finds(tmp_path, problems, greedy_right):
    python = foreign_environment("inspect", "inspect-ai>=0.3.285,<0.4", "openai")
    (tmp_path / "rows.json").write_text(json.dumps(problems))
    with server("--sampler-dtype", "float32") as (_, url):
        environ = {"COVEY_API_KEY": "none", "COVEY_BASE_URL": url}
        said = run(python, "-c", INSPECT, str(tmp_path / "rows.json"), str(tmp_path / "logs"), **environ)
    accuracy = json.loads(said.splitlines()[-1])["accuracy"]
    assert accuracy == pytest.approx(sum(greedy_right) / COUNT)
