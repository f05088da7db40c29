"""`--recipe NAME` sets options below those of the file and the flags, and says which."""

import pytest
import yaml

from covey import GRPOConfig
from covey.cli import doctor_plan, main, recipe
from covey.cli.flags import typed
from covey.cli.recipe import RECIPES
from covey.doctor.roofline.estimate import estimate
from covey.errors import ConfigError


def options_of(capsys, *flags):
    assert main(["train", *map(str, flags), "--print-config"]) == 0
    said = capsys.readouterr()
    return yaml.safe_load(said.out), said.err


def test_a_recipe_sets_its_options_and_says_so(capsys):
    found, said = options_of(capsys, "demo", "--recipe", "fast")
    assert RECIPES["fast"].items() <= found.items()
    assert "recipe fast: --num-iterations 4 --target-kl 0.02 --curriculum frontier\n" in said
    assert "recipe" not in found  # the run is recorded by what it set


def test_options_of_the_file_and_of_the_command_line_win_over_it(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("recipe: fast\ntarget_kl: 0.1\n")
    found, said = options_of(capsys, tmp_path / "run.yaml", "--num-iterations", 1)
    assert (found["num_iterations"], found["target_kl"], found["curriculum"]) == (1, 0.1, "frontier")
    assert "recipe fast: --curriculum frontier; yours: --num-iterations, --target-kl\n" in said


def test_an_unknown_recipe_is_refused_with_the_nearest(capsys):
    assert main(["train", "demo", "--recipe", "fsat"]) == 2
    assert "--recipe fsat is unknown. Did you mean fast?" in capsys.readouterr().err


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_valid_configuration(name, tmp_path):
    config = GRPOConfig(output_dir=str(tmp_path), **RECIPES[name])
    assert all(getattr(config, option) == value for option, value in RECIPES[name].items())


@pytest.mark.nightly
@pytest.mark.parametrize("name", recipe.recipes())
def test_a_recipe_fits_and_its_head_says_what_its_plan_says(name):
    """If it fails after a change of the learner, `python benchmarks/recipes.py` writes the heads again."""
    options = recipe.expanded({"recipe": name}, doctor_plan.verb.flags())
    types = {**{flag.name: flag.type for flag in doctor_plan.verb.flags()}, **doctor_plan.verb.types()}
    plan = estimate(doctor_plan.setup_of(typed(options, types)))
    facts = recipe.recipes()[name].facts
    assert plan.fits
    assert plan.held.peak / 2**30 == pytest.approx(float(facts["planned_peak_gib"]), rel=0.1)
    assert plan.seconds.step == pytest.approx(float(facts["planned_seconds_a_step"]), rel=0.1)


@pytest.mark.parametrize("name", recipe.recipes())
def test_every_recipe_file_is_a_valid_run(name, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(recipe.recipes()[name].processes))
    options, said = options_of(capsys, "--recipe", name)
    assert f"recipe {name}: Qwen2.5-" in said
    assert options["model"].startswith("Qwen/Qwen2.5-")
    per_step = options["per_device_train_batch_size"] * options["gradient_accumulation_steps"]
    assert per_step * recipe.recipes()[name].processes in (256, 1024)


def test_the_recipes_are_listed_by_hardware_and_shown(capsys):
    assert main(["recipes", "--gpus", "h100"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert "qwen2.5-7b-lora-h100" in {row.split()[0] for row in rows}
    assert all(row.split()[1] == "H100" for row in rows[1:])
    assert main(["recipes", "qwen2.5-7b-lora-h100"]) == 0
    assert "lora_r: 16" in capsys.readouterr().out
    assert main(["recipes", "qwen2.5-7b-full-2x8xh100"]) == 0
    assert "torchrun --nnodes 2 --nproc-per-node 8 -m covey train --recipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        (
            ["recipes", "qwen2.5-7b-lora-h10"],
            "There is no recipe qwen2.5-7b-lora-h10. Did you mean qwen2.5-7b-lora-h100?",
        ),
        (["recipes", "--gpus", "TPU"], "No recipe is for --gpus TPU."),
        (["train", "--recipe", "qwen2.5-9b-lora-h100"], "is unknown. Did you mean qwen2.5-"),
    ],
)
def test_a_recipe_that_is_not_there_is_refused_with_what_is(words, said, capsys):
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_recipe_is_refused_on_a_machine_that_cannot_run_it():
    lora, many = recipe.recipes()["qwen2.5-7b-lora-h100"], recipe.recipes()["qwen2.5-7b-full-8xh100"]
    with pytest.raises(
        ConfigError, match="is for H100, and PyTorch sees no GPU here; .* covey doctor plan --recipe qwen"
    ):
        recipe.refuse_wrong_machine(lora, [])
    with pytest.raises(ConfigError, match="and the GPU here has 12 GiB"):
        recipe.refuse_wrong_machine(lora, [12 * 2**30])
    with pytest.raises(ConfigError, match="needs 8 processes: torchrun --nproc-per-node 8 -m covey train"):
        recipe.refuse_wrong_machine(many, [80 * 2**30] * 8)
    recipe.refuse_wrong_machine(lora, [79 * 2**30])
    recipe.refuse_wrong_machine(lora, [12 * 2**30], has_limit=True)
