"""`namm assimilate` on a tiny run: the table, the files, going on, and what is refused."""

import json
import re
import shlex
import shutil

import h5py
import numpy as np
import pytest
from PIL import Image

from namm.formatting import format_number

QUICK = ("--truths", 2, "-n", 3, "--steps", 4)
GENTLE = (*QUICK, "--zeta", 1e-4)  # of four steps, each is long


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_table_is_what_the_file_holds(namm, whole_run, tmp_path):
    code, said = namm("assimilate", whole_run, *GENTLE)
    assert code == 0
    assert "truths 0 to 1 of 1×8×8 pixels, observed by columns:1 (8 values) with noise 0.2" in said
    rows = {cells[0]: cells for cells in (re.split(r"\s*│\s*", line)[1:-1] for line in said.splitlines()) if cells}
    with h5py.File("assimilation.h5") as file:
        for title, method in (("DPS", "dps"), ("CG-DPS-200", "cg-dps"), ("mirror DPS", "mirror-dps")):
            group = file[method]
            assert group["samples"].shape == (2, 3, 1, 8, 8)
            _, zeta, ell, chi2, error, spread, coverage, redrawn, failed, _ = rows[title]
            assert zeta == "1.00·10⁻⁴"
            assert float(ell.split(" ± ")[0]) == pytest.approx(group["distance"][:].mean(), rel=0.01)
            assert float(chi2) == pytest.approx(group["chi2"][:].mean(), rel=0.01)
            assert float(error) == pytest.approx(group["error"][:].mean(), rel=0.01)
            assert float(spread) == pytest.approx(np.sqrt((group["spread"][:] ** 2).mean()), rel=0.01)
            assert (coverage, redrawn, failed) == ("–", str(int((group["redrawn"][:] > 0).sum())), "0")
    table = json.loads((tmp_path / "assimilation.json").read_text())
    assert table["observed"] == "columns:1"
    assert table["methods"]["cg-dps"]["setting"] == {
        "method": "cg-dps",
        "weight": 200.0,
        "zeta": 1e-4,
        "guidance": "dps",
    }
    with Image.open("assimilation.png") as picture:
        assert min(picture.size) > 400
    before = (tmp_path / "assimilation.h5").stat().st_mtime_ns
    assert namm("assimilate", whole_run, *GENTLE)[0] == 0
    assert (tmp_path / "assimilation.h5").stat().st_mtime_ns == before
    code, said = namm("assimilate", whole_run, *QUICK, "--zeta", 2e-4)
    assert code == 1
    assert "methods.dps.zeta: 0.0001 -> 0.0002" in said


def test_other_observations_methods_and_truths(namm, whole_run):
    code, said = namm(
        *("assimilate", whole_run, *GENTLE, "--observe", "downsample:2", "--noise", 0.1, "--method", "mirror-dps"),
        *("--first", 5, "-o", "b.h5", "--batch-size", 1, "--guidance", "likelihood"),
    )
    assert code == 0
    assert "truths 5 to 6" in said
    assert "(16 values) with noise 0.1" in said
    with h5py.File("b.h5") as file:
        assert set(file) == {"truth", "measurement", "numbers", "mirror-dps", "checksums"}
        assert file["measurement"].shape == (2, 1, 4, 4)


def test_tuned_on_other_truths_and_only_once(namm, whole_run, tmp_path):
    few = ("--tune-truths", 2, "--tune-n", 2, "--zeta", 1e-5, 1e-4, "--weight", 50)
    tune = ("--tune", *few, "--method", "cg-dps", "dps")
    code, said = namm("assimilate", whole_run, *QUICK, *tune)
    assert code == 0
    kept = json.loads((tmp_path / "assimilation.h5.tuned.json").read_text())
    assert kept["asked"]["truths"] == [68, 70]
    assert {row["setting"]["zeta"] for row in kept["scores"]["dps"]} >= {1e-5, 1e-4}
    chosen = dict(re.findall(r"^(cg-dps|dps): ζ (\S+?)(?: and weight 50)?,", said, re.MULTILINE))
    with h5py.File("assimilation.h5") as file:
        for method, zeta in chosen.items():
            assert zeta == format_number(file[method].attrs["zeta"])
    assert set(chosen) == {"cg-dps", "dps"}
    stamp = (tmp_path / "assimilation.h5.tuned.json").stat().st_mtime_ns
    assert namm("assimilate", whole_run, *QUICK, *tune)[0] == 0
    assert (tmp_path / "assimilation.h5.tuned.json").stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no run 'nowhere'"),
        (["RUN", "--observe", "columns:9"], "does not fit the run's images, 1×8×8"),
        (["RUN", "--observe", "states:first,last"], "Kolmogorov flow only"),
        (["RUN", "--observe", "pixels"], "There are columns:8"),
        (["RUN", "--noise", "0"], "must be positive"),
        (["RUN", "--method", "sda"], "mirror-dps"),
        (["RUN", "--method", "dps", "dps"], "each once"),
        (["RUN", "--truths", "71"], "the run has 70 held-out images"),
        (["RUN", "--truths", "69", "--tune"], "69 truths to judge by and 4 others"),
        (["RUN", "--truths", "0"], "--truths must be at least 1"),
        (["RUN", "--tune-n", "0"], "--tune-n must be at least 1"),
        (["RUN", "--steps", "1"], "--steps must be at least 2"),
        (["RUN", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["RUN", "--zeta", "0.1", "0.2"], "one value, or several with --tune"),
        (["RUN", "--weight", "-1"], "--weight must be finite and not negative"),
        (["RUN", "-o", "a.png"], "must name an HDF5 file"),
        ([], "RUN"),
    ],
)
def test_wrong_usage(namm, whole_run, tmp_path, arguments, message):
    code, said = namm("assimilate", *(str(whole_run) if argument == "RUN" else argument for argument in arguments))
    assert code == 2
    assert message in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named_first(namm, whole_run, tmp_path):
    (tmp_path / "file").write_text("")
    code, said = namm("assimilate", whole_run, *QUICK, "--tune", "-o", "file/a.h5")
    assert code == 1
    assert "file/a.h5 cannot be written" in said
    assert "Traceback" not in said


def test_half_a_run_is_answered_with_the_command_that_completes_it(namm, whole_run, tmp_path):
    copy = shutil.copytree(whole_run, tmp_path / "runs" / "mine")
    shutil.rmtree(copy / "dm")
    code, said = namm("assimilate", "mine", *GENTLE)
    assert code == 1
    assert "the stage 'dm' of runs/mine has not been run" in said
    assert namm("assimilate", "mine", *GENTLE, "--method", "mirror-dps")[0] == 0  # needs no plain model
    assert shlex.split(re.search("`namm (.*)`", said)[1])[-1] == "dm"


def test_polished_samples_and_their_certificates(namm, whole_run, tmp_path):
    one = (*GENTLE, "--method", "dps", "--noise", 0.02)
    assert namm("assimilate", whole_run, *one, "-o", "plain.h5")[0] == 0
    code, said = namm("assimilate", whole_run, *one, "--polish", "-o", "exact.h5")
    assert code == 0
    assert "DPS, Burgers: 6 of 6 images reach the rule, by polishing" in said
    with h5py.File("plain.h5") as plain, h5py.File("exact.h5") as exact:
        before, after = plain["dps/samples"][:], exact["dps/samples"][:]
        np.testing.assert_allclose(exact["dps/before"][:], plain["dps/distance"][:], rtol=1e-3)
        assert exact["dps/distance"][:].max() < 1e-5 < plain["dps/distance"][:].min()
        assert (exact["dps/after"][:] <= exact["dps/distance"][:] + 1e-6).all()
        assert exact["dps/moved"].shape == (2, 3)
        assert "dps/moved" not in plain
    moved = np.abs(after - before)
    assert moved[..., 0].mean() < 0.5 * moved[..., 1:].mean()  # the first column was observed, and well
    summary = json.loads((tmp_path / "exact.json").read_text())["certificates"]["dps"]
    assert (summary["reached"], summary["images"], summary["notes"]) == (6, 6, [])
    assert "certificates" not in json.loads((tmp_path / "plain.json").read_text())
    code, said = namm("assimilate", whole_run, *one, "-o", "exact.h5")
    assert code == 1
    assert "polish" in said
    code, said = namm("assimilate", whole_run, *one, "--polish", "--observe", "downsample:2", "-o", "means.h5")
    assert code == 0
    assert "no single pixels" in said
