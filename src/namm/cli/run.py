"""`namm run`: an experiment from its data to its maps, in a folder that remembers what is done."""

from dataclasses import replace
from pathlib import Path

from namm.cli.options import HELP, parse, pick, refuse_near_misses, take_name
from namm.errors import UsageError
from namm.experiments.presets import EXPERIMENTS, PRESETS, Preset, preset
from namm.experiments.settings import Settings
from namm.experiments.stages import STAGES, stages_until

OWN = ("preset", "until", "out", "config")


def usage() -> str:
    """The help text that needs no experiment."""
    ready = [name for name, stage in STAGES.items() if stage.function is not None]
    width = max(map(len, PRESETS))
    return "\n".join(
        [
            "usage: namm run NAME [--preset PRESET] [--until STAGE] [--out DIR] [--config FILE] [--SETTING VALUE]",
            "",
            "Run an experiment stage by stage. What is done is not done again, what was cut short goes on, and a",
            "changed setting reruns only what depends on it.",
            "",
            f"  NAME           {', '.join(EXPERIMENTS)}",
            "  --preset       "
            + "\n                 ".join(f"{name:<{width}}  {what}" for name, what in PRESETS.items()),
            f"  --until STAGE  the last stage to run; this version has {', '.join(ready)}",
            "  --out DIR      folder of the run (default: runs/NAME)",
            "  --config FILE  settings.yaml of another run, or a part of one",
            '  --SETTING      any setting, as in --map.train.budget "500 steps"; `namm run NAME --help` lists them',
        ]
    )


def main(arguments: list[str]) -> int:
    """Run an experiment."""
    own, rest = pick(arguments, OWN)
    name, rest = take_name(rest)
    if name is None and (not arguments or set(rest) & set(HELP)):
        print(usage())
        return 0 if arguments else 2
    refuse_near_misses(rest, OWN)
    base = _base(name, own)
    settings = _settings(base, rest)
    if isinstance(settings, int):
        return settings
    stages_until(own.get("until"), settings)
    chosen = replace(base, settings=settings)
    folder = Path(own.get("out", Path("runs") / chosen.experiment))

    from namm.experiments.run import run

    print(f"{chosen.experiment}, preset {chosen.name}, in {folder}", flush=True)
    run(chosen, folder, until=own.get("until"), tell=_tell)
    print(f"everything is in {folder}; `namm status {folder}` shows it")
    return 0


def _base(name: str | None, own: dict[str, str]) -> Preset:
    """The preset, or what the file says, before single settings are changed."""
    if "config" not in own:
        if name is None:
            raise UsageError(f"which experiment? Its name comes first: namm run {'|'.join(EXPERIMENTS)}.")
        return preset(name, own.get("preset", "demo"))

    from namm.experiments.plain import read_yaml

    base = read_yaml(Path(own["config"]))
    for what, asked, found in (("experiment", name, base.experiment), ("preset", own.get("preset"), base.name)):
        if asked not in (None, found):
            raise UsageError(
                f"{own['config']} is for the {what} {found!r}, not {asked!r}: leave {asked!r} out, or use another file."
            )
    return base


def _settings(base: Preset, arguments: list[str]) -> Settings | int:
    """The settings with the changes that the arguments ask for, or an exit code."""
    if not arguments:
        return base.settings
    return parse(
        Settings,
        arguments,
        prog=f"namm run {base.experiment}",
        description=f"Settings of {base.experiment}, preset {base.name}.",
        usage=usage(),
        default=base.settings,
    )


def _tell(line: str) -> None:
    print(line, flush=True)
