"""`--recipe NAME` sets options below those of the file and the flags, and says which."""

import pytest
import yaml

from covey import GRPOConfig
from covey.cli import main
from covey.cli.recipes import RECIPES


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
    assert "--recipe fsat is unknown. Did you mean fast? Known: fast." in capsys.readouterr().err


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_valid_configuration(name, tmp_path):
    config = GRPOConfig(output_dir=str(tmp_path), **RECIPES[name])
    assert all(getattr(config, option) == value for option, value in RECIPES[name].items())
