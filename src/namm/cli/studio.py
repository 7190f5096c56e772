"""`namm studio`: a local page to play with a finished run."""

import os
import shlex
import sys
import webbrowser
from dataclasses import dataclass, field

from namm.cli.options import RunName, log, parse
from namm.errors import UsageError
from namm.experiments.engine.folder import find_run

LARGEST_PORT = 65535


def has_display() -> bool:
    """Whether a browser that is opened here would be seen by the person who asked."""
    if os.environ.get("SSH_CONNECTION"):
        return False
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


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

    with Server(Studio(run), options.port) as server:
        log(f"the studio of {shlex.quote(str(run))} is at\n\n    {server.url}\n")
        log("for this machine alone; Ctrl-C ends it.")
        if options.open:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            log("the studio is closed.")
