"""Environments of the library verifiers, unmodified, in a run. `make test-verifiers` has the package; elsewhere most are skipped."""

import importlib.util
import sys
import types

import pytest
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey.data import load
from covey.environments import verifiers_agent
from covey.errors import ConfigError, DataError
from covey.serving import episodes_of, read_traces
from environments.acting import chat_tokenizer, tiny_llama, trained_on

HAS_IT = importlib.util.find_spec("verifiers") is not None
needs_it = pytest.mark.skipif(not HAS_IT, reason="verifiers is not installed")
CALL = '<tool_call>\n{"name": "calc", "arguments": {"x": "3*4"}}\n</tool_call><|im_end|>'


def calc(x: str) -> str:
    """Multiply.

    Args:
        x: Two numbers with a star.
    """
    first, second = x.split("*")
    return str(int(first) * int(second))


def says_twelve(completion, answer, **state):
    return float(completion[-1]["content"] == answer)


def says_more(completions, **state):
    return [float(len(one)) for one in completions]


def environment(kind="tool"):
    import verifiers

    data = Dataset.from_list([{"question": "3 times 4?", "answer": "12"}] * 8)
    rubric = verifiers.Rubric(funcs=[says_more if kind == "group" else says_twelve])
    if kind == "tool":
        return verifiers.ToolEnv(dataset=data, tools=[calc], rubric=rubric, max_turns=3)
    return verifiers.SingleTurnEnv(dataset=data, eval_dataset=data.select(range(3)), rubric=rubric)


@pytest.fixture
def by_name(monkeypatch):
    """The environment as a package of its own, as those of the hub are."""
    module = types.ModuleType("sums_env")
    module.load_environment = environment
    monkeypatch.setitem(sys.modules, "sums_env", module)
    return "verifiers:sums_env"


def trainer_of(tmp_path, model, agent, data, **given):
    args = GRPOConfig(
        str(tmp_path / "run"),
        use_cpu=True,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=256,
        max_steps=1,
        rollout_log_steps=1,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        **given,
    )
    return GRPOTrainer(model, None, args, data, processing_class=chat_tokenizer(), agent=agent)


@needs_it
def test_a_tool_environment_is_played_and_scored_by_its_own_code_and_trained_on_token_by_token(tmp_path):
    first = (
        "<|im_start|>system\nTools: calc <|im_end|>\n<|im_start|>user\n3 times 4?<|im_end|>\n<|im_start|>assistant\n"
    )
    then = "\n<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    model = trained_on(((first, CALL), (first + CALL + then, "12<|im_end|>")))
    made = environment()
    trainer = trainer_of(tmp_path, model, verifiers_agent(made), made.get_dataset(), temperature=0.01)
    trainer.train()
    logged = next(line for line in trainer.state.log_history if "agents/lost" in line)
    assert (logged["agents/lost"], logged["agents/breaks"], logged["agents/calls"]) == (0.0, 0.0, 2.0)
    assert logged["reward"] == 1.0
    assert logged["tools/calc/calls"] == 1.0
    found = episodes_of(read_traces(tmp_path / "run" / "traces" / "step-000001.jsonl")).episodes
    tokenizer = chat_tokenizer()
    assert [tokenizer.decode(one.completion.token_ids[one.completion.mask]) for one in found] == [
        f"{CALL}12<|im_end|>"
    ] * 4


@needs_it
def test_a_name_gives_the_data_set_its_evaluation_set_and_the_agent(tmp_path, by_name):
    assert len(load(by_name)) == 8
    with pytest.raises(DataError, match="have the splits train and test, not 'dev'"):
        load(f"{by_name}:dev")
    model = tiny_llama(chat_tokenizer())
    trainer = trainer_of(tmp_path, model, verifiers_agent(environment("single")), load(by_name))
    trainer.train()
    assert next(line for line in trainer.state.log_history if "agents/lost" in line)["agents/lost"] == 0.0
    with pytest.raises(ConfigError, match="cannot load the environment 'nowhere_env'"):
        load("verifiers:nowhere_env")


@needs_it
def test_a_rubric_that_compares_a_group_is_refused():
    with pytest.raises(ConfigError, match="scores whole groups of rollouts"):
        verifiers_agent(environment("group"))


@pytest.mark.skipif(HAS_IT, reason="verifiers is installed")
def test_without_the_library_the_sentence_says_what_to_install():
    with pytest.raises(ConfigError, match=r"pip install 'covey\[verifiers\]'"):
        load("verifiers:gsm8k")
    with pytest.raises(ConfigError, match="need verifiers"):
        verifiers_agent("gsm8k")
