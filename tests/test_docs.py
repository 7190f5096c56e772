"""The code in the documentation runs, and what it links to or calls is there."""

import re
from pathlib import Path

import pytest
import yaml

import namm
from namm.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "blackholes.md",
    "constraints.md",
    "diffusion.md",
    "evaluation.md",
    "exact.md",
    "fluid.md",
    "galaxies.md",
    "inverse.md",
    "maps.md",
    "own.md",
    "pipeline.md",
    "repair.md",
    "report.md",
    "rivals.md",
    "runs.md",
    "score_network.md",
    "speed.md",
    "sweeps.md",
    "training.md",
    "vae.md",
]


@pytest.mark.parametrize("page", PAGES)
def test_documented_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    exec("\n".join(blocks), {})


LINKING = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))


@pytest.mark.parametrize("page", LINKING)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    missing = [target for target in targets if not ((ROOT / page).parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", LINKING)
def test_commands_are_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    scripts = set(re.findall(r"\b(?:benchmarks|examples)/[a-z_]+\.(?:py|sh)\b", text))
    assert [script for script in sorted(scripts) if not (ROOT / script).is_file()] == []
    called = set(re.findall(r"(?:^\$? ?|`)namm ([a-z]+)", text, re.MULTILINE))
    assert called <= COMMANDS.keys()


def test_what_is_cited_is_this_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == namm.__version__
