"""`namm paper`: its arguments, what it prints, its exit codes."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from namm.cli import main
from namm.experiments.paper.items import ITEMS


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["paper"], 2, "usage: namm paper ITEM"),
        (["paper", "--help"], 0, "fig10"),
        (["paper", "table1", "--help"], 0, "--experiments"),
        (["paper", "tabel1"], 2, "Did you mean 'table1'?"),
        (["paper", "--seeds", "1"], 2, "comes first"),
        (["paper", "table1", "--experiments", "burger"], 2, "Did you mean 'burgers'?"),
        (["paper", "table1", "--preset", "gup"], 2, "Did you mean 'gpu'?"),
        (["paper", "table1", "--seeds", "1", "1"], 2, "each once"),
        (["paper", "table1", "--on", "moon"], 2, "slurm"),
    ],
)
def test_help_and_mistakes_are_answered_without_torch(arguments, code, said, tmp_path):
    script = (
        "import sys; from namm.cli import main; code = main(sys.argv[1:]); "
        "sys.exit('loaded torch' if {'torch', 'matplotlib'} & set(sys.modules) else code)"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


def test_every_item_of_the_issue_is_there():
    assert {"table1", "table2", "table5", "fig3", "fig4", "fig6", "fig7", "fig8", "fig9", "fig10"} <= set(ITEMS)


def test_a_table_of_a_run_is_printed_and_a_failure_is_the_exit_code(
    tiny_preset, whole_run, tmp_path, monkeypatch, capsys
):
    out, asked = tmp_path / "out", []
    shutil.copytree(whole_run, out / "burgers-seed0")

    def chosen(experiment, name):
        asked.append((experiment, name))
        if experiment == "burgers":
            return tiny_preset
        few = replace(tiny_preset.settings.evaluate, n=5)
        return replace(tiny_preset, experiment=experiment, settings=replace(tiny_preset.settings, evaluate=few))

    monkeypatch.setattr("namm.cli.paper.preset", chosen)
    arguments = ["paper", "table1", "--out", str(out), "--preset", "gpu", "--experiments", "burgers"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "burgers-seed0: done before" in printed
    ours = json.loads((out / "burgers-seed0" / "evaluate" / "metrics.json").read_text())["rows"]["finetuned"]
    line = next(line for line in printed.splitlines() if line.startswith("| burgers    | ours  "))
    assert f"| {ours['distance']['mean']:.3g}" in line
    assert f"| {ours['mmd'][0]:.4f}" in line
    assert "table1.csv" in printed
    assert asked == [("burgers", "gpu")]
    assert main([*arguments, "periodic"]) == 1
    assert "periodic-seed0 is missing: evaluate.n is 5" in capsys.readouterr().out
