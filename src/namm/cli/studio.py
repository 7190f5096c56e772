"""`namm studio`: a local page to play with a finished run."""

import os
import shlex
import sys
import tempfile
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from namm.cli.options import RunName, log, parse
from namm.errors import UsageError
from namm.experiments.engine.folder import find_run

LARGEST_PORT = 65535


def has_display() -> bool:
    """Whether a browser that is opened here would be seen by the person who asked."""
    if os.environ.get("SSH_CONNECTION"):
        return False
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


@contextmanager
def way_to(url: str) -> Iterator[str]:
    """The address of a file that leads a browser to `url`, there for as long as the context lasts.

    A browser's command line can be read by everybody at this machine, and `url` holds the token; the file is its
    owner's alone.
    """
    with tempfile.TemporaryDirectory(prefix="namm-") as folder:
        file = Path(folder) / "studio.html"
        file.touch(mode=0o600)
        file.write_text(
            f'<!DOCTYPE html>\n<title>namm studio</title>\n<meta http-equiv="refresh" content="0; url={url}">\n'
        )
        yield file.as_uri()


@dataclass(frozen=True)
class Play:
    """Open a local page to play with a run: draw samples, move images in mirror space, polish, observe.

    Everything is computed here, by the run's own networks; the page is served to this machine alone, until Ctrl-C.
    With --trust, a rule of the run's that you have not run before is run: it is Python code.
    """

    run: RunName
    port: int = 0
    """Port of 127.0.0.1; 0 takes a free one."""
    open: bool = field(default_factory=has_display)
    """Show the page in the browser; by default where there is a display."""


def main(arguments: list[str]) -> None:
    """Serve the page until Ctrl-C."""
    options = parse(Play, arguments, "namm studio")
    if not 0 <= options.port <= LARGEST_PORT:
        raise UsageError(f"--port must be a number from 0 to {LARGEST_PORT}, not {options.port}.")
    run = find_run(options.run)

    from namm.studio.server import Server
    from namm.studio.studio import Studio

    with Server(Studio(run), options.port) as server, way_to(server.url) as way:
        log(f"the studio of {shlex.quote(str(run))} is at\n\n    {server.url}\n")
        log("for this machine alone; Ctrl-C ends it.")
        if options.open:
            webbrowser.open(way)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            log("the studio is closed.")
