"""`covey completion`: verbs and options for the shell's Tab key."""

from __future__ import annotations

import importlib

from covey.cli import output
from covey.cli.verb import Given, Verb
from covey.errors import ConfigError, did_you_mean

_BASH = """_covey() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} verb=${{COMP_WORDS[1]}} words
    if [ "$COMP_CWORD" = 1 ]; then
        words="{verbs}"
    elif [ "${{word#-}}" = "$word" ]; then
        return
    else
        case "$verb" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _covey covey
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
_FISH_VERB = "complete -c covey -n __fish_use_subcommand -a {verb} -d {sentence}\n"
_FISH_FLAG = "complete -c covey -n '__fish_seen_subcommand_from {verb}' -l {flag} -d {sentence}\n"
_SHELLS = ("bash", "zsh", "fish")


def run(given: Given) -> None:
    """Print the script for one shell."""
    shell = given.get("shell")
    if shell not in _SHELLS:
        hint = did_you_mean(str(shell), _SHELLS) if shell else ""
        raise ConfigError(f"covey completion needs a shell: {', '.join(_SHELLS)}.{hint}")
    output.result(script(str(shell)).rstrip())


def script(shell: str) -> str:
    """What the shell has to read."""
    from covey.cli import VERBS

    flags = {name: _flags(name) for name in VERBS}
    if shell == "fish":
        lines = [_FISH_VERB.format(verb=name, sentence=_quoted(sentence)) for name, sentence in VERBS.items()]
        lines += [_FISH_FLAG.format(verb=name, flag=flag, sentence=_quoted(said)) for name, known in flags.items() for flag, said in known.items()]  # fmt: skip
        return "".join(lines)
    cases = "\n".join(
        f'            {name}) words="{" ".join("--" + flag for flag in known)}" ;;' for name, known in flags.items()
    )
    return (_ZSH if shell == "zsh" else "") + _BASH.format(verbs=" ".join(VERBS), cases=cases)


def _flags(name: str) -> dict[str, str]:
    """Flags of a verb, or of all verbs below it, such as those of `data check` and `data clean`."""
    module = importlib.import_module(f"covey.cli.{name}")
    verbs = [found for found in vars(module).values() if isinstance(found, Verb)]
    return {flag.name.replace("_", "-"): flag.help for found in verbs for flag in found.flags()}


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


verb = Verb(
    name="completion",
    usage="bash | zsh | fish",
    sentence="Let the Tab key complete verbs and options: print what your shell has to read.",
    flags=tuple,
    run=run,
    positional=("shell",),
    examples=(
        "source <(covey completion bash)                                     # in ~/.bashrc",
        "covey completion fish > ~/.config/fish/completions/covey.fish",
    ),
)
