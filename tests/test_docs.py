"""The code in the documentation runs, and what it links to or calls is there; the site has tests of its own."""

import re
from functools import partial
from pathlib import Path

import pytest
import yaml

import namm
from namm.cli import COMMANDS, main
from namm.experiments.presets import EXPERIMENTS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?^(?P<fence>`{3,})(?P<kind>\w*)\n(?P<code>.*?)^(?P=fence)$", re.M | re.S
)
"""A fenced block, and why it is not run, if it is not."""
QUICK = namm.TrainSettings(budget="5 steps", batch_size=16)


def blocks(page, *kinds):
    """Blocks of these languages: (reason not to run, code)."""
    found = BLOCK.finditer((ROOT / page).read_text(encoding="utf-8"))
    return [(block["reason"], block["code"]) for block in found if block["kind"] in kinds]


RUN = [page for page in PAGES if any(reason is None for reason, _ in blocks(page, "python", "py"))]


@pytest.mark.parametrize("page", RUN)
def test_documented_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page in ("README.md", "docs/start.md"):  # whose map takes a minute
        train_map = partial(namm.train_map, settings=QUICK, noise=namm.ModelErrors(0.1), weights=namm.Weights(1.0))
        monkeypatch.setattr(namm, "train_map", train_map)
    if page == "RESULTS.md":
        monkeypatch.chdir(ROOT)
    exec("\n".join(code for reason, code in blocks(page, "python", "py") if reason is None), {"__name__": "__main__"})


def test_python_is_marked_as_such():
    """No block escapes the test above by having no language."""
    unmarked = [
        (page, code)
        for page in PAGES
        for _, code in blocks(page, "", "text")
        if re.search(r"^(import|from) \w+", code, re.M)
    ]
    assert not unmarked


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", re.sub(BLOCK, "", text))
    missing = [target for target in targets if not ((ROOT / page).parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    scripts = set(re.findall(r"\b(?:benchmarks|examples|docs)/[a-z_]+\.(?:py|sh)\b", text))
    assert [script for script in sorted(scripts) if not (ROOT / script).is_file()] == []
    called = set(re.findall(r"(?:^\$? ?|`)namm ([a-z]+)", text, re.MULTILINE))
    assert called <= COMMANDS.keys()


def calls():
    """Commands of console blocks by what tells their options: {(command, name or None): {page: options}}."""
    found = {}
    for page in PAGES:
        for _, code in blocks(page, "sh", "bash", "console"):
            for line in code.replace("\\\n", " ").splitlines():
                words = re.sub(r"\s#.*| \| .*", "", line).removeprefix("$ ").split()
                if words[:1] != ["namm"] or len(words) < 2 or words[1] not in COMMANDS:
                    continue
                name = next((word for word in words[2:4] if word in EXPERIMENTS), None)
                options = {re.split("[ =]", word)[0] for word in words[2:] if re.match(r"--[a-z]", word)}
                found.setdefault((words[1], name), {}).setdefault(page, set()).update(options)
    return found


CALLS = {f"{command} {name or ''}".strip(): pages for (command, name), pages in calls().items()}


@pytest.mark.parametrize("call", sorted(CALLS))
def test_documented_options_are_there(call, capsys):
    command, _, name = call.partition(" ")
    name = name or "burgers"
    helps = {
        "run": [["run", name]],
        "sweep": [["run"], ["run", name]],
        "train": [["train", "map", name], ["train", "counter"]],
        "data": [["data", name]],
        "check": [["check", name]],
        "certify": [["certify", "x.h5", "--constraint", name]],
        "evaluate": [["evaluate", "x.h5", "--against", "x.h5", "--constraint", name]],
    }
    for arguments in ([command], *helps.get(command, [])):
        main([*arguments, "--help-all"])
    known = set(re.findall(r"--[a-z][\w.-]*", capsys.readouterr().out))
    missing = {(page, option) for page, options in CALLS[call].items() for option in options - known}
    assert not missing


def test_the_page_of_commands_has_a_row_for_each():
    rows = re.findall(r"^\| `namm ([a-z]+)` \|", (ROOT / "docs/reference/commands.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(COMMANDS)


def test_what_is_cited_is_this_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == namm.__version__


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 72
