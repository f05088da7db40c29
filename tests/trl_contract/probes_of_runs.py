"""Probes of logs, callbacks and rewards."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

import torch
from datasets import Dataset
from transformers import Qwen2ForCausalLM, TrainerCallback
from world import CHAT, ROWS, AtLeast, first_log, keys, length, one, own_run, probe

# -- logs ----------------------------------------------------------------------------------------------------------------


@probe
def log_of_the_optimizer(w):
    return keys(
        first_log(w), "loss", "grad_norm", "learning_rate", "epoch", "step", "num_tokens", "entropy", "kl", "frac"
    )


@probe
def log_of_rewards(w):
    return keys(first_log(w), "reward")


@probe
def log_of_completions(w):
    return keys(first_log(w), "completions/")


@probe
def log_of_clipping(w):
    return keys(first_log(w), "clip_ratio/")


@probe
def log_has_all_names(w):
    return AtLeast(sorted(first_log(w)))


@probe
def log_of_a_rewards_own_metric(w):
    return first_log(w)["my_metric"]


@probe
def logs_come_every_logging_steps(w):
    return [
        entry["step"] for entry in w.main.trainer.state.log_history if "loss" in entry and "train_loss" not in entry
    ]


@probe
def logs_of_every_step(w):
    history = w.plain.trainer.state.log_history
    return [entry["step"] for entry in history if "loss" in entry and "train_loss" not in entry]


@probe
def last_log_sums_the_run_up(w):
    return keys(w.main.trainer.state.log_history[-1], "train_", "total_flos", "epoch", "step")


@probe
def rate_in_the_log_is_the_schedules(w):
    return first_log(w)["learning_rate"]


@probe
def epochs_in_the_log(w):
    history = w.main.trainer.state.log_history
    return [round(entry["epoch"], 6) for entry in history if "loss" in entry and "train_loss" not in entry]


@probe
def mean_of_a_reward_leaves_out_none(w):
    return first_log(w)["rewards/half/mean"]


@probe
def reward_is_the_weighted_sum(w):
    log = first_log(w)
    return abs(log["reward"] - (log["rewards/length/mean"] + 0.5 * 0.5 * 2)) < 1e-4


@probe
def reward_std_of_known_rewards(w):
    log = w.plain.trainer.state.log_history[0]
    return [round(log["reward"], 4), round(log["reward_std"], 4), log["frac_reward_zero_std"]]


@own_run
def equal_rewards_are_told(w):
    made = w.trainer(one, logging_steps=1)
    made.train()
    log = made.state.log_history[0]
    return [log["frac_reward_zero_std"], log["reward_std"], round(log["loss"], 6), round(log["grad_norm"], 6)]


@own_run
def a_reward_that_never_applies(w):
    made = w.trainer([length, lambda completions, **columns: [None] * len(completions)], logging_steps=1)
    made.train()
    return "rewards/<lambda>/mean" in made.state.log_history[0]


@own_run
def a_metric_without_a_value_is_none(w):
    made = w.trainer([length, lambda completions, **columns: [None] * len(completions)], logging_steps=1)
    made.train()
    return [made.state.log_history[0]["rewards/<lambda>/mean"], made.state.log_history[0]["reward"] is not None]


@probe
def tokens_are_counted(w):
    counts = [
        entry["num_tokens"] for entry in w.main.trainer.state.log_history if "loss" in entry and "num_tokens" in entry
    ]
    return [counts == sorted(counts), counts[0] > 0]


@own_run
def a_run_shorter_than_logging_steps(w):
    made = w.trainer(logging_steps=10, max_steps=2)
    made.train()
    return AtLeast(sorted(key for key in made.state.log_history[-1] if not key.startswith(("completions", "clip"))))


@probe
def what_train_returns(w):
    result = w.main.result
    return [
        type(result).__name__,
        result.global_step,
        isinstance(result.training_loss, float),
        keys(result.metrics, "train_", "epoch"),
    ]


@own_run
def train_takes_these_arguments(w):
    return w.trainer().train(resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=["reward"]).global_step


@own_run
def own_metrics_by_the_list(w):
    class Mine(w.lib.GRPOTrainer):
        def log(self, logs, start_time=None):
            self._metrics["train"]["mine"].append(3.0)
            super().log(logs, start_time)

    made = w.trainer(kind=Mine, logging_steps=1)
    made.train()
    return made.state.log_history[0]["mine"]


@probe
def log_called_by_a_script(w):
    made = w.trainer()
    made.log({"mine": 4.0})
    return [made.state.log_history[-1]["mine"], made.state.log_history[-1]["step"]]


@own_run
def rewards_scaled_over_the_batch_or_not_at_all(w):
    def place(completions, **columns):
        return [float(i) for i in range(len(completions))]

    found = []
    for scale in ("batch", "none"):
        made = w.trainer(place, scale_rewards=scale, per_device_train_batch_size=8, logging_steps=1)
        made.train()
        log = made.state.log_history[0]
        found.append([round(log["reward"], 4), round(log["reward_std"], 4), log["frac_reward_zero_std"]])
    return found


@own_run
def truncated_completions_may_be_masked(w):
    made = w.trainer(
        model=w.model(eos=None), mask_truncated_completions=True, logging_steps=1, processing_class=w.tokenizer()
    )
    made.train()
    log = made.state.log_history[0]
    return [round(log["completions/clipped_ratio"], 4), round(log["loss"], 6)]


@own_run
def a_share_of_tokens_with_high_entropy(w):
    return w.trainer(top_entropy_quantile=0.5, entropy_coef=0.01).train().global_step


@own_run
def a_coefficient_of_entropy_is_logged(w):
    made = w.trainer(entropy_coef=0.01, logging_steps=1)
    made.train()
    return keys(made.state.log_history[0], "entropy", "policy_loss")


@own_run
def template_options_reach_the_prompt(w):
    made = w.trainer(rows=CHAT, chat_template_kwargs={"enable_thinking": False})
    return [made.train().global_step, made.chat_template_kwargs]


@own_run
def other_columns_may_be_kept_from_rewards(w):
    seen = []

    def look(completions, **columns):
        seen.append(sorted(set(columns) & {"answer"}))
        return [0.0] * len(completions)

    w.trainer(look, remove_unused_columns=True).train()
    return seen


# -- callbacks -----------------------------------------------------------------------------------------------------------


def without_predictions(events):
    return [event for event in events if event != "on_prediction_step"]


@probe
def events_of_a_run(w):
    return AtLeast(sorted(set(w.main.listener.events)))


@probe
def events_in_order(w):
    return without_predictions(w.main.listener.events)


@probe
def events_of_micro_batches(w):
    events = w.plain.listener.events
    return [
        events.count(name)
        for name in ("on_substep_end", "on_step_begin", "on_step_end", "on_optimizer_step", "on_epoch_begin")
    ]


@probe
def events_of_a_step_in_order(w):
    events = w.plain.listener.events
    return events[events.index("on_step_begin") : events.index("on_step_end") + 1]


@probe
def callbacks_get_these_arguments(w):
    return AtLeast(sorted(w.main.listener.given["on_step_end"]))


@probe
def callbacks_get_the_training_loader(w):
    batch = next(iter(w.plain.listener.given["on_train_begin"]["train_dataloader"]))
    return [len(batch), sorted(batch[0])]


@probe
def callbacks_get_the_evaluation_loader(w):
    return "eval_dataloader" in w.main.listener.given["on_evaluate"]


@probe
def callbacks_get_the_model_and_the_optimizer(w):
    given = w.plain.listener.given["on_step_end"]
    return [
        isinstance(given["model"], Qwen2ForCausalLM),
        isinstance(given["optimizer"], torch.optim.Optimizer),
        "lr_scheduler" in given,
    ]


@probe
def callbacks_see_every_log(w):
    heard = [{key for key in entry if key != "epoch"} for entry in w.main.listener.logs]
    told = [{key for key in entry if key not in ("step", "epoch")} for entry in w.main.trainer.state.log_history]
    return [a <= b for a, b in zip(heard, told, strict=True)]


@probe
def state_of_a_run(w):
    state = w.main.listener.state
    names = (
        "global_step",
        "max_steps",
        "num_train_epochs",
        "logging_steps",
        "eval_steps",
        "save_steps",
        "train_batch_size",
        "is_world_process_zero",
    )
    return [getattr(state, name) for name in names] + [round(state.epoch, 6)]


@own_run
def a_callback_ends_the_run(w):
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **named):
            control.should_training_stop = True

    return w.trainer(callbacks=[Stops()], max_steps=5).train().global_step


@own_run
def a_callback_asks_for_all(w):
    class Asks(TrainerCallback):
        def on_step_end(self, args, state, control, **named):
            control.should_log = control.should_evaluate = control.should_save = True

    made = w.trainer(
        callbacks=[Asks()], eval_dataset=Dataset.from_list(ROWS[:1]), output_dir=w.place("asks"), logging_steps=50
    )
    made.train()
    history = made.state.log_history
    has = lambda name: any(name in entry for entry in history)
    return [has("loss"), has("eval_reward"), Path(w.place("asks"), "checkpoint-1").is_dir()]


@own_run
def early_stopping(w):
    from transformers import EarlyStoppingCallback

    made = w.trainer(
        one, callbacks=[EarlyStoppingCallback(1)], eval_dataset=Dataset.from_list(ROWS[:1]), eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True, metric_for_best_model="reward", greater_is_better=True, max_steps=6,
    )  # fmt: skip
    return made.train().global_step


# -- rewards -------------------------------------------------------------------------------------------------------------


@probe
def names_of_rewards(w):
    names = w.judged.reward_func_names
    return names


@probe
def rewards_of_every_form_score(w):
    made = w.judged
    found = {key: value for entry in made.state.log_history for key, value in entry.items()}
    return [found.get(f"rewards/{name}/mean") for name in ("later", "Judge", "bare")]


@probe
def a_reward_model_is_loaded_with_its_tokenizer(w):
    return [
        type(w.judged.reward_funcs[0]).__name__,
        [found is not None for found in w.judged.reward_processing_classes],
    ]


@probe
def a_reward_gets_these_arguments(w):
    return AtLeast(sorted(w.main.calls[0]))


@probe
def a_reward_is_called_once_a_generation_batch(w):
    sizes = [len(call.completions) for call in w.plain.calls]
    return sizes


@probe
def a_conversation_arrives_as_messages(w):
    call = w.plain.calls[0]
    return [call.prompts[0], sorted(call.completions[0][0]), call.completions[0][0]["role"]]


@probe
def token_ids_arrive_as_lists(w):
    return [
        type(w.plain.calls[0].ids).__name__,
        type(w.plain.calls[0].ids[0]).__name__,
        type(w.plain.calls[0].ids[0][0]).__name__,
    ]


@probe
def columns_arrive_repeated_for_each_completion(w):
    return [call.columns["answer"] for call in w.plain.calls[:1]]


@probe
def the_state_a_reward_sees(w):
    return type(w.plain.calls[0].columns["trainer_state"]).__name__


@own_run
def a_reward_of_the_wrong_length(w):
    return w.trainer(lambda completions, **columns: [1.0]).train()


@own_run
def a_reward_that_raises(w):
    def breaks(completions, **columns):
        raise KeyError("gone")

    try:
        w.trainer(breaks).train()
    except Exception:  # noqa: BLE001  # of any kind
        return "ends the run"
    return "goes on"


@own_run
def tensors_and_numpy_from_a_reward(w):
    import numpy

    made = w.trainer(
        [lambda completions, **c: torch.ones(len(completions)), lambda completions, **c: numpy.ones(len(completions))]
    )
    return made.train().global_step


@probe
def partial_and_lambda_names(w):
    def scaled(completions, factor, **columns):
        return [factor] * len(completions)

    return w.trainer(
        [functools.partial(scaled, factor=2.0), lambda completions, **columns: [0.0] * len(completions)]
    ).reward_func_names


@probe
def trls_own_rewards(w):
    found = importlib.import_module(f"{w.library}.rewards")
    names = ["accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment",
             "get_repetition_penalty_reward", "get_cosine_scaled_reward"]  # fmt: skip
    return [name for name in names if hasattr(found, name)]


@probe
def think_format_scores(w):
    found = importlib.import_module(f"{w.library}.rewards").think_format_reward
    texts = ["<think>\na\n</think>\nb", "no", "<think>a", "x<think>a</think>b"]
    return found([[{"role": "assistant", "content": text}] for text in texts])


@probe
def overlong_scores(w):
    found = importlib.import_module(f"{w.library}.rewards").get_soft_overlong_punishment(10, 4)
    return found(completion_ids=[[0] * size for size in (5, 8, 10, 12)])


@own_run
def own_calculation_of_rewards(w):
    class Mine(w.lib.GRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            found = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            return found * 0 + 5

    made = w.trainer(kind=Mine, logging_steps=1)
    made.train()
    return made.state.log_history[0]["reward"]
