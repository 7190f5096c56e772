"""Cells with stand-ins for the real stages: which are run, which fail, what is remembered; and jobs of submitit."""

import json
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest

from namm.errors import Interrupted, TrainingError, UsageError
from namm.experiments.engine import stages as stages_module
from namm.experiments.engine.folder import FAILURE, read_failure, write_failure
from namm.experiments.engine.stages import STAGES, Outcome
from namm.experiments.presets import preset
from namm.experiments.sweeps import jobs
from namm.experiments.sweeps.cell import Cell, Jobs, first_of_each, run_cells, run_sharing, share
from namm.experiments.sweeps.jobs import Job
from namm.experiments.sweeps.sweep import gather
from namm.files import owned


class Maps:
    """A stand-in for the stage `map` that fails, or not, by its σ."""

    def __init__(self):
        self.calls = []
        self.errors = {}
        self.drawn = []

    def draw(self, work):
        self.drawn.append(work.settings.data.n_train)
        (work.folder / "images").write_text(str(work.settings.data.n_train))
        return Outcome({}, ("images",))

    def make(self, work):
        sigma = work.settings.map.sigma_max
        self.calls.append(sigma)
        if sigma in self.errors:
            raise self.errors[sigma]
        (work.folder / "weights").write_text(str(sigma))
        return Outcome({"steps": 3}, ("weights",))

    def take(self):
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def maps(monkeypatch):
    fakes = Maps()
    fake = {"data": fakes.draw, "map": fakes.make}
    table = {name: replace(stage, function=fake.get(name)) for name, stage in STAGES.items()}
    monkeypatch.setattr(stages_module, "STAGES", table)
    monkeypatch.setattr("namm.experiments.engine.build_models.check", lambda settings: None)
    return fakes


def cell(sigma, name=None, **train):
    base = preset("periodic")
    part = replace(base.settings.map, sigma_max=sigma, train=replace(base.settings.map.train, **train))
    return Cell(name or f"sigma={sigma}", replace(base, settings=replace(base.settings, map=part)), "map")


def go(cells, out, **options):
    told = []
    return run_cells(cells, out, log=told.append, progress=False, **options), told


def test_each_cell_is_a_run_of_its_own_and_runs_once(tmp_path, maps):
    cells = [cell(0.1), cell(0.2)]
    outcomes, _ = go(cells, tmp_path)
    assert maps.take() == [0.1, 0.2]
    assert [(each.cell, each.folder, each.error) for each in outcomes] == [
        (each, tmp_path / each.name, None) for each in cells
    ]
    assert (tmp_path / "sigma=0.2" / "map" / "weights").read_text() == "0.2"
    go([cell(0.3), *cells], tmp_path)
    assert maps.take() == [0.3]


def test_a_cell_that_raises_is_reported_remembered_and_retried_on_request(tmp_path, maps):
    maps.errors[0.2] = TrainingError("met a loss that is\nnot a finite number.")
    cells = [cell(0.1), cell(0.2), cell(0.3)]
    said = "met a loss that is not a finite number."
    outcomes, told = go(cells, tmp_path)
    assert [each.error for each in outcomes] == [None, said, None]
    assert f"sigma=0.2: failed: {said}" in told
    assert json.loads((tmp_path / "sigma=0.2" / FAILURE).read_text())["message"] == said
    assert maps.take() == [0.1, 0.2, 0.3]

    maps.errors.clear()
    outcomes, told = go(cells, tmp_path)
    assert [each.error for each in outcomes] == [None, said, None]
    assert any(line.startswith("sigma=0.2: failed before") and "--retry" in line for line in told)
    assert maps.take() == []
    outcomes, _ = go(cells, tmp_path, retry=True)
    assert [each.error for each in outcomes] == [None, None, None]
    assert maps.take() == [0.2]
    assert not (tmp_path / "sigma=0.2" / FAILURE).exists()


def test_an_error_of_nobodys_making_is_a_line_too(tmp_path, maps):
    maps.errors[0.2] = ZeroDivisionError("division by zero")
    outcomes, _ = go([cell(0.2)], tmp_path)
    assert outcomes[0].error == "ZeroDivisionError: division by zero"


def test_a_failure_is_of_its_settings(tmp_path, maps):
    maps.errors[0.2] = TrainingError("no.")
    go([cell(0.2, "a")], tmp_path)
    maps.errors.clear()
    outcomes, _ = go([cell(0.2, "a", learning_rate=1e-4)], tmp_path)
    assert outcomes[0].error is None
    assert maps.take() == [0.2, 0.2]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, Interrupted("stop")])
def test_an_interruption_ends_everything_and_is_no_failure(tmp_path, maps, interruption):
    maps.errors[0.1] = interruption
    with pytest.raises(interruption if isinstance(interruption, type) else type(interruption)):
        go([cell(0.1), cell(0.2)], tmp_path)
    assert maps.take() == [0.1]
    maps.errors.clear()
    assert [each.error for each in go([cell(0.1), cell(0.2)], tmp_path)[0]] == [None, None]
    assert maps.take() == [0.1, 0.2]


def test_a_folder_that_another_process_works_in_is_no_failure_either(tmp_path, maps):
    with owned(tmp_path / "sigma=0.1"):
        outcomes, _ = go([cell(0.1)], tmp_path)
    assert "in use" in outcomes[0].error
    assert read_failure(tmp_path / "sigma=0.1", cell(0.1).key) is None
    assert go([cell(0.1)], tmp_path)[0][0].error is None


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), ConnectionResetError(104, "Connection reset"), MemoryError("none left")],
)
def test_what_may_pass_is_reported_and_not_remembered(tmp_path, maps, error):
    maps.errors[0.1] = error
    outcomes, _ = go([cell(0.1), cell(0.2)], tmp_path)
    assert error.args[-1] in outcomes[0].error
    assert outcomes[1].error is None
    assert not (tmp_path / "sigma=0.1" / FAILURE).exists()
    maps.errors.clear()
    assert go([cell(0.1)], tmp_path)[0][0].error is None


def test_a_reader_that_has_seen_enough_ends_everything_and_is_no_failure(tmp_path, maps):
    maps.errors[0.1] = BrokenPipeError(32, "Broken pipe")
    with pytest.raises(BrokenPipeError):
        go([cell(0.1), cell(0.2)], tmp_path)
    assert maps.take() == [0.1]
    assert not (tmp_path / "sigma=0.1" / FAILURE).exists()


@pytest.mark.parametrize("file", ["map/stage.json", FAILURE])
def test_a_file_that_cannot_be_read_is_the_fault_of_its_cell_alone(tmp_path, maps, file):
    if file == FAILURE:
        maps.errors[0.1] = TrainingError("no.")
    cells = [cell(0.1), cell(0.2)]
    go([cell(0.1)], tmp_path)
    (tmp_path / "sigma=0.1" / file).write_text("{")
    outcomes = run_sharing(cells, tmp_path, on="here", retry=False, log=lambda line: None, progress=False)
    assert f"{file} cannot be read" in outcomes[0].error
    assert outcomes[1].error is None
    assert first_of_each(cells, tmp_path, False) == []
    rows = gather(outcomes, [{}, {}])
    assert [(row.status, row.stage) for row in rows] == [("failed", "data"), ("complete", "map")]
    unreadable = jobs._outcome(cells[0], tmp_path / "sigma=0.1", SimpleNamespace(), "x", lambda line: None)
    assert unreadable.error == outcomes[0].error


def with_images(base, n):
    settings = base.preset.settings
    return replace(
        base, preset=replace(base.preset, settings=replace(settings, data=replace(settings.data, n_train=n)))
    )


def test_data_of_changed_settings_are_drawn_once_for_all(tmp_path, maps):
    def go_on(n):
        cells = [with_images(cell(sigma), n) for sigma in (0.1, 0.2, 0.3)]
        outcomes = run_sharing(cells, tmp_path, on="here", retry=False, log=lambda line: None, progress=False)
        assert [each.error for each in outcomes] == [None] * 3
        drawn, maps.drawn = maps.drawn, []
        images = [tmp_path / each.name / "data" / "images" for each in cells]
        assert [path.read_text() for path in images] == [str(n)] * 3
        return drawn, len({path.stat().st_ino for path in images})

    assert go_on(64) == ([64], 1)
    assert go_on(65) == ([65], 1)
    assert go_on(64) == ([], 1)  # what was set aside comes back
    assert len(list((tmp_path / "sigma=0.2").glob("data*"))) == 2


def test_what_is_set_aside_for_one_cell_is_still_given_to_another(tmp_path, maps):
    go([with_images(cell(0.1), 64), with_images(cell(0.2), 65)], tmp_path)
    share([with_images(cell(0.1), 65), with_images(cell(0.3), 64)], tmp_path)
    assert (tmp_path / "sigma=0.1" / "data" / "images").read_text() == "65"
    assert (tmp_path / "sigma=0.3" / "data" / "images").read_text() == "64"


def test_who_failed_before_does_not_draw_for_all(tmp_path, maps):
    cells = [cell(sigma) for sigma in (0.1, 0.2, 0.3)]
    assert [each.name for each in first_of_each(cells, tmp_path, False)] == ["sigma=0.1"]
    write_failure(tmp_path / "sigma=0.1", cells[0].key, "no.")
    assert [each.name for each in first_of_each(cells, tmp_path, False)] == ["sigma=0.2"]
    assert [each.name for each in first_of_each(cells, tmp_path, True)] == ["sigma=0.1"]
    for each in cells:
        write_failure(tmp_path / each.name, each.key, "no.")
    assert first_of_each(cells, tmp_path, False) == []


def test_a_cell_that_cannot_be_written_is_reported(tmp_path, maps):
    (tmp_path / "sigma=0.1").write_text("a file")
    outcomes, _ = go([cell(0.1), cell(0.2)], tmp_path)
    assert "is a file" in outcomes[0].error
    assert outcomes[1].error is None


@pytest.mark.parametrize("name", ["", "..", "a/b", "jobs"])
def test_names_are_those_of_folders(tmp_path, maps, name):
    with pytest.raises(UsageError, match="cannot be the name"):
        go([replace(cell(0.1), name=name)], tmp_path)
    with pytest.raises(UsageError, match="two cells"):
        go([cell(0.1, "a"), cell(0.2, "a")], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_is_cut_short_is_queued_as_it_was(tmp_path):
    job = Job(cell(0.1), tmp_path / "a", threads=1)
    again = pickle.loads(pickle.dumps(job.checkpoint()))
    assert (again.function, again.args, again.kwargs) == (job, (), {})


def test_without_slurm_the_remedy_is_said(tmp_path, maps, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"no Slurm here.*--on local"):
        go([cell(0.1)], tmp_path, on="slurm")


def test_without_submitit_the_install_line_is_said(tmp_path, maps, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "submitit", None)
    with pytest.raises(UsageError, match=r"pip install .*slurm"):
        go([cell(0.1)], tmp_path, on="local")


SBATCH = """#!/bin/bash
# Runs the job, of one task, at once.
cp "${@: -1}" "$(dirname "$0")/submitted"
SLURM_JOB_ID=77 SLURM_NTASKS=1 bash "${@: -1}" > /dev/null 2>&1 &
echo "Submitted batch job 77"
"""
SRUN = """#!/bin/bash
shift 5
exec "$@"
"""
SACCT = """#!/bin/bash
printf 'JobID|State|NodeList\\n77|RUNNING|here\\n'
"""


def test_slurm_is_asked_for_what_was_asked_and_its_job_reports(tmp_path, monkeypatch):
    fakes, out = tmp_path / "bin", tmp_path / "out"
    fakes.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", SACCT)):
        (fakes / name).write_text(text)
        (fakes / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(fakes), prepend=":")
    (out / "sigma=0.1").mkdir(parents=True)
    (out / "sigma=0.1" / "foreign").write_text("so that the job fails before it imports torch")
    asked = Jobs(slurm={"partition": "gpu", "timeout_min": 90})
    outcomes, told = go([cell(0.1)], out, on="slurm", jobs=asked)
    assert "not a run of namm" in outcomes[0].error
    assert "sigma=0.1: job 77" in told[0]
    submitted = (fakes / "submitted").read_text()
    assert "--partition=gpu" in submitted
    assert "--time=90" in submitted
    with pytest.raises(UsageError, match="partitoin"):
        go([cell(0.2)], out, on="slurm", jobs=Jobs(slurm={"partitoin": "gpu"}))
