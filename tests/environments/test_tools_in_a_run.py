"""A GRPO run whose model calls tools: through `GRPOTrainer(tools=...)`, with real rollouts and updates."""

import asyncio
import json
import math
import time

import pytest
import torch
from datasets import Dataset
from tool_runs import CALL, add, bridge, calling, shown

from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from covey.environments import tool
from covey.errors import ConfigError, DataError, ModelError
from covey.learner.teacher import Teacher
from covey.training.agents import Agents
from covey.training.build_sampler import name_idle_options
from covey.training.parts import Parts
from environments.acting import chat_tokenizer, tiny_llama, tiny_qwen3_5, trained_on
from kit import rest_nightly


def options(tmp_path, **given):
    chosen = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 256, "max_steps": 1}
    chosen |= {
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "temperature": 0.01,
    }
    return GRPOConfig(str(tmp_path / "run"), use_cpu=True, **(chosen | given))


def trainer_of(tmp_path, *, model=None, rewards=None, data=None, args=None, **given):
    data = data if data is not None else Dataset.from_list([{"prompt": [{"role": "user", "content": "q"}]}] * 4)
    seen = []

    def reward(completions, **columns):
        seen.append((completions, columns))
        return [float(i) for i in range(len(completions))]

    model = calling() if model is None else model
    trainer = GRPOTrainer(
        model,
        [reward] if rewards is None else rewards,
        args or options(tmp_path),
        data,
        processing_class=chat_tokenizer(),
        **given,
    )
    return trainer, seen


def last(trainer):
    return next(line for line in reversed(trainer.state.log_history) if "tools/call_frequency" in line)


@pytest.mark.slow
def test_past_its_seconds_an_episode_ends_at_its_next_call(tmp_path):
    trainer, seen = trainer_of(tmp_path, tools=[add], args=options(tmp_path, episode_timeout_seconds=1e-6))
    trainer.train()
    assert [one["role"] for one in seen[0][0][0]] == ["assistant"]
    assert last(trainer)["tools/call_frequency"] == 0


def test_the_model_calls_a_tool_reads_its_answer_and_rewards_see_the_turns(tmp_path):
    trainer, seen = trainer_of(tmp_path, tools=[add])
    trainer.train()
    (completions, _), logged = seen[0], last(trainer)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
    assert completions[0] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "7"},
        {"role": "assistant", "content": "7"},
    ]
    assert logged["tools/call_frequency"] == 1.0
    assert logged["tools/failure_frequency"] == 0.0
    assert logged["tools/add/calls"] == 1.0
    written = len(chat_tokenizer()(CALL)["input_ids"]) + 2  # the answer's tokens are not the model's
    assert logged["completions/mean_length"] == written


@pytest.mark.slow
def test_a_model_whose_layers_keep_a_state_calls_a_tool(tmp_path):
    trainer, seen = trainer_of(tmp_path, tools=[add], model=calling(steps=60, make=tiny_qwen3_5))
    trainer.train()
    assert [turn["role"] for turn in seen[0][0][0]] == ["assistant", "tool", "assistant"]
    assert last(trainer)["tools/add/calls"] == 1.0
    assert last(trainer)["sampling/sampling_logp_difference/max"] < 1e-4


def test_only_tokens_that_the_model_wrote_are_trained_on(tmp_path):
    trainer, _ = trainer_of(tmp_path, tools=[add])
    parts, kept = None, []
    trainer.add_callback(_Keep(kept, lambda: trainer._running))
    trainer.train()
    parts = kept[0]
    groups = list(parts.sampler.sample(parts.prompts.take(1), 2, parts.sampling_for.params))
    tokenizer = trainer.processing_class
    for one in groups[0].completions:
        answer = tokenizer(bridge("7"), add_special_tokens=False)["input_ids"]
        assert one.token_ids[~one.mask].tolist() == answer
        assert len(one.mask) == len(one.token_ids) == len(one.logprobs)
        assert one.tool_calls[0].result == "7"


class _Keep:
    """A callback that notes the parts of a run while it goes on."""

    def __init__(self, kept, parts):
        self.kept, self.parts = kept, parts

    def __getattr__(self, name):
        return lambda *_, **__: None

    def on_step_end(self, *_, **__):
        self.kept.append(self.parts())


async def add_slowly(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    await asyncio.sleep(0.3)
    return a + b


add_slowly.__name__ = "add"


def test_an_async_tools_calls_run_side_by_side(tmp_path):
    trainer, _ = trainer_of(tmp_path, tools=[add_slowly], args=options(tmp_path, per_device_train_batch_size=8))
    trainer.train()
    logged = last(trainer)
    assert logged["tools/failure_frequency"] == 0.0
    assert logged["tools/add/max_seconds"] < 8 * 0.3


def failing(what):
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return what(a, b)

    return add


def _exits(a, b):
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("what", "said", "status"),
    [
        (lambda a, b: a / 0, "ZeroDivisionError: division by zero", "errors"),
        (_exits, "SystemExit: 3", "errors"),
        (lambda a, b: time.sleep(30), "add did not answer within 0.3 seconds", "timeouts"),
    ],
    ids=["it raises", "it exits", "it hangs"],
)
def test_a_tool_that_fails_is_its_answer_to_the_model_and_no_end_of_the_run(tmp_path, what, said, status):
    trainer, seen = trainer_of(tmp_path, tools=[tool(timeout=0.3)(failing(what))])
    trainer.train()
    answers = [turn for turn in seen[0][0][0] if turn["role"] == "tool"]
    assert json.loads(answers[0]["content"]) == {"error": said}
    assert last(trainer)[f"tools/add/{status}"] == 1.0
    assert last(trainer)["tools/failure_frequency"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "said"),
    rest_nightly(
        [
            (CALL.replace('"add"', '"ad"'), "there is no tool 'ad'. Did you mean add? Tools: add"),
            (CALL.replace("}}", "}"), "the call is no JSON"),
            (CALL.replace('"b"', '"c"'), "add has no parameter 'c'; it takes a, b"),
            (CALL.replace(', "b": 4', ""), "add needs b"),
        ],
        2,
    ),
    ids=["an unknown tool", "broken JSON", "an unknown argument", "a missing argument"],
)
def test_a_wrong_call_is_answered_with_a_sentence(tmp_path, call, said):
    model = trained_on(((shown(), call),), steps=80)
    trainer, seen = trainer_of(
        tmp_path, tools=[add], model=model, args=options(tmp_path, max_tool_calling_iterations=1)
    )
    trainer.train()
    answers = [turn for turn in seen[0][0][0] if turn["role"] == "tool"]
    assert said in json.loads(answers[0]["content"])["error"]


@pytest.mark.slow
def test_after_so_many_turns_of_calls_an_episode_is_over(tmp_path):
    model = trained_on(((shown(), CALL), (shown() + CALL + bridge("7"), CALL)))
    trainer, seen = trainer_of(
        tmp_path, tools=[add], model=model, args=options(tmp_path, max_tool_calling_iterations=1)
    )
    trainer.train()
    roles = [turn["role"] for turn in seen[0][0][0]]
    assert roles == ["assistant", "tool", "assistant"]
    assert last(trainer)["tools/call_frequency"] == 1.0


def long(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return "x" * 1000


long.__name__ = "add"


def test_a_long_result_is_cut_and_says_so(tmp_path):
    trainer, seen = trainer_of(tmp_path, tools=[tool(max_characters=10)(long)])
    trainer.train()
    assert seen[0][0][0][1]["content"] == "x" * 10 + "\n[990 more characters were cut]"


def test_a_result_is_cut_at_its_limit_of_tokens(tmp_path):
    trainer, seen = trainer_of(tmp_path, tools=[tool(max_tokens=7)(long)])
    trainer.train()
    shown, note = seen[0][0][0][1]["content"].split("\n")
    assert len(trainer.processing_class(shown)["input_ids"]) == 7
    assert note == f"[{1000 - len(shown)} more characters were cut]"


class Counter:
    """An environment that counts what was added."""

    def __init__(self):
        self.total = None

    def reset(self, start, **row):
        self.total = start
        return " and then?" if row["prompt"][0]["content"] == "add" else None

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        self.total += a + b
        return a + b

    def get_reward(self):
        return float(self.total)


def test_an_environment_is_reset_for_each_completion_and_rewards_it(tmp_path):
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "q"}], "start": 100}] * 4)
    trainer, seen = trainer_of(tmp_path, data=data, environment_factory=Counter)
    trainer.train()
    environments = seen[0][1]["environments"]
    assert len({id(one) for one in environments}) == 4
    assert [one.total for one in environments] == [107] * 4
    assert last(trainer)["rewards/Counter/mean"] == 107.0


@pytest.mark.parametrize("what", ["reset", "sampler"])
def test_environments_are_closed_after_an_error(what, tmp_path, monkeypatch):
    made, closed = [], []

    class Session(Counter):
        def __init__(self):
            made.append(self)

        def reset(self, **row):
            if what == "reset":
                raise OSError("no rooms left")
            super().reset(**row)

        def close(self):
            closed.append(self)

    def breaks(parts):
        raise OSError("its worker hangs")

    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "q"}], "start": 100}] * 4)
    trainer = trainer_of(tmp_path, data=data, environment_factory=Session)[0]
    if what == "sampler":
        monkeypatch.setattr(Parts, "close", breaks)
    with pytest.raises((OSError, DataError), match="no rooms left|its worker hangs"):
        trainer.train()
    assert len(made) >= 4
    assert {id(one) for one in closed} == {id(one) for one in made}


@pytest.mark.parametrize(
    ("fails", "is_random"),
    rest_nightly([(False, False), (True, False), (False, True)], 1),
)
def test_environments_are_closed_when_training_and_evaluations_end_and_made_anew_after_it(
    fails, is_random, tmp_path, caplog
):
    made, closed = [], []

    class Session(Counter):
        def __init__(self):
            made.append(self)

        def reset(self, **row):
            assert self not in closed
            super().reset(**row)
            return str(id(self)) if is_random else None

        def close(self):
            closed.append(self)
            if fails:
                raise OSError("it is gone")

    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "q"}], "start": 100}] * 4)
    trainer = trainer_of(tmp_path, data=data, environment_factory=Session)[0]
    trainer.train()
    assert len(made) >= 4
    assert {id(one) for one in closed} >= {id(one) for one in made}  # copies are closed too
    assert ("close() of Session failed: OSError: it is gone" in caplog.text) == fails
    num_of_training = len(made)
    assert trainer.evaluate(data)["eval_reward"] > 0
    assert len(made) > num_of_training
    assert {id(one) for one in closed} >= {id(one) for one in made}


def test_an_environment_alone_gives_reward_and_prompts(tmp_path):
    class Asking(Counter):
        def reset(self, **row):
            self.total = 0
            return "q"

    trainer = GRPOTrainer(
        calling(), None, options(tmp_path), environment_factory=Asking, processing_class=chat_tokenizer()
    )
    trainer.train()
    assert last(trainer)["rewards/Asking/mean"] == 7.0


def test_the_role_that_an_environment_names_has_an_average_of_returns(tmp_path):
    class Player(Counter):
        def reset(self, start, **row):
            self.total, self.role = start, "even" if start % 2 == 0 else "odd"

    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "q"}], "start": start} for start in (2, 5)])
    args = options(tmp_path, algorithm="dr_grpo, advantage=RoleConditioned(decay=0.5)", max_steps=1)
    trainer = trainer_of(tmp_path, data=data, environment_factory=Player, args=args)[0]
    trainer.train()
    name, total = ("even", 9.0) if "advantage/even" in last(trainer) else ("odd", 12.0)
    average = 0.0
    for i in range(4):
        average = 0.5 * average + 0.5 * (total + i)  # 7 was added to its start, and the reward of the test adds i
    assert last(trainer)[f"advantage/{name}"] == average


def test_one_environment_of_several_is_chosen_by_a_column(tmp_path):
    class Other:
        def reset(self, **row):
            return None

    rows = [{"prompt": [{"role": "user", "content": "q"}], "start": 1, "environment": name} for name in ("a", "b")]
    trainer, seen = trainer_of(
        tmp_path,
        data=Dataset.from_list(rows),
        environment_factory={"a": Counter, "b": Other},
        args=options(tmp_path, per_device_train_batch_size=8),
    )
    trainer.train()
    kinds = [type(one).__name__ for one in seen[0][1]["environments"]]
    assert sorted(kinds) == ["Counter"] * 4 + ["Other"] * 4
    assert math.isfinite(last(trainer)["rewards/Counter/mean"])


@pytest.mark.slow
def test_a_teacher_with_feedback_reads_the_tools_that_each_prompt_shows(tmp_path, monkeypatch):
    """Those of the environments that their rows name, which differ from prompt to prompt."""

    class Other:
        def reset(self, **row):
            return None

        def wait(self) -> str:
            """Wait."""
            return "waited"

    pairs, hinted = set(), Teacher._with_hint

    def noting(own, row):
        informed = hinted(own, row)
        pairs.add(tuple(tokenizer.decode(each.prompt.token_ids) for each in (row, informed)))
        return informed

    monkeypatch.setattr(Teacher, "_with_hint", noting)
    rows = [
        {"prompt": [{"role": "user", "content": "q"}], "start": 1, "environment": name, "solution": "HINT"}
        for name in ("a", "b")
    ]
    algorithm = alg.grpo().replace(regularizers=(alg.distill("policy", feedback="solution"),))
    trainer, _ = trainer_of(
        tmp_path,
        data=Dataset.from_list(rows),
        environment_factory={"a": Counter, "b": Other},
        args=options(tmp_path, algorithm=algorithm, per_device_train_batch_size=8),
    )
    tokenizer = trainer.processing_class
    trainer.train()
    plain, informed = zip(*sorted(pairs), strict=True)
    assert len(plain) == 2
    assert ["wait" in text for text in plain] in ([True, False], [False, True])
    assert [text.replace("\n\nHINT", "") for text in informed] == list(plain)


def test_a_rollout_function_writes_the_completions(tmp_path):
    tokenizer = chat_tokenizer()

    def rollout(prompts, trainer):
        ids = [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in prompts]
        answers = [tokenizer(f"{i}<|im_end|>")["input_ids"] for i in range(len(prompts))]
        masks = [[0] + [1] * (len(one) - 1) for one in answers]
        return {
            "prompt_ids": ids,
            "completion_ids": answers,
            "logprobs": [[-1.0] * len(one) for one in answers],
            "env_mask": masks,
            "place": list(range(len(prompts))),
        }

    trainer, seen = trainer_of(tmp_path, rollout_func=rollout)
    trainer.train()
    assert seen[0][1]["place"] == [0, 1, 2, 3]
    assert [one[0]["content"] for one in seen[0][0]] == ["0", "1", "2", "3"]
    assert trainer.state.log_history[0]["completions/mean_length"] == 1.0


WRITTEN = {"prompt_ids": [[5]] * 4, "completion_ids": [[6, 7]] * 4, "logprobs": None}


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ({"prompt_ids": []}, "rollout_func returned no completion_ids, logprobs"),
        ([], "rollout_func returned a list"),
        (
            {"prompt_ids": [], "completion_ids": [], "logprobs": None},
            "rollout_func returned 0 prompt_ids for 4 prompts",
        ),
        ({**WRITTEN, "place": None}, "rollout_func returned NoneType place for 4 prompts"),
        (
            {**WRITTEN, "logprobs": [[[-0.1], [-0.2]]] * 4},
            "completion 0 logprobs that are not one number for each token",
        ),
        ({**WRITTEN, "logprobs": [[-0.1, None]] * 4}, "completion 0 logprobs that are not one number for each token"),
        ({**WRITTEN, "logprobs": [[0.0, -0.5]] * 4, "env_mask": [[1, 0]] * 4}, "each token the logprob 0, as if"),
    ],
)
def test_a_rollout_function_that_returns_something_else_is_told(tmp_path, output, said):
    trainer, _ = trainer_of(tmp_path, rollout_func=lambda prompts, trainer: output)
    with pytest.raises(DataError, match=said):
        trainer.train()


def without_hints(a, b):
    return a


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"tools": [without_hints]}, ConfigError, "tool 'without_hints' cannot be described to the model"),
        ({"tools": add}, ConfigError, "tools is a function; give a list of functions"),
        ({"tools": [add, add]}, ConfigError, "two tools have the name 'add'"),
        ({"environment_factory": lambda: object()}, ConfigError, "without reset"),
        ({"environment_factory": lambda: 1 / 0}, ConfigError, "raised ZeroDivisionError"),
        ({"environment_factory": "gymnasium:Nope-v1"}, ConfigError, "^gymnasium cannot make 'Nope-v1'"),
        ({"environment_factory": "nonsense"}, ConfigError, "'nonsense' is no import path; write 'file.py:name'"),
        ({"tools": ["file.py:"]}, ConfigError, "'file.py:' is no import path; write 'file.py:name'"),
        ({"rollout_func": print, "tools": [add]}, ConfigError, "so tools would never act; leave one out"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(tmp_path, given, kind, said):
    with pytest.raises(kind, match=said):
        trainer_of(tmp_path, **given)


def test_text_prompts_and_templates_without_tools_are_refused(tmp_path):
    with pytest.raises(DataError, match="tools need chat prompts"):
        trainer_of(tmp_path, tools=[add], data=Dataset.from_list([{"prompt": "q"}] * 4))[0].train()
    plain = chat_tokenizer("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    trainer = GRPOTrainer(
        tiny_llama(plain), [lambda completions, **_: [0.0] * len(completions)], options(tmp_path),
        Dataset.from_list([{"prompt": [{"role": "user", "content": "q"}]}] * 4), processing_class=plain, tools=[add],
    )  # fmt: skip
    with pytest.raises(ModelError, match="does not write tool calls"):
        trainer.train()


@pytest.mark.slow
def test_a_run_with_tools_resumes_bit_for_bit(tmp_path):
    def run(name, steps, resume=None):
        args = options(
            tmp_path,
            max_steps=steps,
            save_strategy="steps",
            save_steps=1,
            temperature=1.0,
            lr_scheduler_type="constant",
            learning_rate=1e-3,
        )
        args.output_dir = str(tmp_path / name)
        torch.manual_seed(0)
        trainer, _ = trainer_of(tmp_path, model=_copy(calling()), tools=[add], args=args)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run("whole", 3)
    run("cut", 1)
    again = run("cut", 3, resume=True)
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def _copy(model):
    import copy

    return copy.deepcopy(model)


FILE = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


class Game:
    def reset(self, **row):
        self.calls = 0

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        self.calls += 1
        return a + b

    def get_reward(self):
        return float(self.calls)


def short(completions, **columns):
    return [float(-len(one)) for one in completions]
'''


@pytest.mark.parametrize(
    "words",
    rest_nightly(
        [["--tools", "mine.py:add", "--reward", "mine.py:short"], ["--environment-factory", "mine.py:Game"]], 1
    ),
    ids=["tools", "an environment that gives the reward"],
)
def test_the_command_line_takes_import_paths(tmp_path, monkeypatch, words, capsys):
    from covey.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    line = json.dumps({"prompt": [{"role": "user", "content": "q"}]})
    (tmp_path / "data.jsonl").write_text("\n".join([line] * 4))
    calling().save_pretrained("model")
    chat_tokenizer().save_pretrained("model")
    given = [
        "--model",
        "model",
        "--dataset",
        "data.jsonl",
        "--output-dir",
        "run",
        "--max-steps",
        "1",
        "--num-generations",
        "4",
    ]
    more = [
        "--per-device-train-batch-size",
        "4",
        "--max-completion-length",
        "200",
        "--temperature",
        "0.01",
        "--use-cpu",
    ]
    assert main(["train", *given, *more, *words]) == 0
    written = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert written["tools/call_frequency"] == 1.0


def test_an_option_of_episodes_that_cannot_act_in_this_run_is_named(tmp_path, caplog):
    args = options(tmp_path, episode_timeout_seconds=5.0, agent_concurrency=3)
    name_idle_options(Agents.of([add], None, None), args)
    assert [one.getMessage() for one in caplog.records] == [
        "agent_concurrency=3 changes nothing here: it acts with an agent."
    ]
    caplog.clear()
    name_idle_options(Agents.of(None, None, None, lambda row, client, model: 0.0), args)
    assert [one.getMessage() for one in caplog.records] == [
        "episode_timeout_seconds=5.0 changes nothing here: it acts with tools or an environment."
    ]
