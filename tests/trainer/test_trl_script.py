"""TRL's scripts with one import changed: the same arguments, the same calls into user code, the same names in the log."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import EarlyStoppingCallback, TrainerCallback

from covey import GRPOConfig, GRPOTrainer
from covey.config import checks
from covey.errors import ConfigError, CoveyError, DataError, ModelError, RewardError
from covey.models import load_model, load_tokenizer
from kit import rest_nightly, tiny_model, tiny_reward_model, tiny_tokenizer

ROWS = [{"prompt": f"Tom has {i} apples.", "answer": str(i)} for i in range(12)]
CHAT = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in ROWS]


def reward_len(prompts, completions):
    return [len(c) for c in completions]


@pytest.fixture
def model_dir(tmp_path):
    """A folder as a hub id would give one: model and tokenizer, loaded by name."""
    folder = tmp_path / "model"
    tiny_model("qwen2").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def options(tmp_path, **changed):
    given = {
        "output_dir": str(tmp_path / "out"),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "logging_steps": 2,
        "max_steps": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return GRPOConfig(**{**given, **changed})


def trainer(tmp_path, rows=ROWS, rewards=reward_len, model=None, args=None, **changed):
    kwargs = {name: changed.pop(name) for name in list(changed) if name in CONSTRUCTOR}
    return GRPOTrainer(
        model=model or tiny_model("qwen2"),
        reward_funcs=rewards,
        args=args or options(tmp_path, **changed),
        train_dataset=Dataset.from_list(rows),
        processing_class=kwargs.pop("processing_class", tiny_tokenizer()),
        **kwargs,
    )


CONSTRUCTOR = {
    "eval_dataset",
    "callbacks",
    "optimizers",
    "peft_config",
    "reward_processing_classes",
    "processing_class",
    "algorithm",
}


def weights(one):
    return torch.cat([p.detach().flatten().clone() for p in one.model.parameters()])


def test_the_quick_start_of_trl_runs_unchanged(tmp_path, model_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = {"train": Dataset.from_list(ROWS[:4])}
    training_args = GRPOConfig(
        output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=2, logging_steps=2,
        max_completion_length=8, num_train_epochs=1,
    )  # fmt: skip
    one = GRPOTrainer(model=model_dir, reward_funcs=reward_len, args=training_args, train_dataset=dataset["train"])
    result = one.train()
    assert result.global_step == 4, "4 prompts, 1 prompt a step (4 x 2 completions, 8 a prompt)"
    assert [entry["step"] for entry in one.state.log_history] == [2, 4, 4]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run of four steps that has ended."""
    one = trainer(tmp_path_factory.mktemp("ended"), beta=0.1, save_strategy="steps", save_steps=2)
    one.train()
    return one


def test_the_log_has_trls_names(ended):
    names = set(ended.state.log_history[0])
    assert names >= {
        "loss", "grad_norm", "learning_rate", "num_tokens", "reward", "reward_std", "frac_reward_zero_std", "kl", "entropy",
        "rewards/reward_len/mean", "rewards/reward_len/std", "completions/mean_length", "completions/min_length",
        "completions/max_length", "completions/clipped_ratio", "clip_ratio/low_mean", "clip_ratio/high_mean",
        "clip_ratio/region_mean", "epoch", "step", "step_time",
    }  # fmt: skip
    assert {"train_runtime", "train_loss", "train_steps_per_second"} <= set(ended.state.log_history[-1])


def test_a_reward_gets_trls_keywords(tmp_path):
    seen = {}

    def nosy(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric, **kwargs):
        seen.update(
            prompts=prompts,
            completions=completions,
            ids=completion_ids,
            answer=answer,
            step=trainer_state.global_step,
            rest=kwargs,
        )
        log_extra("doubled", [2 * len(c) for c in completions])
        log_metric("my_metric", 7.0)
        return [float(len(c)) for c in completions]

    one = trainer(tmp_path, rows=CHAT, rewards=nosy)
    one.train()
    assert len(seen["prompts"]) == len(seen["completions"]) == len(seen["ids"]) == len(seen["answer"]) == 8
    assert seen["prompts"][0][0]["role"] == "user"
    assert seen["completions"][0][0]["role"] == "assistant"
    assert isinstance(seen["ids"][0], list)
    assert seen["step"] == 3
    assert one.state.log_history[0]["my_metric"] == 7.0


def test_several_rewards_are_weighted_and_none_means_it_does_not_apply(tmp_path):
    async def constant(completions, **kwargs):
        return [1.0 for _ in completions]

    def sometimes(completions, **kwargs):
        return [None if i % 2 else 2.0 for i in range(len(completions))]

    one = trainer(tmp_path, rewards=[constant, sometimes], reward_weights=[1.0, 0.5])
    one.train()
    log = one.state.log_history[0]
    assert log["rewards/constant/mean"] == 1.0
    assert log["rewards/sometimes/mean"] == 2.0
    assert log["reward"] == pytest.approx(1.5)


def test_a_reward_model_scores_with_its_own_tokenizer(tmp_path):
    one = trainer(tmp_path, rewards=tiny_reward_model(), reward_processing_classes=tiny_tokenizer())
    one.train()
    assert any(name.startswith("rewards/") and name.endswith("/mean") for name in one.state.log_history[0])


@pytest.mark.nightly
def test_training_changes_the_weights_and_the_same_seed_changes_them_equally(tmp_path):
    first, second = trainer(tmp_path / "a"), trainer(tmp_path / "b")
    before = weights(first)
    first.train()
    second.train()
    assert not torch.equal(before, weights(first))
    assert torch.equal(weights(first), weights(second))


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({}, marks=pytest.mark.nightly),
        pytest.param({"steps_per_generation": 4}, marks=pytest.mark.nightly),
        pytest.param({"num_iterations": 2}, marks=pytest.mark.slow),
        pytest.param({"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}, marks=pytest.mark.nightly),
    ],
)
def test_resuming_anywhere_is_bit_identical_to_never_stopping(tmp_path, changed):
    changed = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6, "logging_steps": 4, **changed}
    whole = trainer(tmp_path, **changed)
    whole.train()
    for step in (1, 3, 4):
        stopped = shutil.copytree(tmp_path / "out", tmp_path / f"out-{step}")
        for later in range(step + 1, 7):
            shutil.rmtree(stopped / f"checkpoint-{later}")
        resumed = trainer(tmp_path, **{**changed, "output_dir": str(stopped)})
        resumed.train(resume_from_checkpoint=True)
        assert torch.equal(weights(whole), weights(resumed)), f"resumed from step {step}"
        assert len(resumed.state.log_history) == len(whole.state.log_history)
        assert [line["step"] for line in lines(stopped)] == [1, 2, 3, 4, 5, 6], "no step is recorded twice"


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_lora_trains_the_adapter_only_and_starts_at_kl_zero(tmp_path):
    from peft import LoraConfig

    one = trainer(tmp_path, beta=0.1, logging_steps=1, peft_config=LoraConfig(r=2, target_modules="all-linear"))
    base = {n: p.detach().clone() for n, p in one.model.named_parameters() if "lora" not in n}
    one.train()
    assert one.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert all(torch.equal(p, base[n]) for n, p in one.model.named_parameters() if "lora" not in n)
    assert any(p.abs().sum() > 0 for n, p in one.model.named_parameters() if "lora_B" in n)


@pytest.mark.nightly
def test_gradient_checkpointing_changes_no_result(tmp_path):
    plain = {"optim": "sgd", "learning_rate": 0.1}  # Adam divides by the gradient's size, rounding included
    on, off = trainer(tmp_path / "a", **plain), trainer(tmp_path / "b", gradient_checkpointing=False, **plain)
    before = weights(on)
    on.train()
    off.train()
    torch.testing.assert_close(weights(on), weights(off), rtol=1e-5, atol=1e-6)
    assert (weights(on) - before).abs().max() > 1e-3


@pytest.mark.nightly
def test_the_micro_batch_is_a_memory_knob_only(tmp_path):
    plain = {"optim": "sgd", "learning_rate": 0.1}  # Adam divides by the gradient's size, rounding included
    small = trainer(tmp_path / "a", per_device_train_batch_size=1, gradient_accumulation_steps=8, **plain)
    large = trainer(tmp_path / "b", per_device_train_batch_size=8, gradient_accumulation_steps=1, **plain)
    small.train()
    large.train()
    torch.testing.assert_close(weights(small), weights(large), rtol=1e-4, atol=1e-5)


def test_evaluate_names_its_metrics_and_takes_a_dict_of_sets(tmp_path):
    held_out = Dataset.from_list(ROWS[:3])
    one = trainer(tmp_path, eval_dataset={"easy": held_out, "hard": held_out})
    metrics = one.evaluate()
    assert metrics["eval_easy_reward"] == metrics["eval_hard_reward"]
    assert {
        "eval_easy_rewards/reward_len/mean",
        "eval_easy_completions/mean_length",
        "eval_easy_loss",
        "eval_easy_runtime",
    } <= set(metrics)
    assert one.evaluate(held_out)["eval_reward"] == metrics["eval_easy_reward"], "the same seed every time"


def test_evaluation_steps_pick_the_best_checkpoint_and_stop_early(tmp_path):
    one = trainer(
        tmp_path, max_steps=12, eval_dataset=Dataset.from_list(ROWS[:2]), eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=1, metric_for_best_model="reward", greater_is_better=True, load_best_model_at_end=True,
        save_total_limit=2, learning_rate=0.0, early_stopping_patience=2,
    )  # fmt: skip
    one.train()
    assert one.state.global_step == 3, "nothing is learnt at learning rate 0: the first evaluation stays the best"
    assert one.state.best_global_step == 1
    assert (tmp_path / "out" / "checkpoint-1").is_dir(), "the best checkpoint outlives save_total_limit"


def test_callbacks_see_every_event_and_can_stop(tmp_path):
    seen = []

    class Nosy(TrainerCallback):
        def on_train_begin(
            self, args, state, control, model=None, optimizer=None, lr_scheduler=None, processing_class=None, **kwargs
        ):
            assert None not in (model, optimizer, lr_scheduler, processing_class)
            seen.append("begin")

        def on_step_begin(self, args, state, control, **kwargs):
            seen.append("step")

        def on_optimizer_step(self, args, state, control, **kwargs):
            seen.append("optimizer")

        def on_step_end(self, args, state, control, **kwargs):
            seen.append("end")
            control.should_training_stop = state.global_step == 2

        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append("log")

        def on_train_end(self, args, state, control, **kwargs):
            seen.append("train end")

    one = trainer(tmp_path, max_steps=5, callbacks=[Nosy()])
    one.train()
    assert seen == ["begin", "step", "optimizer", "end", "step", "optimizer", "end", "log", "log", "train end"]


def test_a_stream_of_prompts_trains_when_told_how_long(tmp_path):
    stream = IterableDataset.from_generator(lambda: iter(ROWS))
    one = GRPOTrainer(
        model=tiny_model("qwen2"), reward_funcs=reward_len, args=options(tmp_path), train_dataset=stream,
        processing_class=tiny_tokenizer(),
    )  # fmt: skip
    assert one.train().global_step == 4


def test_a_data_set_smaller_than_a_batch_works(tmp_path):
    one = trainer(tmp_path, rows=ROWS[:1], per_device_train_batch_size=16, max_steps=2)
    assert one.train().global_step == 2


def test_save_model_writes_what_transformers_reads(ended, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("HOME", str(tmp_path))
    ended.save_model("~/saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    AutoTokenizer.from_pretrained(tmp_path / "saved")
    ids = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(again(ids).logits, ended.model.eval()(ids).logits)


def test_the_optimizer_and_the_schedule_may_be_the_users_own(tmp_path):
    model = tiny_model("qwen2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=100)
    one = trainer(tmp_path, model=model, optimizers=(optimizer, schedule), logging_steps=1)
    one.train()
    assert one.optimizer is optimizer
    assert one.state.log_history[0]["learning_rate"] == pytest.approx(0.05)


@pytest.mark.nightly
def test_a_callback_of_transformers_for_early_stopping_is_accepted(tmp_path):
    one = trainer(
        tmp_path, eval_dataset=Dataset.from_list(ROWS[:2]), eval_strategy="steps", eval_steps=1, learning_rate=0.0, max_steps=9,
        metric_for_best_model="reward", greater_is_better=True, load_best_model_at_end=True, save_strategy="steps", save_steps=1,
        callbacks=[EarlyStoppingCallback(1)],
    )  # fmt: skip
    one.train()
    assert one.state.global_step == 2


# -- wrong input: one sentence that names it and the fix, before work is spent ------------------------------------------


def test_a_misspelt_option_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="epsilon_hihg is not an option.*Did you mean epsilon_high"):
        GRPOConfig(output_dir=str(tmp_path), epsilon_hihg=0.3)


def test_a_model_folder_without_weights_says_what_is_missing(tmp_path, model_dir):
    import os

    os.remove(os.path.join(model_dir, "model.safetensors"))
    with pytest.raises(ModelError, match="lacks model.safetensors"):
        trainer(tmp_path, model=model_dir)


def test_a_folder_that_is_half_written_or_pruned_meanwhile_is_told(model_dir):
    path = Path(model_dir) / "generation_config.json"
    path.write_text('{"eos_token_id": [')
    with pytest.raises(ModelError, match=r"generation_config.json is not JSON"):
        load_model(model_dir)
    path.unlink()
    model = load_model(model_dir)
    shutil.rmtree(model_dir)
    with pytest.raises(ModelError, match=r"The model folder .* does not exist"):
        load_tokenizer(model, model_dir)


def test_a_data_set_without_prompts_says_which_columns_it_has(tmp_path):
    with pytest.raises(DataError, match="no column 'prompt'; it has question"):
        trainer(tmp_path, rows=[{"question": "?"}])


def test_a_prompt_longer_than_the_context_names_the_row(tmp_path):
    rows = [*ROWS, {"prompt": "apples " * 2000, "answer": "0"}]
    with pytest.raises(DataError, match="Row 12 .* tokens"):
        trainer(tmp_path, rows=rows).train()


def test_a_prompt_longer_than_the_context_can_be_left_out_visibly(tmp_path, caplog):
    rows = [{"prompt": "apples " * 2000, "answer": "0"}, *ROWS[:2]]
    assert trainer(tmp_path, rows=rows, on_long_prompt="drop", max_steps=3).train().global_step == 3
    assert "such prompts are left out and counted" in caplog.text


def test_an_evaluation_counts_no_row_twice_in_place_of_one_that_was_left_out(tmp_path):
    long = {"prompt": "apples " * 2000, "answer": "0"}
    options = {"on_long_prompt": "drop", "num_generations_eval": 2, "per_device_eval_batch_size": 2}
    seen = []
    watched = lambda prompts, completions: seen.extend(prompts) or [1.0] * len(prompts)
    held_out = Dataset.from_list([ROWS[0], long, *ROWS[1:3]])
    run = trainer(tmp_path, rewards=watched, eval_dataset=held_out, **options)
    metrics = run.evaluate()
    assert seen == [row["prompt"] for row in ROWS[:3] for _ in range(2)]
    assert metrics["eval_samples_per_second"] == pytest.approx(6 / metrics["eval_runtime"], rel=0.05)
    with pytest.raises(DataError, match="Every prompt of eval's data set is too long"):
        run.evaluate(Dataset.from_list([long]))


def test_a_tokenizer_without_eos_says_how_to_set_one(tmp_path):
    tokenizer, model = tiny_tokenizer(), tiny_model("qwen2")
    tokenizer.eos_token = None
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    with pytest.raises(ModelError, match="end-of-text token"):
        trainer(tmp_path, model=model, processing_class=tokenizer)


def test_a_tokenizer_without_a_chat_template_cannot_take_messages(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="chat template"):
        trainer(tmp_path, rows=CHAT, processing_class=tokenizer).train()


@pytest.mark.parametrize(
    "reward, said",
    [
        (3, "not callable|neither"),
        (lambda completions, **kwargs: [1.0], "1 value|returned 1"),
        (lambda completions, **kwargs: ["good" for _ in completions], "number"),
    ],
)
def test_a_reward_that_breaks_its_contract_is_told_so_at_once(tmp_path, reward, said):
    with pytest.raises(RewardError, match=said):
        trainer(tmp_path, rewards=reward).train()


def test_a_tool_without_type_hints_is_refused_with_what_to_add(tmp_path):
    with pytest.raises(ConfigError, match="tool 'print' cannot be described to the model .* type hint"):
        GRPOTrainer(model=tiny_model("qwen2"), reward_funcs=reward_len, args=options(tmp_path), tools=[print])


def test_a_model_that_is_none_is_refused_by_its_type(tmp_path):
    with pytest.raises(ConfigError, match="model is of type NoneType; give a folder, a hub id or a loaded model"):
        GRPOTrainer(
            model=None,
            reward_funcs=lambda completions: [0.0],
            args=GRPOConfig(output_dir=str(tmp_path)),
            train_dataset=Dataset.from_list(ROWS),
        )


def test_every_refusal_is_a_covey_error_with_an_exit_code():
    for error in (ConfigError, DataError, ModelError, RewardError):
        assert issubclass(error, CoveyError)
        assert error.exit_code in (2, 3)


def test_a_run_leaves_metrics_that_anyone_can_read(ended):
    found = lines(Path(ended.args.output_dir))
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    assert all("reward" in line for line in found)


@pytest.mark.parametrize(
    "backend, options, dtype",
    [
        ("native", {}, "float32"),
        ("transformers", {"rollout_dtype": "bfloat16"}, "bfloat16"),
        *rest_nightly(
            [
                ("native", {"bf16": True}, "bfloat16"),
                ("native", {"fp16": True, "rollout_dtype": "float16"}, "float16"),
                ("native", {"bf16": True, "rollout_dtype": "float32"}, "float32"),
                ("native", {"rollout_dtype": "bfloat16"}, "bfloat16"),
                ("transformers", {}, "float32"),
                ("transformers", {"bf16": True}, "bfloat16"),
                ("transformers", {"bf16": True, "rollout_dtype": "float32"}, "float32"),
                ("transformers", {"fp16": True, "rollout_dtype": "float16"}, "float16"),
            ],
            0,
        ),
    ],
)
def test_completions_are_drawn_in_the_learners_type_or_the_one_that_was_asked_for(
    options, dtype, backend, tmp_path, monkeypatch
):
    monkeypatch.setattr(checks, "processor_has_bfloat16", lambda: True)  # torch computes it everywhere, slowly
    one = trainer(tmp_path, rollout_backend=backend, max_steps=1, **options)
    one.train()
    sampler = one._parts.sampler
    if backend == "native":
        assert sampler.forward.dtype == getattr(torch, dtype)
    else:
        assert sampler.dtype == ("auto" if dtype == "float32" and not options else dtype)
    gap = lines(tmp_path / "out")[0]["sampling/sampling_logp_difference/mean"]
    assert gap < (1e-5 if dtype == "float32" and not options.get("bf16") else 2e-2)
