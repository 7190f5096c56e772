"""`namm run`: an experiment from its data to its report, in a folder that remembers what is done."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from namm.cli.help_text import format_usage, setting_rows, two_columns
from namm.cli.options import (
    Layout,
    answer,
    asks_for_help,
    log,
    parse,
    pick,
    pick_name,
    refuse_near_misses,
    whole_number,
)
from namm.errors import UsageError
from namm.experiments.engine.settings import Settings, with_seed
from namm.experiments.engine.stages import MAIN_LINE, STAGES
from namm.experiments.own import OwnData, prepare
from namm.experiments.presets import EXPERIMENTS, OWN, PRESETS, Preset, preset, require_name

OWN_OPTIONS = ("data", "constraint", "layout", "key")
OPTIONS = ("preset", "until", "out", "config", "seed", *OWN_OPTIONS)
FLAGS = ("force", "dry-run")
OFTEN = {
    "data.n_train": "images to train on",
    "data.size": "pixels along a side",
    "map.train.budget": "how long g and f are trained: steps, epochs or minutes",
    "map.sigma_max": "how far from g(x) f learns to come back",
    "map.weights.constraint": "λ, the weight of the rule",
    "mdm.train.budget": "how long the diffusion model is trained; the baseline gets equal compute",
    "mdm.train.batch_size": "images per step",
    "mdm.network.filters": "size of the score network: channels at the full resolution",
    "finetune.train.budget": "how long f is trained on the model's samples",
    "evaluate.n": "samples that are measured",
    "evaluate.sampler.steps": "evaluations of the network for a sample",
}
"""Settings that the short help shows, and what they are in a few words."""
COMMON = {
    "--preset": "; ".join(f"{name}: {what}" for name, what in PRESETS.items()),
    "--until STAGE": f"the last stage: {', '.join(STAGES)} (default: {MAIN_LINE}); mvae and vae only if asked for",
    "--out DIR": "folder of the run (default: runs/NAME)",
    "--seed N": "draw everything anew from N: data, trainings, samples (default: 0); best with another --out",
    "--device": "cpu, cuda, or cuda:1 for the second GPU (default: the first GPU, or else the CPU)",
    "--dry-run": "what would run and what is done, with minutes and memory; computes for seconds, writes nothing",
    "--config FILE": "settings.yaml of another run, or a part of one",
    "--force": "go on after a map whose verdict is not `works`; without it the run stops there",
}
OWN_USAGE = {
    "--data FILE": "your images: HDF5, NPY or NPZ file, or a folder of PNGs; arrays train, val and test are taken as "
    "such, a single one is split at random",
    "--layout, --key": "NCHW or NHWC, and the name of the array, where FILE does not say",
    "--constraint": "your rule, module:name: a function (B, C, H, W) -> (B,) or a namm.Constraint, found here or "
    'installed; or one of ours with its numbers, "namm:TotalFlux(120)"',
    "--trust": "run a rule that FILE names and that you have not run before: it is Python code",
}


def usage() -> str:
    """The help text that needs no experiment."""
    return format_usage(
        "namm run NAME [options] [--SETTING VALUE ...]\n"
        "namm run --data FILE --constraint RULE [options] [--SETTING VALUE ...]",
        "Run an experiment stage by stage. What is done is not done again, what was cut short goes on, and a changed "
        "setting reruns only what depends on it. The second form takes images and a rule of your own.",
        {
            "NAME": ", ".join(EXPERIMENTS),
            **COMMON,
            **OWN_USAGE,
            "--SETTING": 'any setting, as in --map.train.budget "500 steps"; `namm run NAME --help` shows the usual '
            "ones, `namm run NAME --help-all` all",
        },
    )


def settings_help(command: str, base: Preset) -> str:
    """The help text of an experiment: options, and the settings that people change, with the preset's values."""
    common = COMMON | (OWN_USAGE if base.experiment == OWN else {})
    if command != "namm run":
        common = {name: text for name, text in common.items() if name != "--until STAGE"}
    if command == "namm sweep":  # which has its own
        common = {}
    name = "--data FILE --constraint RULE" if base.experiment == OWN else base.experiment
    head = format_usage(f"{command} {name} [options] [--SETTING VALUE ...]", "", common)
    shown = two_columns(setting_rows(base.settings, OFTEN))
    return (
        f"{head}\n\nSettings that people change, and what they are in the preset {base.name}:\n{shown}\n\n"
        f"`{command} {name} --help-all` lists every setting."
    )


def main(arguments: list[str]) -> None:
    """Run an experiment."""
    run_command(arguments, "namm run", usage(), OPTIONS)


def run_command(
    arguments: list[str], command: str, help_: str, options: tuple[str, ...], until: str | None = None
) -> None:
    """Run what `arguments` ask of `command`, which has that help and, besides settings, those options."""
    picked, rest = pick(arguments, options, flags=FLAGS)
    until = picked.get("until", until)
    name, rest = pick_name(rest)
    if name is None and not _names_own(picked) and "config" not in picked and (not arguments or asks_for_help(rest)):
        answer(help_, arguments)
    refuse_near_misses(rest, (*options, *FLAGS))
    require_name(until or MAIN_LINE, STAGES, "stage")
    chosen = choose(command, name, picked, rest)
    folder = Path(picked.get("out", Path("runs") / chosen.experiment))
    if picked["dry-run"]:
        from namm.experiments.engine.forecast import forecast

        log(f"{chosen.experiment}, preset {chosen.name}, in {folder}")
        forecast(chosen, folder, until).show()
        return

    from namm.experiments.engine.run import run

    log(f"{chosen.experiment}, preset {chosen.name}, in {folder}")
    run(chosen, folder, until=until, log=log, force=picked["force"])
    print(f"everything is in {folder}; `namm status {folder}` shows it")


def choose(command: str, name: str | None, picked: Mapping[str, Any], arguments: list[str]) -> Preset:
    """The experiment `name`, or that of the options `picked`, with the settings in `arguments`."""
    base = _base(command, name, picked)
    settings = base.settings
    if "seed" in picked:
        settings = with_seed(settings, whole_number("seed", picked["seed"], 0))
    if arguments:
        about = f"Settings of {base.experiment}, preset {base.name}."
        prog = f"{command} {base.experiment}"
        short = settings_help(command, base) if asks_for_help(arguments) else ""
        settings = parse(Settings, arguments, prog, short=short, description=about, default=settings)
    if isinstance(settings.data, OwnData):
        options = (each.partition("=")[0] for each in arguments if each.startswith("--"))
        given = {option.removeprefix("--").replace("-", "_") for option in options}
        named = "config" not in picked or "data.constraint" in given
        if named and "data.folder" not in given:  # a rule that the user names is not one of the file's folder
            settings = replace(settings, data=replace(settings.data, folder=""))
        if "config" in picked:
            from namm.experiments.engine.settings_file import plain_yaml, read_settings

            given |= set(_names(plain_yaml(read_settings(Path(picked["config"])), picked["config"])))
        settings = prepare(settings, given, log, from_file=not named)
    return replace(base, settings=replace(settings, data=settings.data.with_absolute_paths()))


def _base(command: str, name: str | None, picked: Mapping[str, Any]) -> Preset:
    """The preset, or what the file says, before single settings are changed."""
    if "config" not in picked:
        if name is None and not _names_own(picked):
            raise UsageError(
                f"which experiment? Its name comes first: {command} {'|'.join(EXPERIMENTS)}; or bring your own: "
                f"{command} --data FILE --constraint module:name."
            )
        if name in (None, OWN):
            base = preset(OWN, picked.get("preset", "demo"))
            data = OwnData(file=picked.get("data", ""), constraint=picked.get("constraint", ""))
            return _as_read(replace(base, settings=replace(base.settings, data=data)), picked)
        if _names_own(picked):
            raise UsageError(f"--data and --constraint bring an experiment of your own: leave out {name!r}.")
        return _as_read(preset(str(name), picked.get("preset", "demo")), picked)

    from namm.experiments.engine.settings_file import read_yaml

    if _names_own(picked):
        raise UsageError(
            f"{picked['config']} names its own data: leave out --data and --constraint, or change it there."
        )
    base = read_yaml(Path(picked["config"]))
    for what, asked, found in (("experiment", name, base.experiment), ("preset", picked.get("preset"), base.name)):
        if asked not in (None, found):
            raise UsageError(
                f"{picked['config']} is for the {what} {found!r}, not {asked!r}: leave {asked!r} out, or use another "
                "file."
            )
    return _as_read(base, picked)


def _as_read(base: Preset, picked: Mapping[str, Any]) -> Preset:
    """The same with what --layout and --key say of the user's file."""
    given = {name: picked[name] for name in ("layout", "key") if name in picked}
    if not given:
        return base
    if not isinstance(base.settings.data, OwnData):
        raise UsageError(f"--{next(iter(given))} is for images of your own: add --data FILE, or leave it out.")
    if "layout" in given:
        require_name(given["layout"], get_args(Layout), "layout")
    return replace(base, settings=replace(base.settings, data=replace(base.settings.data, **given)))


def _names_own(picked: Mapping[str, Any]) -> bool:
    return "data" in picked or "constraint" in picked


def _names(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names in a file of settings."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
