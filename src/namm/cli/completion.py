"""`namm completion`: a script for bash, zsh or fish that completes commands, names of runs, options and their values.

All words are in the script, and runs are looked for by the shell itself: nothing of ours is started at a press of Tab.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from io import StringIO
from typing import Any, Literal, get_args

from tyro.conf import Positional

from namm.cli import COMMANDS, DEBUG, DEVICE, HELP, HELP_ALL, TRUST, ExitEarly
from namm.cli.options import Layout, drawable, parse
from namm.cli.sweep import SINGLE as SWEPT
from namm.cli.train import TARGETS
from namm.experiments.engine.settings import SamplingMethod
from namm.experiments.engine.stages import STAGES
from namm.experiments.paper.items import ITEMS
from namm.experiments.presets import EXPERIMENTS, PRESETS, find
from namm.experiments.sweeps.cell import Where
from namm.precision import Precision

Shell = Literal["bash", "zsh", "fish"]
TAKE_RUNS = [name for name, about in COMMANDS.items() if about.takes_run]
VALUES: dict[str, Sequence[str]] = {
    "--preset": [*PRESETS],
    "--until": [*STAGES],
    "--constraint": [*EXPERIMENTS],
    "--layout": get_args(Layout),
    "--device": ["cpu", "cuda"],
    "--on": get_args(Where),
    "--sampler": get_args(SamplingMethod),
    "--precision": get_args(Precision),
}
"""What may follow an option, where that is one of a few words."""


@dataclass(frozen=True)
class Completion:
    """Print a script that completes `namm` in a shell.

    bash: add `source <(namm completion bash)` to ~/.bashrc. zsh: the same with zsh, after compinit, in ~/.zshrc.
    fish: `namm completion fish > ~/.config/fish/completions/namm.fish`.
    """

    shell: Positional[Shell]
    """bash, zsh or fish."""


def main(arguments: list[str]) -> None:
    """Print the script."""
    shell = parse(Completion, arguments, "namm completion").shell
    print(_fish() if shell == "fish" else _like_bash(shell))


# Words


def first_words() -> dict[str, Sequence[str]]:
    """What may come first after a command, where that is a name that is known."""
    names = [*EXPERIMENTS]
    return {
        **{"run": names, "sweep": names, "check": names, "data": [*drawable()], "train": [*TARGETS]},
        **{"paper": [*ITEMS], "completion": get_args(Shell)},
    }


def options_of(command: str) -> list[str]:
    """The options of a command, as its help has them; of `run` and its like also every setting."""
    examples: dict[str, list[list[str]]] = {
        "run": [["burgers"]],
        "train": [["map", "burgers"], ["counter"]],
        "data": [[name] for name in drawable()],
        "paper": [[next(iter(ITEMS))]],
        "check": [["module:name", "FILE"]],
        "certify": [["FILE", "--constraint", "module:name"]],
        "evaluate": [["FILE", "--against", "FILE", "--constraint", "module:name"]],
    }
    about = COMMANDS[command]
    found = [*HELP, HELP_ALL, DEBUG, *([TRUST] * about.trusts), *([DEVICE] * about.computes)]
    for example in [[], *examples.get(command, [])]:
        found += re.findall(r"(?<![^\s`(\[])--?[a-z][a-z0-9.-]*\b", _help(command, example))
    if command == "sweep":  # takes options of `namm run`, which its help only names
        found += [f"--{name}" for name in SWEPT]
    if command in ("run", "train", "sweep"):
        found += [f"--{name.replace('_', '-')}" for name in _setting_names()]
    return sorted(set(found))


def _help(command: str, arguments: Sequence[str]) -> str:
    """What a command answers to --help."""
    said = StringIO()
    try:
        with redirect_stdout(said):
            import_module(f"namm.cli.{command}").main([*arguments, HELP[1]])
    except ExitEarly:
        pass
    return said.getvalue()


def _setting_names() -> Iterator[str]:
    """The dotted names of all settings of all experiments."""
    for name in (*EXPERIMENTS, "own"):
        yield from _fields(find(name).presets["demo"])


def _fields(settings: Any, place: str = "") -> Iterator[str]:
    for each in fields(settings):
        value = getattr(settings, each.name)
        if is_dataclass(value):
            yield from _fields(value, f"{place}{each.name}.")
        else:
            yield f"{place}{each.name}"


# Scripts

BASH = """\
_namm_offer() {
    local word
    for word in "$@"; do if [[ $word == "$current"* ]]; then COMPREPLY+=("$word"); fi; done
}
_namm_runs() {
    local file
    for file in runs/*/run.json; do
        file=${file#runs/} file=${file%/run.json}
        if [[ -e runs/$file/run.json && $file == "$current"* ]]; then COMPREPLY+=("$(printf %q "$file")"); fi
    done
}
_namm() {
    local place=$COMP_CWORD current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}
    local command=${COMP_WORDS[1]}
    COMPREPLY=()
"""
ZSH = """\
_namm_offer() { compadd -- "$@" }
_namm_runs() {
    local -a found
    found=(runs/*/run.json(N:h:t))
    compadd -a found
    _files
}
_namm() {
    local place=$((CURRENT - 1)) current=$PREFIX before=${words[CURRENT-1]}
    local command=${words[2]}
"""
OTHERWISE = {"bash": "", "zsh": "    _files\n"}
REGISTER = {"bash": "complete -o default -F _namm namm", "zsh": "compdef _namm namm"}


def _like_bash(shell: Shell) -> str:
    """bash and zsh differ in how they hand over what is typed, and in how they take words."""
    options = {command: options_of(command) for command in COMMANDS}
    return (
        f"# Completion of namm in {shell}\n"
        + (BASH if shell == "bash" else ZSH)
        + f"    if (( place == 1 )); then _namm_offer {' '.join(COMMANDS)}; return; fi\n"
        + _case("$before", {option: f"_namm_offer {' '.join(words)}; return" for option, words in VALUES.items()})
        + "    if [[ $current == -* ]]; then\n"
        + _case("$command", {name: f"_namm_offer {' '.join(words)}" for name, words in options.items()})
        + "        return\n    fi\n"
        + "    if (( place == 3 )) && [[ $command == train && $before != -* ]]; then\n"
        + f"        _namm_offer {' '.join(EXPERIMENTS)}; return\n    fi\n"
        + "    if (( place == 2 )); then\n"
        + _case("$command", {name: f"_namm_offer {' '.join(words)}; return" for name, words in first_words().items()})
        + "    fi\n"
        + f"    case $command in {'|'.join(TAKE_RUNS)}) _namm_runs; return ;; esac\n"
        + f"{OTHERWISE[shell]}}}\n{REGISTER[shell]}"
    )


def _case(what: str, actions: Mapping[str, str]) -> str:
    """A `case` of the shell."""
    return "\n".join([f"    case {what} in", *(f"    {name}) {do} ;;" for name, do in actions.items()), "    esac", ""])


def _fish() -> str:
    lines = [
        "# Completion of namm in fish",
        "function __namm_runs; for file in runs/*/run.json; basename (dirname $file); end; end",
        f"complete -c namm -n __fish_use_subcommand -f -a '{' '.join(COMMANDS)}'",
        f"complete -c namm -n '__fish_seen_subcommand_from {' '.join(TAKE_RUNS)}' -a '(__namm_runs)'",
    ]
    names = {**first_words(), "train": [*first_words()["train"], *EXPERIMENTS]}
    for command, words in names.items():
        lines.append(f"complete -c namm -n '__fish_seen_subcommand_from {command}' -a '{' '.join(words)}'")
    for command in COMMANDS:
        for option in options_of(command):
            values = f" -x -a '{' '.join(VALUES[option])}'" if option in VALUES else ""
            name = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            lines.append(f"complete -c namm -n '__fish_seen_subcommand_from {command}' {name}{values}")
    return "\n".join(lines)
