"""Each examples/*.ipynb as a page of the site, with the outputs that are stored in it: texts and PNG pictures."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

FOLDER = "notebooks/"


def notebooks(config: MkDocsConfig) -> list[Path]:
    """The notebooks, by name."""
    return sorted((Path(config.config_file_path).parent / "examples").glob("*.ipynb"))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give the notebooks, where there are any, a place of their own in the navigation, before the reference."""
    pages = [f"{FOLDER}{path.stem}.md" for path in notebooks(config)]
    if pages and config.nav is not None:
        titles = [next(iter(entry)) for entry in config.nav]
        place = titles.index("Reference") if "Reference" in titles else len(titles)
        config.nav.insert(place, {"Notebooks": pages})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook, and a file for each of its pictures."""
    for path in notebooks(config):
        pictures: list[bytes] = []
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        page = "\n\n".join(part for cell in cells for part in markdown(cell, path.stem, pictures))
        files.append(File.generated(config, f"{FOLDER}{path.stem}.md", content=page))
        for number, picture in enumerate(pictures):
            files.append(File.generated(config, f"{FOLDER}{path.stem}-{number}.png", content=picture))
    return files


def markdown(cell: dict[str, Any], name: str, pictures: list[bytes]) -> Iterator[str]:
    """The Markdown of a cell; its pictures are added to `pictures`."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
    elif cell["cell_type"] == "code" and source.strip():
        yield f"````python\n{source}\n````"
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if "image/png" in data:
            yield f"![Output of the cell above]({name}-{len(pictures)}.png)"
            pictures.append(base64.b64decode("".join(data["image/png"])))
        elif text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
            yield f"````text\n{text}\n````"
