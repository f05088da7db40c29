"""`covey recipes`: options for one model and one machine, each with its planned speed and memory."""

from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.recipe import RECIPES, Recipe, nearest, recipes
from covey.cli.verb import JSON, Args, Verb
from covey.errors import ConfigError, did_you_mean

_FLAGS = (
    Flag(name="name", help="Show this recipe: its options as YAML, and the command that starts it.", group="run"),
    Flag(name="gpus", help="Only recipes for this hardware: H100, 8xH100, RTX4090.", group="run"),
    JSON,
)


def run(args: Args) -> None:
    """List the recipes, or show one."""
    chosen = recipes()
    if args.get("name"):
        _show(args["name"], bool(args.get("json")))
        return
    if args.get("gpus"):
        cards = sorted({recipe.facts["gpus"] for recipe in chosen.values()})
        chosen = {
            name: recipe for name, recipe in chosen.items() if recipe.facts["gpus"].lower() == args["gpus"].lower()
        }
        if not chosen:
            near = did_you_mean(args["gpus"], cards)
            raise ConfigError(
                f"No recipe is for --gpus {args['gpus']}.{near} There are recipes for {', '.join(cards)}."
            )
    if args.get("json"):
        output.result_json([_as_json(recipe) for recipe in chosen.values()])
        return
    output.result(f"{'recipe':<34}{'GPUs':<9}{'s a step':>9}{'GiB':>7}  measured")
    for recipe in chosen.values():
        facts = recipe.facts
        output.result(
            f"{recipe.name:<34}{facts['gpus']:<9}{facts['planned_seconds_a_step']:>9}{facts['planned_peak_gib']:>7}  {facts['measured']}"
        )
    output.say("\nSeconds and GiB are planned, without rewards (docs/recipes.md). covey recipes NAME shows one;")
    output.say(
        f"covey train --recipe NAME trains. For any model and hardware: covey train ... --recipe {', '.join(RECIPES)}"
    )


def _show(name: str, is_json: bool) -> None:
    if name in RECIPES:
        output.result("".join(f"{option}: {value}\n" for option, value in RECIPES[name].items()).rstrip())
        return
    if name not in recipes():
        raise ConfigError(f"There is no recipe {name}.{nearest(name)} `covey recipes` lists them.")
    recipe = recipes()[name]
    if is_json:
        output.result_json(_as_json(recipe))
        return
    output.result(recipe.path.read_text(encoding="utf-8").rstrip())
    output.say(f"\nstart it:  {recipe.launch}\nplan it:   covey doctor plan --recipe {name}")


def _as_json(recipe: Recipe) -> dict[str, str]:
    return {"name": recipe.name, "title": recipe.title, "launch": recipe.launch, **recipe.facts}


verb = Verb(
    name="recipes",
    usage="[NAME] [options]",
    sentence="Recipes: options of covey train for a model on given hardware, with planned seconds and memory.",
    flags=lambda: _FLAGS,
    run=run,
    positional=("name",),
    examples=("covey recipes", "covey recipes qwen2.5-7b-lora-h100", "covey recipes --gpus 8xH100"),
)
