"""Logs, callbacks, attributes and files of a run, as TRL 1.16 documents them."""

import json
import logging

import pytest
import torch
from contract import length, trainer
from transformers import TrainerCallback

from covey.errors import ConfigError

LOGGED = (
    "loss", "grad_norm", "learning_rate", "reward", "reward_std", "frac_reward_zero_std", "num_tokens", "entropy", "kl", "step_time",
    "policy_loss", "entropy_coef", "my_metric", "rewards/length/mean", "rewards/length/std", "rewards/half/mean", "completions/mean_length",
    "completions/min_length", "completions/max_length", "completions/clipped_ratio", "completions/mean_terminated_length",
    "clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean", "clip_ratio/high_max", "clip_ratio/region_mean",
    "sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/mean",
)  # fmt: skip


def first_log(run):
    return next(entry for entry in run.trainer.state.log_history if "loss" in entry)


@pytest.mark.parametrize("name", LOGGED)
def test_the_log_has(run, name):
    """Every metric of TRL's list; those that may be undefined in one step are looked for in all logs."""
    known = {key for entry in run.trainer.state.log_history for key in entry} | {"completions/mean_terminated_length"}
    assert name in (known if "terminated" in name else first_log(run))


def test_logs_come_every_logging_steps_and_once_at_the_end(run):
    steps = [entry["step"] for entry in run.trainer.state.log_history if "loss" in entry and "train_loss" not in entry]
    assert steps == [2, 4]
    assert "train_runtime" in run.trainer.state.log_history[-1]


def test_entries_of_the_log_share_the_texts_of_their_names(run):
    """A quarter of what the log of a long run holds in memory."""
    first, second = [e for e in run.trainer.state.log_history if "loss" in e and "train_loss" not in e]
    own = {name: name for name in first}
    assert [name for name in second if name in own and own[name] is not name] == []


def test_callbacks_hear_the_same_logs(run):
    assert [set(one) for one in run.listener.logs] == [set(e) - {"step"} for e in run.trainer.state.log_history]


def test_callbacks_hear_every_event(run):
    wanted = {
        "on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end",
        "on_log", "on_evaluate", "on_save", "on_train_end",
    }  # fmt: skip
    assert wanted <= set(run.listener.heard)
    assert run.listener.heard.count("on_step_end") == 4


def test_callbacks_get_the_model_the_tokenizer_and_transformers_state(run):
    assert run.listener.kinds == {("Qwen2ForCausalLM", True, "TrainerState")}


def test_an_evaluation_set_of_a_dict_has_its_name_in_every_metric(run):
    assert {
        "eval_easy_reward",
        "eval_easy_rewards/length/mean",
        "eval_easy_loss",
        "eval_easy_runtime",
        "eval_easy_steps_per_second",
    } <= set(run.listener.evaluated[0])


def test_a_reward_of_none_does_not_apply_and_weights_count(run):
    log = first_log(run)
    assert log["rewards/half/mean"] == 0.5
    assert log["reward"] == pytest.approx(log["rewards/length/mean"] + 0.5 * 0.5 * 2.0, rel=1e-5)


def test_a_reward_gets_the_columns_and_the_state_of_the_trainer(run):
    assert {"answer", "prompts", "completion_ids", "trainer_state"} <= set(run.calls[0])
    assert len(run.calls[0]["answer"]) == 4


def test_train_returns_transformers_output_with_the_metrics(run):
    assert run.result.global_step == 4
    assert {"train_runtime", "train_samples_per_second", "train_loss", "epoch"} <= set(run.result.metrics)


def test_checkpoints_have_transformers_names_and_files(run):
    assert {path.name for path in run.folder.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    assert {"model.safetensors", "config.json", "trainer_state.json", "tokenizer.json"} <= {
        path.name for path in (run.folder / "checkpoint-4").iterdir()
    }
    state = json.loads((run.folder / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert any("reward" in entry for entry in state["log_history"])


def test_attributes_say_what_the_run_does(run):
    one = run.trainer
    assert one.reward_func_names == ["length", "half"]
    assert one.reward_weights.tolist() == [1.0, 2.0]
    assert one.reward_processing_classes == [None, None]
    assert (one.num_generations, one.num_iterations, one.temperature, one.max_completion_length) == (4, 1, 1.0, 4)
    assert (one.beta, one.entropy_coef, one.epsilon_low, one.epsilon_high) == (0.1, 0.01, 0.2, 0.2)
    assert one.model_wrapped is one.model
    assert one.hub_model_id is None
    assert one.is_world_process_zero()
    assert one.is_local_process_zero()
    assert one.state.global_step == 4
    assert one.optimizer is not None
    assert one.lr_scheduler is not None
    assert one.get_num_trainable_parameters() == one.model.num_parameters()


@pytest.mark.slow
def test_the_reference_model_is_there_before_training_and_stays_over_a_resume(tmp_path):
    one = trainer(tmp_path, beta=0.1, max_steps=2, learning_rate=0.1, save_strategy="steps", save_steps=1)
    start = [parameter.detach().clone() for parameter in one.model.parameters()]
    reference = one.ref_model
    assert reference is not one.model
    one.train()
    with pytest.warns(UserWarning, match="goes on from step 1"):
        one.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert one.ref_model is reference
    assert all(torch.equal(a, b) for a, b in zip(start, reference.parameters(), strict=True))
    assert trainer(tmp_path / "without", beta=0.0).ref_model is None


def test_the_reference_model_is_the_model_before_training(run):
    assert run.trainer.ref_model is not None
    assert not any(parameter.requires_grad for parameter in run.trainer.ref_model.parameters())
    pairs = zip(run.trainer.ref_model.parameters(), run.trainer.model.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)


def test_an_option_of_sampling_may_be_set_until_training(tmp_path):
    """It acts as if it had been given: the same completions."""
    told, late = trainer(tmp_path / "told", temperature=0.5), trainer(tmp_path / "late")
    shared = late.args
    late.temperature = 0.5
    assert (late.temperature, late.args.temperature, shared.temperature) == (0.5, 0.5, 1.0)
    told.train()
    late.train()
    same = [torch.equal(a, b) for a, b in zip(told.model.parameters(), late.model.parameters(), strict=True)]
    assert all(same)
    with pytest.raises(ConfigError, match="temperature=-1 must be at least 0.0001"):
        trainer(tmp_path / "wrong").temperature = -1
    with pytest.raises(ConfigError, match="set it in GRPOConfig, before the trainer is made, or on the trainer before"):
        late.temperature = 1.0


def test_an_option_of_the_loss_is_not_set_on_the_trainer(run):
    with pytest.raises(ConfigError, match="loss_type is an option; set it in GRPOConfig, before the trainer is made"):
        run.trainer.loss_type = "grpo"


def test_the_operations_of_training_are_counted(run):
    """transformers' estimate: six for each weight outside of embeddings and each token that was trained on."""
    weights = run.trainer.model.num_parameters(exclude_embeddings=True)
    state = run.trainer.state
    assert state.total_flos == 6 * weights * state.num_input_tokens_seen > 0
    assert run.result.metrics["total_flos"] == state.log_history[-1]["total_flos"] == state.total_flos
    saved = json.loads((run.folder / "checkpoint-2" / "trainer_state.json").read_text())
    assert 0 < saved["total_flos"] < state.total_flos


def test_a_metric_without_a_value_is_none_in_the_log_and_left_out_for_trackers(tmp_path, caplog, monkeypatch):
    def never(completions, **columns):
        return [None] * len(completions)

    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    one = trainer(tmp_path, rewards=[length, never], logging_steps=1, max_steps=2, report_to="tensorboard")
    result = one.train()
    assert [entry["rewards/never/mean"] for entry in one.state.log_history[:2]] == [None, None]
    assert "attempting to log a value" not in caplog.text, "TensorBoard's callback says so of None"
    assert None not in result.metrics.values()
    one.log_metrics("train", result.metrics)


def test_the_accelerator_is_the_one_of_this_process(run, capsys):
    accelerator = run.trainer.accelerator
    assert (accelerator.num_processes, accelerator.is_main_process, accelerator.device.type) == (1, True, "cpu")
    assert accelerator.unwrap_model(run.trainer.model) is run.trainer.model
    accelerator.print("said once")
    assert "said once" in capsys.readouterr().out


def test_log_metrics_and_save_metrics_are_those_of_transformers(run, capsys):
    run.trainer.log_metrics("train", run.result.metrics)
    assert "***** train metrics *****" in capsys.readouterr().out
    run.trainer.save_metrics("train", {"reward": 1.5})
    run.trainer.save_metrics("eval", {"eval_reward": 2.5})
    assert json.loads((run.folder / "train_results.json").read_text()) == {"reward": 1.5}
    assert json.loads((run.folder / "all_results.json").read_text()) == {"reward": 1.5, "eval_reward": 2.5}
    run.trainer.save_state()
    assert json.loads((run.folder / "trainer_state.json").read_text())["global_step"] == 4


def test_the_loader_has_trls_batches(run):
    loader = run.trainer.get_train_dataloader()
    batches = list(loader)
    assert len(loader) == len(batches) == 8, "8 prompts x 4 completions / 4 completions a micro-batch"
    assert {len(batch) for batch in batches} == {4}
    assert len({row["prompt"] for row in batches[0]}) == 1, "a prompt once for each of its completions"
    assert len({batch[0]["prompt"] for batch in batches}) == 8
    assert len(next(iter(run.trainer.get_eval_dataloader("easy")))) >= 4


def test_a_run_shorter_than_logging_steps_shows_its_reward(tmp_path):
    one = trainer(tmp_path, logging_steps=10, max_steps=2)
    result = one.train()
    assert len(one.state.log_history) == 1
    assert {"reward", "loss", "rewards/length/mean", "train_loss"} <= set(one.state.log_history[0])
    assert result.metrics["reward"] == one.state.log_history[0]["reward"]


def test_a_callback_may_be_a_class_and_is_taken_off_again(tmp_path):
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **named):
            control.should_training_stop = True

    one = trainer(tmp_path, callbacks=[Stops], max_steps=5)
    assert one.train().global_step == 1
    assert isinstance(one.pop_callback(Stops), Stops)


def test_end_closes_a_script(tmp_path):
    one = trainer(tmp_path)
    one.train()
    one.end()


def test_a_search_of_options_is_refused_with_what_to_use(tmp_path):
    with pytest.raises(RuntimeError, match="covey tune"):
        trainer(tmp_path).hyperparameter_search(n_trials=2)
