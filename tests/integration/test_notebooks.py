"""The notebooks run from top to bottom, and what is stored in them came of one run at their written size."""

import ast
import base64
import json
import re
import socket
from pathlib import Path

import matplotlib
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
PLACES = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|usr|var|opt|mnt|work|dev|private|Users)/\w")
JUDGED = {"ink_budget", "your_own_pde", "repair_a_diffusers_model"}


def cells(path, kind):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def texts(cell):
    """What a cell printed, and what it showed as text or HTML."""
    for output in cell["outputs"]:
        yield "".join(output.get("text", ""))
        for kind, value in output.get("data", {}).items():
            if kind.startswith("text/"):
                yield "".join(value)


def run(source, name, namespace):
    """Execute a cell; like a notebook, have the value of its last expression show itself."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
        for show in ("_repr_html_", "_repr_png_"):
            if hasattr(value, show):
                getattr(value, show)()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::namm.errors.NammWarning")  # two steps of training teach nothing
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    monkeypatch.setenv("NAMM_QUICK", "1")
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    namespace = {"__name__": "__main__"}
    for number, cell in enumerate(cells(path, "code"), 1):
        run("".join(cell["source"]), f"{path.name}[{number}]", namespace)
    assert namespace["QUICK"]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_those_of_one_whole_run(path):
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        source = "".join(cell["source"])
        assert not {"error", "stderr"} & {output.get("name", output["output_type"]) for output in cell["outputs"]}
        drawn = [output for output in cell["outputs"] if "image/png" in output.get("data", {})]
        assert len(drawn) == ("namm.show(" in source or "plt.subplots(" in source)
        for output in drawn:
            assert base64.b64decode("".join(output["data"]["image/png"])).startswith(b"\x89PNG")
        if "print(" in source:
            assert "".join(texts(cell)).strip()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_names_no_machine(path):
    assert path.stat().st_size < 400_000
    for cell in cells(path, "code"):
        for text in ("".join(cell["source"]), *texts(cell)):
            assert not PLACES.search(text)
            assert not re.search(rf"(?<!\w){re.escape(socket.gethostname())}(?!\w)", text)
    assert not [cell for cell in cells(path, "markdown") if "$" in "".join(cell["source"])]  # no LaTeX


@pytest.mark.parametrize("name", sorted(JUDGED))
def test_the_stored_verdict_is_that_it_works(name):
    shown = [text for cell in cells(EXAMPLES / f"{name}.ipynb", "code") for text in texts(cell)]
    outcomes = [outcome for text in shown for outcome in re.findall(r"verdict: (works|no gain|collapsed)", text)]
    assert outcomes
    assert set(outcomes) == {"works"}


def test_the_readme_names_every_example():
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in {".py", ".sh", ".ipynb"}}
    assert files == set(re.findall(r"\]\(([\w.]+)\)", text))
