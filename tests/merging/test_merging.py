"""Merging: methods equal mergekit's, models and adapters are merged from their files, and what does not fit is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.cli import main
from covey.errors import ConfigError, ModelError
from covey.merging import Recipe, merge_adapters, merge_models
from covey.models.merging import weights as weight_files
from kit import resident, rest_nightly, tiny_model, tiny_tokenizer

GOLDEN = json.loads(Path(__file__).with_name("mergekit_golden.json").read_text())
IDS = torch.arange(3, 15)[None]


def saved(place: Path, seed: int, **kwargs: Any) -> Path:
    torch.manual_seed(seed)
    model = tiny_model("qwen2", **kwargs)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A base and three models of its architecture."""
    place = tmp_path_factory.mktemp("models")
    return [saved(place / name, seed) for seed, name in enumerate(("base", "a", "b", "c"))]


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: "-".join(map(str, case["recipe"].values())))
def test_a_method_equals_mergekit(case):
    recipe = Recipe(**{**case["recipe"], "weights": tuple(case["recipe"]["weights"])})
    tensors = [torch.tensor(one) for one in GOLDEN["models"]][: 2 if recipe.method == "slerp" else 3]
    recipe = recipe.check(len(tensors), has_base=True)
    merged = recipe(tensors, torch.tensor(GOLDEN["base"]))
    torch.testing.assert_close(merged, torch.tensor(case["result"]), atol=1e-6, rtol=0)


def test_dare_keeps_the_difference_on_average_and_its_share_of_entries():
    base, model = torch.zeros(400, 400), torch.full((400, 400), 2.0)
    recipe = Recipe(method="dare_linear", density=0.25, seed=3).check(1, has_base=True)
    merged = recipe([model], base, "layer")
    assert set(merged.unique().tolist()) == {0.0, 8.0}
    assert abs((merged != 0).float().mean().item() - 0.25) < 0.01
    assert torch.equal(merged, recipe([model], base, "layer"))
    assert not torch.equal(merged, recipe([model], base, "another layer"))


def test_models_of_several_files_are_merged_into_one_that_loads(models, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 50_000)
    AutoModelForCausalLM.from_pretrained(models[1]).save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    merge_models([tmp_path / "sharded", models[2]], tmp_path / "soup", Recipe(weights=(3.0, 1.0)))
    assert (tmp_path / "soup" / "model.safetensors.index.json").is_file()
    first, second, merged = parameters(models[1]), parameters(models[2]), parameters(tmp_path / "soup")
    for name, weight in merged.items():
        torch.testing.assert_close(weight, (3 * first[name] + second[name]) / 4, atol=1e-6, rtol=0)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory are read from Linux")
def test_a_merge_holds_one_tensor_of_each_model_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 6 * 2**20)
    layers = {f"layers.{k}.weight": (torch.float32, (512, 1024)) for k in range(20)}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        weight_files.write(tmp_path / name, layers, (torch.full(shape, 1.0) for _, shape in layers.values()))
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 7  # 40 MiB, each tensor 2 MiB
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    merge_models([tmp_path / "a", tmp_path / "b"], tmp_path / "out", Recipe())
    assert resident("VmHWM") - before < 40


def test_a_merge_is_written_in_the_type_that_is_asked_for(models, tmp_path):
    command = ["merge", str(models[1]), str(models[2]), "--method", "slerp", "--weights", "0.3", "--dtype", "bfloat16"]
    assert main([*command, "-o", str(tmp_path / "half")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "half")("2 + 2").input_ids
    told = json.loads((tmp_path / "half" / "merge.json").read_text())
    assert (told["method"], told["weights"]) == ("slerp", [0.3])


def test_a_model_of_an_earlier_release_of_transformers_is_merged(models, tmp_path):
    """Its `config.json` names the same values otherwise, as those of most models on the hub do."""
    shutil.copytree(models[1], tmp_path / "old")
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "torch_dtype": config.pop("dtype")}
    del config["layer_types"]
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    merge_models([tmp_path / "old", models[2]], tmp_path / "out", Recipe())
    merge_models(models[1:3], tmp_path / "expected", Recipe())
    merged, expected = parameters(tmp_path / "out"), parameters(tmp_path / "expected")
    assert all(torch.equal(weight, expected[name]) for name, weight in merged.items())


def test_a_disk_that_refuses_modes_of_files_takes_a_merge(models, tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.chmod", refuse)
    merge_models(models[1:3], tmp_path / "merged", Recipe())
    assert (tmp_path / "merged" / "tokenizer_config.json").is_file()


@pytest.mark.parametrize("stored", [(0, 1, 2), (1,)], ids=str)
def test_an_output_layer_that_is_tied_stays_tied(models, tmp_path, stored):
    """Files of earlier releases hold it twice; DARE would drop other entries of it than of the embeddings, and transformers load both."""
    folders = [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in models[:3]]
    for folder in [folders[i] for i in stored]:
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    merge_models(folders[1:], tmp_path / "out", Recipe(method="dare_linear"), base=folders[0])
    merged = parameters(tmp_path / "out")
    assert torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])


@pytest.mark.parametrize("method", ["linear", "slerp", "ties", "dare_ties"])
def test_tensors_of_different_types_are_merged_in_the_larger(method):
    single, double = torch.randn(4, 3), torch.randn(4, 3, dtype=torch.float64)
    recipe = Recipe(method=method, density=1.0).check(2, has_base=True)
    merged, expected = (recipe([first, double], torch.zeros(4, 3)) for first in (single, single.double()))
    assert torch.equal(merged, expected)


def test_weights_of_agreeing_signs_that_add_up_to_0_divide_nothing():
    """0.3 - 0.1 - 0.2 is 3e-17: a weighted mean over it would be noise of any size."""
    recipe = Recipe(method="ties", weights=(0.3, -0.1, -0.2), density=1.0).check(3, has_base=True)
    merged = recipe([torch.ones(2), -torch.ones(2), -torch.ones(2)], torch.zeros(2))
    torch.testing.assert_close(merged, torch.full((2,), 0.6))


@pytest.mark.parametrize("weights", [(float("nan"), 1.0), (float("inf"), 1.0)])
def test_a_weight_that_is_no_number_is_named_and_not_the_models(weights, tmp_path):
    with pytest.raises(ConfigError, match="the weights (nan|inf), 1.0 .* must be finite"):
        Recipe(method="ties", weights=weights).check(2, has_base=True)
    with pytest.raises(ConfigError, match="finite"):
        merge_adapters([tmp_path, tmp_path], tmp_path / "out", weights)


def test_a_word_that_one_tokenizer_has_more_is_told(models, tmp_path, capsys):
    """transformers adds an end of text to some tokenizers as it saves a checkpoint; the base of the run lacks it."""
    more = saved(tmp_path / "more", 5)
    tokenizer = json.loads((more / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 10_000, "content": "<new>"})
    (more / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(["merge", str(models[1]), str(more), "-o", str(tmp_path / "out")]) == 0
    told = capsys.readouterr()
    assert f"'<new>' is a word of {models[1]} or {more} alone" in told.out + told.err


def test_one_model_can_be_weakened_against_its_base(models, tmp_path, capsys):
    command = ["merge", str(models[1]), "--method", "task_arithmetic", "--base", str(models[0]), "--scale", "0.5"]
    assert main([*command, "-o", str(tmp_path / "weaker"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights"] == [1.0]
    base, model, merged = parameters(models[0]), parameters(models[1]), parameters(tmp_path / "weaker")
    for name, weight in merged.items():
        torch.testing.assert_close(weight, (base[name] + model[name]) / 2, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "words, said",
    [
        (["a", "b", "--method", "slrep"], "Did you mean slerp?"),
        (["a", "b", "c", "--method", "slerp"], "slerp lies between two models, and 3 were given"),
        (["a", "b", "--method", "ties"], "ties adds differences from a common base model; give --base"),
        (["a", "b", "--weights", "1", "2", "3"], "3 weights were given for 2 models"),
        (["a", "b", "--method", "ties", "--base", "base", "--density", "1.5"], "density 1.5 is no share"),
        (["a", "b", "c", "--weights", "0.1", "0.2", "-0.3"], "the weights add up to 0"),
        (["a", "b", "--method", "dare_linear", "--base", "base", "--weights", "1", "-1"], "the weights add up to 0"),
        (["a", "b", "--method", "slerp", "--weights", "1", "-1"], "the weights add up to 0"),
        (
            ["a", "b", "--weights", "1e7", "1e7", "--normalize", "false", "--dtype", "float16"],
            "after the merge as torch.float16; one of the models holds NaN or infinity, or the type is too small",
        ),
        (["a", "smaller"], "are not of one architecture: head_dim is 16 and 8"),
        (["a", "words"], "have different vocabularies"),
        (["a", "nan"], "is not finite after the merge"),
        (["a", "damaged"], "cannot be read"),
        (["a", "twice"], "is in {place}/twice/model-old.safetensors and in model.safetensors; remove the files"),
        (["a", "eight-bit"], "as F8_E4M3, which cannot be merged; give a model that is not quantized"),
        (["a", "b", "--rank", "4"], "--rank is for adapters"),
        (["a", "b", "--choose", "demo"], "--choose needs --reward"),
        (["a", "b", "--density", "0.3"], "--density does not act on a merge by linear; leave it out"),
        (["a", "b", "--base", "base"], "--base does not act on a merge by linear"),
        (["a", "b", "--reward", "math"], "--reward does not act on a merge by linear"),
        (["a", "b", "--method", "slerp", "--normalize", "false"], "--normalize does not act on a merge by slerp"),
        (["a", "nowhere"], "nowhere' does not exist"),
        (["a", "demo"], "are not of one architecture"),
    ],
)
def test_what_does_not_fit_is_told_in_a_sentence_and_nothing_is_written(models, tmp_path, words, said, capsys):
    place = models[0].parent
    if "smaller" in words:
        saved(place / "smaller", 4, hidden=16)
    if "words" in words:
        saved(place / "words", 5)
        tokenizer = json.loads((place / "words" / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        (place / "words" / "tokenizer.json").write_text(json.dumps(tokenizer))
    if "nan" in words:
        saved(place / "nan", 6)
        model = AutoModelForCausalLM.from_pretrained(place / "nan")
        next(model.parameters()).data[0, 0] = float("nan")
        model.save_pretrained(place / "nan")
    if "damaged" in words:
        saved(place / "damaged", 7)
        file = place / "damaged" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
    if "twice" in words:
        saved(place / "twice", 8)
        shutil.copy(place / "twice" / "model.safetensors", place / "twice" / "model-old.safetensors")
    if "eight-bit" in words:
        file = saved(place / "eight-bit", 9) / "model.safetensors"
        save_file({name: one.to(torch.float8_e4m3fn) for name, one in load_file(file).items()}, file)
    folders = {"base", "a", "b", "c", "smaller", "words", "nan", "damaged", "twice", "eight-bit", "nowhere"}
    given = [str(place / word) if word in folders else word for word in words]
    assert main(["merge", *given, "-o", str(tmp_path / "out")]) != 0
    assert said.format(place=place) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def adapters(models, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two LoRA adapters of different rank on the base."""
    peft = pytest.importorskip("peft")
    place = tmp_path_factory.mktemp("adapters")
    out = []
    for k, (rank, alpha) in enumerate(((2, 8), (3, 3))):
        torch.manual_seed(k)
        base = AutoModelForCausalLM.from_pretrained(models[0])
        config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=["q_proj", "down_proj"])
        adapted = peft.get_peft_model(base, config)
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
        adapted.save_pretrained(place / str(k))
        out.append(place / str(k))
    return out


def updates(models: list[Path], adapter: Path) -> dict[str, torch.Tensor]:
    """What an adapter adds to each weight of the base."""
    import peft

    base = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    before = {name: one.clone() for name, one in base.state_dict().items()}
    merged = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload()
    return {name: one - before[name] for name, one in merged.state_dict().items()}


def test_adapters_of_different_rank_are_merged_exactly(models, adapters, tmp_path):
    assert merge_adapters(adapters, tmp_path / "both", (3.0, 1.0)) == 0.0
    first, second, merged = (updates(models, one) for one in (*adapters, tmp_path / "both"))
    assert json.loads((tmp_path / "both" / "adapter_config.json").read_text())["r"] == 5
    for name, update in merged.items():
        torch.testing.assert_close(update, 0.75 * first[name] + 0.25 * second[name], atol=1e-6, rtol=0)


def test_a_smaller_rank_has_the_error_that_is_said(models, adapters, tmp_path, capsys):
    command = ["merge", *map(str, adapters), "-o", str(tmp_path / "low"), "--rank", "2", "--json"]
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)["error"]
    first, second, merged = (updates(models, one) for one in (*adapters, tmp_path / "low"))
    off = []
    for name, update in merged.items():
        exact = (first[name] + second[name]) / 2
        if exact.any():
            off.append(((update - exact).norm() / exact.norm()).item())
            assert torch.linalg.matrix_rank(update, tol=1e-5) <= 2
    assert 0.01 < told < 1
    assert max(off) == pytest.approx(told, rel=1e-3)


def test_adapters_that_changed_their_base_are_refused(models, tmp_path):
    import peft

    for name in ("first", "second"):
        base = AutoModelForCausalLM.from_pretrained(models[0])
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa")
        peft.get_peft_model(base, config).save_pretrained(tmp_path / name)
    with pytest.raises(ConfigError, match="init_lora_weights='pissa', which changes the base"):
        merge_adapters([tmp_path / "first", tmp_path / "second"], tmp_path / "out")


def test_an_adapter_of_scale_0_adds_nothing(models, adapters, tmp_path):
    idle = shutil.copytree(adapters[1], tmp_path / "idle")
    config = json.loads((idle / "adapter_config.json").read_text())
    (idle / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 0}))
    merge_adapters([adapters[0], idle], tmp_path / "both")
    first, merged = (updates(models, folder) for folder in (adapters[0], tmp_path / "both"))
    for name, update in merged.items():
        torch.testing.assert_close(update, first[name] / 2, atol=1e-6, rtol=0)


def test_adapters_that_do_not_fit_together_are_refused(adapters, models, tmp_path, capsys):
    import peft

    other = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(models[0]), peft.LoraConfig(target_modules=["v_proj"])
    )
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="differ in target_modules"):
        merge_adapters([adapters[0], tmp_path / "other"], tmp_path / "out")
    assert main(["merge", str(adapters[0]), str(models[1]), "-o", str(tmp_path / "out")]) != 0
    assert "is an adapter and other models are not" in capsys.readouterr().err
    assert main(["merge", *map(str, adapters), "-o", str(tmp_path / "out"), "--dtype", "bfloat16"]) != 0
    assert "--dtype does not act on adapters" in capsys.readouterr().err
    assert main(["merge", str(adapters[0]), "-o", str(tmp_path / "out"), "--rank", "8"]) != 0
    assert "--rank does not act on one adapter that is added into its base" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_adapters_that_hold_more_than_factors_or_other_layers_are_refused(adapters, tmp_path):
    fewer = shutil.copytree(adapters[1], tmp_path / "fewer")
    tensors = load_file(fewer / "adapter_model.safetensors")
    save_file({k: v for k, v in tensors.items() if "down_proj" not in k}, fewer / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="do not adapt the same layers: .*down_proj.*in one of them only"):
        merge_adapters([adapters[0], fewer], tmp_path / "out")
    both = []
    for place in (shutil.copytree(one, tmp_path / one.name) for one in adapters):
        tensors = load_file(place / "adapter_model.safetensors")
        save_file({**tensors, "base_model.model.lm_head.weight": torch.ones(2)}, place / "adapter_model.safetensors")
        both.append(place)
    with pytest.raises(ConfigError, match=r"lm_head.weight, which merging adapters does not know"):
        merge_adapters(both, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "option", [{"alora_invocation_tokens": [3, 4]}, {"layer_replication": [[0, 1]]}, {"of_2027": 2}]
)
def test_adapters_whose_factors_mean_another_update_are_refused(adapters, tmp_path, option):
    both = [shutil.copytree(one, tmp_path / one.name) for one in adapters]
    config = json.loads((both[1] / "adapter_config.json").read_text())
    (both[1] / "adapter_config.json").write_text(json.dumps(config | option))
    with pytest.raises(ConfigError, match=f"{min(option)}, which merging adapters does not know"):
        merge_adapters(both, tmp_path / "out")


def test_adapters_of_two_revisions_of_a_base_are_refused(adapters, tmp_path):
    both = [shutil.copytree(one, tmp_path / one.name) for one in adapters]
    config = json.loads((both[1] / "adapter_config.json").read_text())
    (both[1] / "adapter_config.json").write_text(json.dumps(config | {"revision": "v2"}))
    with pytest.raises(ConfigError, match="differ in revision"):
        merge_adapters(both, tmp_path / "out")


def test_a_base_that_is_named_by_a_relative_path_is_the_same_base(adapters, models, tmp_path, monkeypatch):
    monkeypatch.chdir(models[0].parent)
    both = [shutil.copytree(one, tmp_path / one.name) for one in adapters]
    config = json.loads((both[0] / "adapter_config.json").read_text())
    (both[0] / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": models[0].name}))
    merge_adapters(both, tmp_path / "out")
    named = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(models[0].resolve())


def test_numbers_that_are_not_finite_are_no_part_of_a_merge(adapters, tmp_path):
    for weights in ((float("nan"), 1.0), (float("inf"), 1.0)):
        with pytest.raises(ConfigError, match="give one for each"):
            merge_adapters(adapters[:2], tmp_path / "out", weights)
    broken = tmp_path / "broken"
    shutil.copytree(adapters[1], broken)
    tensors = load_file(broken / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, broken / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="broken holds numbers in .* that are not finite"):
        merge_adapters([adapters[0], broken], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_density_that_is_given_is_the_only_one_that_is_tried():
    from covey.cli.merge_models import candidates

    recipe = Recipe(method="ties", density=0.4)
    assert {one.density for one in candidates(recipe, 2, is_dense=True)} == {0.4}
    assert {one.density for one in candidates(recipe, 2)} == {0.3, 0.6, 0.9}


REWARD = """
def ones(completions, **kwargs):
    return [float(text.startswith("1")) for text in completions]
"""


def one_word(place: Path, word: str, strength: float) -> Path:
    """A model that always answers with `word`: its hidden state is constant, and `strength` is the word's logit."""
    model, tokenizer = tiny_model("qwen2", tie_word_embeddings=False), tiny_tokenizer()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model.get_input_embeddings().weight.data.fill_(1.0)
    model.model.norm.weight.data.fill_(1.0)
    model.lm_head.weight.data[tokenizer(word).input_ids[-1]] = strength / model.config.hidden_size
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("other, is_kept", rest_nightly([(2.0, True), (100.0, False)], 1))
def test_weights_are_chosen_by_prompts_and_a_merge_that_is_worse_is_not_written(
    tmp_path, capsys, monkeypatch, other, is_kept
):
    """The other model's word wins in the mean of the two, and in the one that is three parts good only if it is strong."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(REWARD)
    rows = [json.dumps({"prompt": f"{i} + {i % 7} ="}) for i in range(24)]
    Path("prompts.jsonl").write_text("\n".join(rows) + "\n")
    good, bad = one_word(tmp_path / "good", "1", 1.0), one_word(tmp_path / "bad", "a", other)
    command = [
        "merge",
        str(good),
        str(bad),
        "--choose",
        "prompts.jsonl",
        "--reward",
        "mine.py:ones",
        "--max-tokens",
        "2",
    ]
    code = main([*command, "-o", "chosen", "--json"])
    told = capsys.readouterr()
    assert (tmp_path / "chosen" / "model.safetensors").is_file() == is_kept
    if is_kept:
        assert code == 0
        assert json.loads(told.out)["chosen"] == "linear 0.75, 0.25"
        assert "linear 0.75, 0.25: 24 prompts" in told.err  # and not the folder that it is tried in
    else:
        assert code == 2
        assert "The best merge found is worse than" in told.err
