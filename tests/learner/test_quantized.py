"""Quantized models, and 8-bit optimizers by transformers' names, saved and resumed exactly."""

import warnings
from types import SimpleNamespace

import pytest
import quantized_split
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from covey import GRPOConfig, GRPOTrainer
from covey.adapters import refuse_quantized
from covey.errors import ConfigError
from covey.learner.optimizer import make_optimizer
from forked import Forked, free_port, rank_environment
from kit import tiny_model, tiny_tokenizer


def reward(completion_ids, **columns):
    return [float(sum(ids) % 7) for ids in completion_ids]


def trainer(folder, **changed):
    options = {
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_steps": 2,
    }
    return GRPOTrainer(
        model=tiny_model(hidden=128),
        processing_class=tiny_tokenizer(),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": ["2 + 2 =", "Tom has"]}),
        args=GRPOConfig(output_dir=str(folder), **{**options, **changed}),
    )


def test_the_8_bit_optimizer_keeps_a_quarter_of_the_state_and_resumes_bit_for_bit(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the package says of itself while it loads
        pytest.importorskip("bitsandbytes")
        whole = trainer(tmp_path, optim="adamw_bnb_8bit")
        whole.train()
        again = trainer(tmp_path, optim="adamw_bnb_8bit")
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    embeddings = whole.model.get_input_embeddings().weight
    layers = [parameter for parameter in whole.model.parameters() if parameter is not embeddings]
    state = [value for layer in layers for value in whole.optimizer.state[layer].values() if torch.is_tensor(value)]
    parameters = sum(parameter.numel() for parameter in layers)
    assert sum(value.nbytes for value in state) < 2.5 * parameters  # 8 bytes a parameter in float32
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("optim", ["adamw_8bit", "lion_8bit"])
def test_an_8_bit_optimizer_takes_the_steps_of_transformers_trainer(optim, tmp_path):
    """It leaves embeddings in 32 bits, by an override of bitsandbytes' that lasts as long as the process."""
    manager = pytest.importorskip("bitsandbytes").optim.GlobalOptimManager.get_instance()
    options = {"output_dir": str(tmp_path), "optim": optim, "learning_rate": 1e-2, "use_cpu": True, "report_to": []}
    ends = []
    for make in (
        lambda model: make_optimizer(GRPOConfig(**options, bf16=False), model),
        lambda model: Trainer(model, TrainingArguments(**options)).create_optimizer(),
    ):
        model = tiny_model(hidden=64)
        draw, optimizer = torch.Generator().manual_seed(0), make(model)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draw)
            optimizer.step()
        ends.append(model.state_dict())
    manager.initialize()
    for name, weight in ends[0].items():
        assert torch.equal(weight, ends[1][name]), name


def test_overrides_of_an_earlier_trainers_model_do_not_reach_this_one(tmp_path):
    """bitsandbytes keeps them for the process, by a parameter's place: that of the embeddings, which are frozen here."""
    manager = pytest.importorskip("bitsandbytes").optim.GlobalOptimManager.get_instance()
    options = {"output_dir": str(tmp_path), "optim": "adamw_8bit", "use_cpu": True, "report_to": []}

    def step(make, **frozen):
        model = tiny_model(hidden=64)
        model.get_input_embeddings().requires_grad_(not frozen)
        optimizer = make(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return [
            optimizer.state[weight]["state1"].dtype for group in optimizer.param_groups for weight in group["params"]
        ]

    mine = lambda model: make_optimizer(GRPOConfig(**options, bf16=False), model)
    before = step(mine, frozen=True)
    theirs = step(lambda model: Trainer(model, TrainingArguments(**options)).create_optimizer())
    after, overrides = step(mine, frozen=True), dict(manager.index2config)
    manager.initialize()
    assert (0, 0) in overrides
    assert theirs[0] == torch.float32
    assert before[0] == torch.uint8
    assert after == before


@pytest.mark.parametrize("optim", ["adamw_torch_8bit", "adamw_torch_4bit"])
def test_an_optimizer_that_no_checkpoint_can_hold_is_refused_with_one_that_it_can(optim, tmp_path):
    with pytest.raises(ConfigError, match="adamw_bnb_8bit"):
        GRPOConfig(output_dir=str(tmp_path), optim=optim)


def test_a_4_bit_model_on_a_cpu_is_refused_in_a_sentence(tmp_path):
    from transformers import BitsAndBytesConfig

    tiny_model(hidden=64).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("bitsandbytes")
        with pytest.raises(ConfigError, match="quantized model cannot be trained on a CPU"):
            GRPOTrainer(
                model=str(tmp_path / "model"),
                reward_funcs=reward,
                train_dataset=Dataset.from_dict({"prompt": ["2 + 2 ="]}),
                quantization_config=BitsAndBytesConfig(load_in_4bit=True),
                args=GRPOConfig(output_dir=str(tmp_path / "run"), use_cpu=True, bf16=False, report_to="none", num_generations=4,
                                per_device_train_batch_size=4),
            )  # fmt: skip


def test_a_quantized_model_on_a_gpu_is_trained_by_an_adapter_alone():
    quantized, gpu = SimpleNamespace(is_quantized=True), torch.device("cuda")
    refuse_quantized(quantized, gpu, has_adapter=True)
    refuse_quantized(tiny_model(), gpu, has_adapter=False)
    with pytest.raises(ConfigError, match="peft_config=LoraConfig"):
        refuse_quantized(quantized, gpu, has_adapter=False)


@pytest.mark.slow
def test_two_processes_that_split_a_4_bit_model_train_and_sample_its_adapter_as_one(tmp_path):
    pytest.importorskip("bitsandbytes")
    tiny_model("qwen2", hidden=64, layers=2).save_pretrained(tmp_path)
    port = free_port()
    for envs in ([{}], [rank_environment(rank, port) for rank in range(2)]):
        ranks = [Forked(quantized_split.__file__, tmp_path, env=env) for env in envs]
        assert [rank.wait(200) for rank in ranks] == [0] * len(ranks), "\n".join(rank.err[-3000:] for rank in ranks)
    alone, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert alone["gradient"].abs().max() > 1e-3
    for found in (first, second):
        assert torch.equal(found["logp"], alone["logp"])
        assert torch.equal(found["gradient"], alone["gradient"])
    assert first["drawn"] == second["drawn"] == alone["drawn"]
    assert first["names"] == alone["names"]
    assert first["sent"] == second["sent"] == alone["sent"], "weights of a server"
    assert alone["split"] == 0
    assert (first["split"], first["held"]) == (14, 0.5), "seven layers in each of two blocks"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_adapter_on_a_4_bit_model_learns_on_a_gpu(tmp_path):
    pytest.importorskip("bitsandbytes")
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

    tiny_model(hidden=64).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    one = GRPOTrainer(
        model=str(tmp_path / "model"),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": ["2 + 2 =", "Tom has"]}),
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        args=GRPOConfig(output_dir=str(tmp_path / "run"), report_to="none", num_generations=4, beta=0.04, max_steps=2,
                        per_device_train_batch_size=8, max_completion_length=8, learning_rate=1e-2),
    )  # fmt: skip
    before = {name: p.detach().clone() for name, p in one.model.named_parameters() if p.requires_grad}
    one.train()
    assert all("lora" in name for name in before)
    assert any(not torch.equal(p, before[name]) for name, p in one.model.named_parameters() if name in before)
