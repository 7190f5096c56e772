"""`namm paper`: its arguments, what it prints, its exit codes."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

from namm.cli import main
from namm.experiments.paper.items import ITEMS
from namm.experiments.sweeps.cell import CellOutcome, Jobs
from namm.formatting import format_number


def test_the_page_lists_every_item():
    page = (Path(__file__).parents[2] / "docs" / "results" / "paper.md").read_text()
    assert set(re.findall(r"^\| `(table\d+|fig\d+)` \|", page, re.MULTILINE)) == set(ITEMS)
    assert {"table1", "table2", "table5", *(f"fig{k}" for k in range(3, 12))} == set(ITEMS)


def test_jobs_are_asked_for_as_by_a_sweep(tiny_preset, whole_run, tmp_path, monkeypatch):
    asked = []

    def run_cells(cells, out, **how):
        asked.append((how["on"], how["jobs"]))
        return [CellOutcome(cell, out / cell.name, None) for cell in cells]

    shutil.copytree(whole_run, tmp_path / "out" / "burgers-seed0")
    monkeypatch.setattr("namm.cli.paper.preset", lambda experiment, name: tiny_preset)
    monkeypatch.setattr("namm.experiments.sweeps.cell.run_cells", run_cells)
    arguments = ["paper", "table1", "--out", str(tmp_path / "out"), "--experiments", "burgers", "--on", "slurm"]
    slurm = ["--slurm", "partition=gpu", "gpus_per_node=1", "--jobs", "3", "--slurm", "timeout_min=90"]
    assert main([*arguments, *slurm]) == 0
    assert asked == [("slurm", Jobs(3, {"partition": "gpu", "gpus_per_node": 1, "timeout_min": 90}))]


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
    assert f"| {format_number(ours['distance']['mean'])}" in line
    assert f"| {ours['mmd'][0]:.4f}" in line
    assert "table1.csv" in printed
    assert asked == [("burgers", "gpu")]
    assert main([*arguments, "periodic"]) == 1
    printed = capsys.readouterr().out
    assert "periodic-seed0 is missing: evaluate.n is 5" in printed
    assert "1 of 2 runs failed; the same command with --retry tries them again" in printed
