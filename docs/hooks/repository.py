"""Files of the repository in the site: pages link to them as they do in the repository.

A link of a page that leaves `docs/`, to `../../examples/minimal.py`, leads to a copy in the site's folder
`repository/`, and a link of `RESULTS.md` to `docs/choose/settings.md` to that page.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

COPIED = ("CHANGELOG.md", "CONTRIBUTING.md", "RESULTS.md", "examples/*.py", "examples/*.sh", "results/burgers/*.*")
FOLDER = "repository/"
LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)#\s]+)")


def root(config: MkDocsConfig) -> Path:
    """The repository's folder."""
    return Path(config.config_file_path).parent


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages may link to."""
    for pattern in COPIED:
        for path in sorted(root(config).glob(pattern)):
            uri = FOLDER + path.relative_to(root(config)).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def in_repository(uri: str) -> str:
    """Where a page of the site lies in the repository."""
    if uri.startswith("notebooks/"):
        return "examples/" + posixpath.basename(uri)
    return uri.removeprefix(FOLDER) if uri.startswith(FOLDER) else f"docs/{uri}"


def in_site(path: str) -> str:
    """Where the site has a file of the repository."""
    if path.endswith(".ipynb"):
        return f"notebooks/{Path(path).stem}.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else FOLDER + path


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links that leave the pages for other files of the repository, or come back, lead to the site's copies."""
    uri = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        if files.get_file_from_path(posixpath.normpath(posixpath.join(posixpath.dirname(uri), link[2]))):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository(uri)), link[2]))
        return link[1] + posixpath.relpath(in_site(path), posixpath.dirname(uri) or ".")

    return LINK.sub(moved, markdown)
