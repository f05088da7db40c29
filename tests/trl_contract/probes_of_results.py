"""Probes of data, evaluation, adapters, attributes and files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from datasets import Dataset
from transformers import Qwen2ForCausalLM
from world import ROWS, AtLeast, files, keys, length, one, own_run, probe, stream

# -- data ----------------------------------------------------------------------------------------------------------------


@probe
def a_stream_without_max_steps(w):
    return w.trainer(rows=stream(), max_steps=-1)


@own_run
def a_stream_trains(w):
    return w.trainer(rows=stream(), max_steps=2).train().global_step


@probe
def dispatched_batches_of_a_stream(w):
    return w.trainer(rows=stream(), accelerator_config={"dispatch_batches": True})


@probe
def dispatched_batches_of_a_stream_to_evaluate_on(w):
    return w.trainer(eval_dataset={"held": stream()}, accelerator_config={"dispatch_batches": True})


@own_run
def without_a_prompt_column(w):
    return w.trainer(rows=[{"question": "?"}] * 8).train()


@own_run
def an_epoch_has_these_steps(w):
    made = w.trainer(max_steps=-1, num_train_epochs=1, per_device_train_batch_size=16)
    return [made.train().global_step, round(made.state.epoch, 6)]


@probe
def the_order_of_data(w):
    return [call.columns["answer"][0] for call in w.plain.calls]


@probe
def batches_of_the_training_loader(w):
    batches = list(w.idle.get_train_dataloader())
    return [len(batches), {len(batch) for batch in batches} == {4}, len({batch[0]["prompt"] for batch in batches})]


@probe
def the_whole_prompt_reaches_the_log(w):
    return AtLeast(sorted(w.main.trainer.train_dataset.column_names))


# -- evaluation ----------------------------------------------------------------------------------------------------------


@probe
def names_of_an_evaluation(w):
    return keys(
        w.main.listener.evaluated[0],
        "eval_easy_reward",
        "eval_easy_loss",
        "eval_easy_runtime",
        "eval_easy_samples",
        "eval_easy_steps",
    )


@probe
def names_of_every_set_of_a_dict(w):
    return AtLeast(sorted(w.main.listener.evaluated[0]))


@probe
def all_names_of_an_evaluation(w):
    found = w.run("evaluation", w.idle.evaluate)
    return AtLeast(
        sorted(set(found) - {"eval_model_preparation_time"})
    )  # transformers' own, of the first evaluation only


@probe
def evaluations_of_a_run(w):
    return [entry["step"] for entry in w.main.trainer.state.log_history if "eval_easy_loss" in entry]


@probe
def evaluate_without_training(w):
    return keys(w.run("evaluation", w.idle.evaluate), "eval_reward", "eval_loss", "eval_runtime", "eval_samples")


@probe
def evaluate_by_hand_with_a_prefix(w):
    return AtLeast(
        sorted(
            key
            for key in w.idle.evaluate(metric_key_prefix="test")
            if key in ("test_loss", "test_runtime", "test_steps_per_second")
        )
    )


@own_run
def evaluate_one_set_of_a_dict_by_its_name(w):
    made = w.trainer(eval_dataset={"easy": Dataset.from_list(ROWS[:1]), "hard": Dataset.from_list(ROWS[:2])})
    return [
        sorted(set(made.evaluate("easy")) & {"eval_reward", "eval_loss", "eval_easy_loss"}),
        len(made.state.log_history),
    ]


@probe
def evaluate_a_set_that_the_dict_lacks(w):
    return w.trainer(eval_dataset={"easy": Dataset.from_list(ROWS[:1])}).evaluate("hrad")


@own_run
def evaluate_without_a_set(w):
    return w.trainer().evaluate()


@probe
def eval_strategy_without_a_set(w):
    return w.trainer(eval_strategy="steps", eval_steps=1)


@own_run
def an_evaluation_set_by_a_stream(w):
    return "eval_reward" in w.trainer(eval_dataset=stream()).evaluate()


@own_run
def evaluation_draws_its_own_number(w):
    seen = []

    def count(completions, **columns):
        seen.append(len(completions))
        return [0.0] * len(completions)

    w.trainer(count, num_generations_eval=2, eval_dataset=Dataset.from_list(ROWS[:4])).evaluate()
    return sum(seen)


@own_run
def the_best_checkpoint_is_known(w):
    made = w.trainer(
        eval_dataset=Dataset.from_list(ROWS[:1]), eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, max_steps=2,
        load_best_model_at_end=True, metric_for_best_model="eval_reward", output_dir=w.place("best"),
    )  # fmt: skip
    made.train()
    return [made.state.best_metric is not None, Path(made.state.best_model_checkpoint).name.startswith("checkpoint-")]


@probe
def predict_gives_the_loss_and_its_metrics(w):
    found = w.idle.predict(Dataset.from_list(ROWS[:2]))
    return [
        type(found).__name__,
        found.predictions,
        found.label_ids,
        keys(found.metrics, "test_loss", "test_runtime", "test_samples", "test_steps"),
    ]


@probe
def predict_with_a_prefix(w):
    return keys(
        w.idle.predict(Dataset.from_list(ROWS[:2]), metric_key_prefix="held_out").metrics,
        "held_out_loss",
        "held_out_runtime",
    )


@probe
def batches_of_the_evaluation_loader(w):
    return [len(batch) for batch in w.idle.get_eval_dataloader()]


@probe
def a_test_loader(w):
    return [len(batch) for batch in w.idle.get_test_dataloader(Dataset.from_list(ROWS[:2]))]


@own_run
def logs_saves_and_evaluations_of_every_epoch(w):
    place = Path(w.place("epochs"))
    made = w.trainer(
        eval_dataset=Dataset.from_list(ROWS[:1]), eval_strategy="epoch", save_strategy="epoch", logging_strategy="epoch", max_steps=-1,
        num_train_epochs=2, per_device_train_batch_size=16, output_dir=str(place),
    )  # fmt: skip
    made.train()
    history = made.state.log_history
    steps = [[entry["step"] for entry in history if name in entry] for name in ("learning_rate", "eval_loss")]
    return [steps, sorted(path.name for path in place.glob("checkpoint-*"))]


@own_run
def an_epoch_that_max_steps_cuts_short_is_saved(w):
    place = Path(w.place("short-epoch"))
    made = w.trainer(
        eval_dataset=Dataset.from_list(ROWS[:1]),
        eval_strategy="epoch",
        save_strategy="epoch",
        max_steps=3,
        output_dir=str(place),
    )
    made.train()
    steps = [entry["step"] for entry in made.state.log_history if "eval_loss" in entry]
    return [steps, sorted(path.name for path in place.glob("checkpoint-*"))]


@own_run
def evaluation_before_the_first_step(w):
    made = w.trainer(eval_dataset=Dataset.from_list(ROWS[:1]), eval_strategy="steps", eval_steps=1, eval_on_start=True)
    made.train()
    return [entry["step"] for entry in made.state.log_history if "eval_loss" in entry]


# -- adapters ------------------------------------------------------------------------------------------------------------


@probe
def an_adapter_is_made(w):
    return [type(w.adapter.trainer.model).__name__, w.adapter.trainer.ref_model]


@probe
def only_the_adapter_learns(w):
    now = dict(w.adapter.trainer.model.named_parameters())
    changed = {name for name, value in w.adapter.before.items() if not torch.equal(now[name], value)}
    return [bool(changed), all("lora" in name for name in changed)]


@probe
def files_of_an_adapters_checkpoint(w):
    wanted = {
        "adapter_model.safetensors",
        "adapter_config.json",
        "trainer_state.json",
        "tokenizer.json",
    }
    return AtLeast(sorted(wanted & set(files(w.adapter.folder / "checkpoint-2"))))


@probe
def a_second_adapter(w):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules="all-linear")
    return w.trainer(model=get_peft_model(w.model(), config), peft_config=config)


@own_run
def an_adapter_of_the_users(w):
    from peft import LoraConfig, get_peft_model

    made = w.trainer(
        model=get_peft_model(w.model(), LoraConfig(r=2, target_modules="all-linear")), beta=0.1, logging_steps=1
    )
    made.train()
    return "kl" in made.state.log_history[0]


@probe
def an_adapter_with_a_synchronised_reference(w):
    from peft import LoraConfig

    return w.trainer(peft_config=LoraConfig(r=2, target_modules="all-linear"), beta=0.1, sync_ref_model=True)


# -- attributes and files ------------------------------------------------------------------------------------------------


@probe
def attributes_of_options(w):
    found = w.idle
    names = ("num_generations", "num_iterations", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length",
             "beta", "epsilon_low", "epsilon_high", "loss_type", "scale_rewards", "importance_sampling_level", "use_vllm", "shuffle_dataset",
             "mask_truncated_completions", "top_entropy_quantile", "entropy_coef", "num_generations_eval", "log_completions",
             "chat_template_kwargs", "multi_objective_aggregation", "vllm_mode")  # fmt: skip
    return {name: getattr(found, name) for name in names}


@probe
def attributes_of_trainers(w):
    found = w.main.trainer
    names = ("accelerator", "args", "callback_handler", "control", "eval_dataset", "is_world_process_zero", "lr_scheduler", "model", "model_wrapped",
             "optimizer", "processing_class", "ref_model", "reward_funcs", "reward_func_names", "reward_weights", "state", "tools", "train_dataset",
             "eos_token_ids", "is_deepspeed_enabled", "is_fsdp_enabled", "is_in_train",
             "chat_template", "pad_to_multiple_of", "data_collator", "compute_metrics", "model_init", "label_names")  # fmt: skip
    return AtLeast([name for name in names if hasattr(found, name)])


@probe
def weights_of_rewards_are_a_tensor(w):
    return [w.main.trainer.reward_weights.tolist(), str(w.main.trainer.reward_weights.dtype)]


@probe
def the_reference_is_there_before_training(w):
    return w.main.ref_before is not None


@probe
def the_reference_of_training_is_the_one_before_it(w):
    return w.main.trainer.ref_model is w.main.ref_before


@own_run
def the_reference_stays_when_training_begins_again(w):
    made = w.trainer(beta=0.1, learning_rate=0.1, max_steps=1)
    made.train()
    made.train()
    start = Qwen2ForCausalLM.from_pretrained(w.model_folder)
    pairs = zip(start.parameters(), made.ref_model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@probe
def the_reference_does_not_move(w):
    start = Qwen2ForCausalLM.from_pretrained(w.model_folder)
    pairs = zip(start.parameters(), w.main.trainer.ref_model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@probe
def an_option_set_on_the_trainer(w):
    made = w.trainer()
    made.temperature = 0.5
    return made.temperature


@probe
def the_users_optimizer_is_used(w):
    unwrapped = getattr(w.plain.trainer.optimizer, "optimizer", w.plain.trainer.optimizer)
    return [unwrapped is w.plain.optimizer, type(w.plain.trainer.optimizer.param_groups).__name__]


@probe
def the_model_is_the_users(w):
    return w.plain.trainer.model is w.plain.model


@probe
def checkpoints_of_a_run(w):
    return sorted(path.name for path in w.main.folder.glob("checkpoint-*"))


@probe
def files_of_a_checkpoint_for_use(w):
    wanted = {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "trainer_state.json",
    }
    return AtLeast(sorted(wanted & set(files(w.main.folder / "checkpoint-4"))))


@probe
def files_of_a_checkpoint_for_transformers(w):
    return AtLeast(
        sorted({"optimizer.pt", "scheduler.pt", "rng_state.pth"} & set(files(w.main.folder / "checkpoint-4")))
    )


@probe
def options_saved_beside_the_model(w):
    saved = w.main.folder / "checkpoint-4" / "training_args.bin"
    return type(torch.load(saved, weights_only=False)).__name__


@probe
def state_of_a_checkpoint(w):
    state = json.loads((w.main.folder / "checkpoint-2" / "trainer_state.json").read_text())
    return [state["global_step"], state["max_steps"], state["log_history"][0]["step"]]


@probe
def completions_are_written(w):
    import pyarrow.parquet as pq

    folder = w.main.folder / "completions"
    tables = sorted(path.name for path in folder.iterdir() if "00002" in path.name or "00004" in path.name)
    return [
        tables,
        AtLeast(sorted(pq.read_table(folder / tables[0]).column_names)),
        pq.read_table(folder / tables[0]).num_rows,
    ]


@probe
def a_model_is_saved(w):
    w.main.trainer.save_model(w.place("saved"))
    wanted = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}
    return AtLeast(sorted(wanted & set(files(Path(w.place("saved"))))))


@probe
def a_saved_model_loads(w):
    w.main.trainer.save_model(w.place("saved-too"))
    loaded = Qwen2ForCausalLM.from_pretrained(w.place("saved-too"))
    return all(
        torch.equal(a, b.cpu()) for a, b in zip(loaded.parameters(), w.main.trainer.model.parameters(), strict=True)
    )


@probe
def state_is_saved(w):
    w.main.trainer.save_state()
    return json.loads((w.main.folder / "trainer_state.json").read_text())["global_step"]


@probe
def a_model_card(w):
    w.main.trainer.create_model_card(model_name="mine", tags=["extra"])
    text = (w.main.folder / "README.md").read_text()
    return [name in text for name in ("mine", "extra", "grpo", "library_name: transformers")]


@probe
def metrics_are_written(w):
    w.main.trainer.save_metrics("train", {"train_loss": 1.0})
    w.main.trainer.save_metrics("eval", {"eval_loss": 2.0})
    return json.loads((w.main.folder / "all_results.json").read_text())


@own_run
def a_run_goes_on_from_a_checkpoint(w):
    made = w.trainer(
        [length, one], reward_weights=[1.0, 2.0], max_steps=4, beta=0.1, output_dir=w.place("again"), save_strategy="steps", save_steps=2,
        logging_steps=2, lr_scheduler_type="constant",
    )  # fmt: skip
    made.train()
    more = w.trainer(
        [length, one], reward_weights=[1.0, 2.0], max_steps=4, beta=0.1, output_dir=w.place("again"), save_strategy="steps", save_steps=2,
        logging_steps=2, lr_scheduler_type="constant",
    )  # fmt: skip
    result = more.train(resume_from_checkpoint=w.place("again/checkpoint-2"))
    steps = [entry["step"] for entry in more.state.log_history if "loss" in entry and "train_loss" not in entry]
    return [result.global_step, steps]


@own_run
def resume_from_nothing(w):
    return w.trainer(output_dir=w.place("nothing-there")).train(resume_from_checkpoint=True)


@own_run
def a_limit_of_checkpoints(w):
    made = w.trainer(
        save_strategy="steps", save_steps=1, save_total_limit=1, max_steps=3, output_dir=w.place("limited")
    )
    made.train()
    return sorted(path.name for path in Path(w.place("limited")).glob("checkpoint-*"))


@probe
def trainable_parameters(w):
    return w.idle.get_num_trainable_parameters() == sum(p.numel() for p in w.idle.model.parameters() if p.requires_grad)


@probe
def learning_rates(w):
    return w.plain.trainer.get_learning_rates()


@probe
def number_of_examples(w):
    return w.idle.num_examples(w.idle.get_train_dataloader())


@probe
def batch_size_in_total(w):
    return w.idle.get_total_train_batch_size(w.idle.args)


@probe
def search_of_hyperparameters(w):
    return w.trainer().hyperparameter_search(n_trials=1)


@own_run
def a_trainer_trains_twice(w):
    made = w.trainer(max_steps=2)
    return [made.train().global_step, made.train().global_step]


@own_run
def subclass_with_own_loss(w):
    class Mine(w.lib.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) * 2

    return w.trainer(kind=Mine).train().global_step


@probe
def tags_of_a_subclass(w):
    class Mine(w.lib.GRPOTrainer):
        _tag_names = ("tagged-by-me",)

    made = w.trainer(kind=Mine, output_dir=w.place("tagged"))
    made.create_model_card()
    return "tagged-by-me" in Path(w.place("tagged"), "README.md").read_text()
