"""The folder of one training run: whose it is, what is in it.

settings.json            what was asked for; another training never writes here
metrics.jsonl            one line per `log_every` steps and per validation
checkpoints/step-*       the last few states, complete with optimiser and averaged weights
milestones/step-*        averaged weights along the way
result.json              steps, images, compute seconds, last losses; written last
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from namm.errors import RunFolderError
from namm.files import differences, write_json

KIND = "namm training"


def claim(folder: Path, description: Mapping[str, Any]) -> None:
    """Make sure that `folder` is free or holds this very training, and say in it what it holds."""
    settings = folder / "settings.json"
    described = json.loads(json.dumps({"kind": KIND, **description}, default=str))
    if settings.exists():
        found = _read(settings)
        if changed := differences(found, described):
            raise RunFolderError(
                f"{folder} holds a training with other settings ({'; '.join(changed[:6])}): "
                "choose another folder, or delete this one to start over."
            )
        return
    foreign = [
        entry.name for entry in folder.iterdir() if entry.name != ".lock" and not entry.name.startswith(".settings")
    ]
    if foreign:
        raise RunFolderError(
            f"{folder} is not empty and is not one of ours (it holds {', '.join(sorted(foreign)[:3])}): "
            "choose another folder."
        )
    write_json(settings, described)


def _read(settings: Path) -> dict[str, Any]:
    try:
        found = json.loads(settings.read_text())
    except ValueError as error:
        raise RunFolderError(f"{settings} cannot be read ({error}): choose another folder.") from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise RunFolderError(f"{settings} was not written by a training of namm: choose another folder.")
    return found
