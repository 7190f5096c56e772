"""`namm run`: an experiment from its data to its report, in a folder that remembers what is done."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from namm.cli import HELP
from namm.cli.options import answer, format_usage, log, parse, pick, pick_name, refuse_near_misses
from namm.errors import UsageError
from namm.experiments.engine.settings import Settings
from namm.experiments.engine.stages import MAIN_LINE, STAGES
from namm.experiments.own import OwnData, prepare
from namm.experiments.presets import EXPERIMENTS, OWN, PRESETS, Preset, preset, require_name

OPTIONS = ("preset", "until", "out", "config", "data", "constraint")


def usage() -> str:
    """The help text that needs no experiment."""
    return format_usage(
        "namm run NAME [--preset PRESET] [--until STAGE] [--out DIR] [--config FILE] [--force] [--SETTING VALUE]\n"
        "namm run --data FILE --constraint module:name [the same options]",
        "Run an experiment stage by stage. What is done is not done again, what was cut short goes on, and a changed "
        "setting reruns only what depends on it. The second form takes images and a rule of your own.",
        {
            "NAME": ", ".join(EXPERIMENTS),
            "--preset": "; ".join(f"{name}: {what}" for name, what in PRESETS.items()),
            "--until STAGE": f"the last stage to run: {', '.join(STAGES)} (default: {MAIN_LINE}); mvae and vae only "
            "where they are asked for",
            "--out DIR": "folder of the run (default: runs/NAME)",
            "--config FILE": "settings.yaml of another run, or a part of one",
            "--force": "go on after a map whose verdict is not `works`; without it the run stops there",
            "--data FILE": "your images: HDF5, NPY or NPZ file, or a folder of PNGs, with --data.key and --data.layout "
            "where it does not say; arrays train, val and test are taken as such, a single one is split at random",
            "--constraint": "your rule, module:name: a function (B, C, H, W) -> (B,) or a namm.Constraint, found in "
            "the current folder, or installed",
            "--trust": "run a rule that FILE names and that you have not run before: it is Python code",
            "--SETTING": 'any setting, as in --map.train.budget "500 steps"; `namm run NAME --help` lists them',
        },
    )


def main(arguments: list[str]) -> None:
    """Run an experiment."""
    run_command(arguments, "namm run", usage(), OPTIONS)


def run_command(
    arguments: list[str], command: str, help_: str, options: tuple[str, ...], until: str | None = None
) -> None:
    """Run what `arguments` ask of `command`, which has that help and, besides settings, those options."""
    picked, rest = pick(arguments, options, flags=("force",))
    until = picked.get("until", until)
    name, rest = pick_name(rest)
    if name is None and not _names_own(picked) and (not arguments or set(rest) & set(HELP)):
        answer(help_, arguments)
    refuse_near_misses(rest, (*options, "force"))
    require_name(until or MAIN_LINE, STAGES, "stage")
    chosen = choose(command, name, picked, rest, help_)
    folder = Path(picked.get("out", Path("runs") / chosen.experiment))

    from namm.experiments.engine.run import run

    log(f"{chosen.experiment}, preset {chosen.name}, in {folder}")
    run(chosen, folder, until=until, log=log, force=picked["force"])
    print(f"everything is in {folder}; `namm status {folder}` shows it")


def choose(command: str, name: str | None, picked: Mapping[str, Any], arguments: list[str], help_: str) -> Preset:
    """The experiment `name`, or that of the options `picked`, with the settings in `arguments`."""
    base = _base(command, name, picked)
    settings = base.settings
    if arguments:
        about = f"Settings of {base.experiment}, preset {base.name}."
        prog = f"{command} {base.experiment}"
        settings = parse(Settings, arguments, prog, usage=help_, description=about, default=settings)
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
            return replace(base, settings=replace(base.settings, data=data))
        if _names_own(picked):
            raise UsageError(f"--data and --constraint bring an experiment of your own: leave out {name!r}.")
        return preset(str(name), picked.get("preset", "demo"))

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
    return base


def _names_own(picked: Mapping[str, Any]) -> bool:
    return "data" in picked or "constraint" in picked


def _names(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names in a file of settings."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
