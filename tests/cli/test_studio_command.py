"""`namm studio`: where the page is, how it is opened, and how it ends."""

import re
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
import webbrowser
from functools import partial
from pathlib import Path

import pytest

from namm.cli.studio import has_display
from namm.studio.server import Server


def test_it_serves_until_ctrl_c(whole_run):
    command = [sys.executable, "-m", "namm", "studio", str(whole_run), "--no-open"]
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in the background of a shell ignore it
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heeds,  # noqa: PLW1509
    ) as process:
        try:
            said = [process.stdout.readline() for _ in range(5)]
            address = re.search(r"http://127\.0\.0\.1:\d+/#\S{32}", "".join(said))[0]
            with urllib.request.urlopen(address.partition("#")[0], timeout=60) as page:
                assert b"namm studio" in page.read()
            process.send_signal(signal.SIGINT)
            out, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out, error) == (0, "the studio is closed.\n", "")


def stop_at_once(server):
    raise KeyboardInterrupt


@pytest.mark.parametrize(("option", "opened"), [("--open", 1), ("--no-open", 0)])
def test_the_browser_is_opened_by_a_file_that_is_nobody_elses(namm, whole_run, monkeypatch, option, opened):
    shown = []

    def look(address):
        file = Path(urllib.parse.urlsplit(address).path)
        shown.append((address, file, file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777, file.read_text()))

    monkeypatch.setattr(webbrowser, "open", look)
    monkeypatch.setattr(Server, "serve_forever", stop_at_once)
    code, said = namm("studio", whole_run, option)
    assert code == 0, said
    assert len(shown) == opened
    for address, file, mode, folder_mode, html in shown:
        url, token = re.search(r"http://127\.0\.0\.1:\d+/#(\S{32})", said).group(0, 1)
        assert address.startswith("file:///")
        assert token not in address  # which stands on the browser's command line
        assert (mode, folder_mode) == (0o600, 0o700)
        assert f'content="0; url={url}"' in html
        assert not file.parent.exists()


@pytest.mark.parametrize(
    ("variables", "seen"),
    [
        ({}, False),
        ({"DISPLAY": ":0"}, True),
        ({"WAYLAND_DISPLAY": "w"}, True),
        ({"DISPLAY": ":0", "SSH_CONNECTION": "x"}, False),
    ],
)
def test_a_browser_is_opened_where_somebody_sees_it(monkeypatch, variables, seen):
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert has_display() is seen


def test_what_cannot_be_served_is_a_sentence(namm, whole_run):
    assert namm("studio", "nowhere") == (
        2,
        "namm: there is no run 'nowhere', neither as a folder nor in runs; `namm list` shows what there is.\n",
    )
    code, said = namm("studio", whole_run, "--port", "70000")
    assert (code, "--port must be a number from 0 to 65535, not 70000" in said) == (2, True)
