"""`namm export`: a run's diffusion model, maps and rule as a `NAMMPipeline`."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from tyro.conf import arg

from namm.cli.options import RunName, parse
from namm.cli.sample import THROUGH, choose
from namm.errors import RunFolderError
from namm.experiments.engine.folder import find_run


@dataclass(frozen=True)
class Export:
    """Save a run's diffusion model, its maps and the rule as a pipeline, for NAMMPipeline.from_pretrained.

    With --trust, a rule of the run's that you have not run before is run: it is Python code.
    """

    run: RunName
    out: Annotated[Path, arg(aliases=["-o"])]
    """Folder to write; it must not hold anything yet."""
    model: Literal["mdm", "dm"] = "mdm"
    """Which model; mdm with the finetuned f where there is one."""
    half: bool = False
    """The score network's weights as float16, for a folder of about half the size."""


def main(arguments: list[str]) -> None:
    """Export a run."""
    options = parse(Export, arguments, "namm export")
    run, folder = find_run(options.run), options.out
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(f"{folder} is there already and is not overwritten: choose another folder with -o.")

    from namm.experiments.engine.run_parts import RunParts
    from namm.experiments.engine.stages.evaluate import run_certificate, run_verdict
    from namm.files import publish
    from namm.pipeline import NAMMPipeline

    trained = RunParts.load(run)
    source, stage = choose(trained, run, options.model)
    rule = trained.rule()
    verdict = run_verdict(run, stage) if options.model == "mdm" else None
    row = {"finetune": "finetuned_polished", None: "dm_polished"}.get(stage, "")
    certificate = run_certificate(run, row)
    model, maps = cast(Any, source.model), cast(Any, source.mirror)
    pipeline = NAMMPipeline.from_parts(model, maps, rule, verdict, certificate)
    draft = folder.with_name(f".{folder.name}.partial")  # so that the folder is whole or not there
    shutil.rmtree(draft, ignore_errors=True)
    pipeline.save_pretrained(draft, half=options.half)
    if folder.exists():
        folder.rmdir()
    publish(draft, folder)
    print(f"{options.model} of {run}, {THROUGH[stage]}, is in {folder}")
    if verdict is not None:
        print("\n".join(verdict.lines()))
    option = ", constraint=rule" if pipeline.has_own_rule else ""
    print(f'  from namm import NAMMPipeline; pipe = NAMMPipeline.from_pretrained("{folder}"{option})')
    if option:
        name = getattr(trained.settings.data, "constraint", "") or repr(rule)
        print(f"  where rule is {name} as a namm.Constraint, which no folder can hold")
