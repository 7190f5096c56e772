"""The code in the documentation runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "blackholes.md",
    "constraints.md",
    "diffusion.md",
    "evaluation.md",
    "fluid.md",
    "galaxies.md",
    "inverse.md",
    "maps.md",
    "own.md",
    "pipeline.md",
    "report.md",
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
