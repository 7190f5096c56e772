"""`namm run`: an experiment from its data to its report, in a folder that remembers what is done."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from namm.cli.options import HELP, parse, pick, refuse_near_misses, take_flag, take_name
from namm.errors import UsageError
from namm.experiments.engine.settings import Settings
from namm.experiments.engine.stages import MAIN_LINE, STAGES
from namm.experiments.own import OwnData, prepare
from namm.experiments.presets import EXPERIMENTS, OWN, PRESETS, Preset, preset, require_name

OPTIONS = ("preset", "until", "out", "config", "data", "constraint")


def usage() -> str:
    """The help text that needs no experiment."""
    width = max(map(len, PRESETS))
    return "\n".join(
        [
            "usage: namm run NAME [--preset PRESET] [--until STAGE] [--out DIR] [--config FILE] [--force]",
            "                [--SETTING VALUE]",
            "       namm run --data FILE --constraint module:name [the same options]",
            "",
            "Run an experiment stage by stage. What is done is not done again, what was cut short goes on, and a",
            "changed setting reruns only what depends on it. The second form takes images and a rule of your own.",
            "",
            f"  NAME           {', '.join(EXPERIMENTS)}",
            "  --preset       "
            + "\n                 ".join(f"{name:<{width}}  {what}" for name, what in PRESETS.items()),
            f"  --until STAGE  the last stage to run: {', '.join(STAGES)} (default: {MAIN_LINE});",
            "                 mvae and vae only where they are asked for",
            "  --out DIR      folder of the run (default: runs/NAME)",
            "  --config FILE  settings.yaml of another run, or a part of one",
            "  --force        go on after a map whose verdict is not `works`; without it the run stops there",
            "  --data FILE    your images: HDF5, NPY or NPZ file, or a folder of PNGs, with --data.key and",
            "                 --data.layout where it does not say; arrays train, val and test are taken as such,",
            "                 a single one is split at random",
            "  --constraint   your rule, module:name: a function (B, C, H, W) -> (B,) or a namm.Constraint, found",
            "                 in the current folder, or installed",
            "  --trust        run a rule that FILE names and that you have not run before: it is Python code",
            '  --SETTING      any setting, as in --map.train.budget "500 steps"; `namm run NAME --help` lists them',
        ]
    )


def main(arguments: list[str]) -> int:
    """Run an experiment."""
    return carry_out(arguments, "namm run", usage(), OPTIONS)


def carry_out(
    arguments: list[str], command: str, help_: str, options: tuple[str, ...], until: str | None = None
) -> int:
    """Run what `arguments` ask of `command`, which has that help and, besides settings, those options."""
    force, arguments = take_flag(arguments, "--force")
    own, rest = pick(arguments, options)
    until = own.get("until", until)
    name, rest = take_name(rest)
    if name is None and not _names_own(own) and (not arguments or set(rest) & set(HELP)):
        print(help_)
        return 0 if arguments else 2
    refuse_near_misses(rest, (*options, "force"))
    require_name(until or MAIN_LINE, STAGES, "stage")
    chosen = choose(command, name, own, rest, help_)
    if isinstance(chosen, int):
        return chosen
    folder = Path(own.get("out", Path("runs") / chosen.experiment))

    from namm.experiments.engine.run import run

    print(f"{chosen.experiment}, preset {chosen.name}, in {folder}", flush=True)
    run(chosen, folder, until=until, tell=tell, force=force)
    print(f"everything is in {folder}; `namm status {folder}` shows it")
    return 0


def choose(command: str, name: str | None, own: dict[str, str], arguments: list[str], help_: str) -> Preset | int:
    """The experiment `name`, or that of the options `own`, with the settings in `arguments`; or an exit code."""
    base = _base(command, name, own)
    prog = f"{command} {base.experiment}"
    settings = _settings(prog, base, arguments, help_)
    if isinstance(settings, int):
        return settings
    if isinstance(settings.data, OwnData):
        options = _given(arguments, None)
        named = "config" not in own or "data.constraint" in options
        if named and "data.folder" not in options:  # a rule that the user names is not one of the file's folder
            settings = replace(settings, data=replace(settings.data, folder=""))
        settings = prepare(settings, _given(arguments, own.get("config")), tell, from_file=not named)
    return replace(base, settings=replace(settings, data=settings.data.with_absolute_paths()))


def _base(command: str, name: str | None, own: dict[str, str]) -> Preset:
    """The preset, or what the file says, before single settings are changed."""
    if "config" not in own:
        if name is None and not _names_own(own):
            raise UsageError(
                f"which experiment? Its name comes first: {command} {'|'.join(EXPERIMENTS)}; or bring your own: "
                f"{command} --data FILE --constraint module:name."
            )
        if name in (None, OWN):
            base = preset(OWN, own.get("preset", "demo"))
            data = OwnData(file=own.get("data", ""), constraint=own.get("constraint", ""))
            return replace(base, settings=replace(base.settings, data=data))
        if _names_own(own):
            raise UsageError(f"--data and --constraint bring an experiment of your own: leave out {name!r}.")
        return preset(str(name), own.get("preset", "demo"))

    from namm.experiments.engine.settings_file import read_yaml

    if _names_own(own):
        raise UsageError(f"{own['config']} names its own data: leave out --data and --constraint, or change it there.")
    base = read_yaml(Path(own["config"]))
    for what, asked, found in (("experiment", name, base.experiment), ("preset", own.get("preset"), base.name)):
        if asked not in (None, found):
            raise UsageError(
                f"{own['config']} is for the {what} {found!r}, not {asked!r}: leave {asked!r} out, or use another file."
            )
    return base


def _names_own(own: dict[str, str]) -> bool:
    return "data" in own or "constraint" in own


def _given(arguments: list[str], config: str | None) -> set[str]:
    """Names of the settings that are given, as options or in the file, also where they equal the preset's."""
    options = {each.partition("=")[0].removeprefix("--") for each in arguments if each.startswith("--")}
    named = {option.replace("-", "_") for option in options}
    if config is None:
        return named

    import yaml

    return named | set(_names(yaml.safe_load(Path(config).read_text())))


def _names(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names in a file of settings."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _settings(prog: str, base: Preset, arguments: list[str], help_: str) -> Settings | int:
    """The settings with the changes that the arguments ask for, or an exit code."""
    if not arguments:
        return base.settings
    return parse(
        Settings,
        arguments,
        prog=prog,
        description=f"Settings of {base.experiment}, preset {base.name}.",
        usage=help_,
        default=base.settings,
    )


def tell(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)
