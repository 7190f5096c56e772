"""The benchmark of speed in miniature: every row is measured, and what it says follows from its figures."""

import io
import json
import runpy
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from namm.errors import Interrupted
from namm.maps import ICNN

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PRECISIONS = ["bf16", "tf32"] if torch.cuda.is_available() else ["fp32"]


@pytest.fixture(scope="module")
def gpu():
    return SimpleNamespace(**runpy.run_path(str(BENCHMARKS / "gpu.py")))


@pytest.fixture(scope="module")
def tools(gpu):
    return SimpleNamespace(**runpy.run_path(str(BENCHMARKS / "gpu_tools.py")))


def told(gpu, file, *arguments, chosen=None):
    """Exit code, what is printed, what is written."""
    with redirect_stdout(io.StringIO()) as printed:
        code = gpu.main(["--quick", "--json", str(file), *arguments], chosen)
    return code, printed.getvalue(), json.loads(file.read_text())


@pytest.fixture(scope="module")
def everything(gpu, tmp_path_factory):
    return told(gpu, tmp_path_factory.mktemp("gpu") / "all.json", "--profile")


def test_every_work_is_measured(gpu, everything):
    rows = everything[2]["rows"]
    assert [(row["name"], row["precision"]) for row in rows] == [(w.name, p) for w in gpu.works() for p in PRECISIONS]
    assert [row["error"] for row in rows] == [None] * len(rows)
    for row in rows:
        assert row["ours"] > 0
        assert row["warmup_seconds"] > 0
        assert row["tflops"] > 0 or row["name"] == "distance"


def test_figures_agree_with_each_other(everything):
    found = everything[2]
    for row in found["rows"]:
        assert row["share"] == pytest.approx(row["tflops"] / found["peak_tflops"])
        if row["official"]:
            ratio = row["ours"] / row["official"]
            assert row["ratio"] == pytest.approx(1 / ratio if row["unit"] == "s" else ratio)
        shares = [kernel[2] for kernel in row["kernels"]]
        assert 0 < sum(shares) <= 1.0001
        assert shares == sorted(shares, reverse=True)
        assert row["bound"] in (("launch", "arithmetic", "memory") if torch.cuda.is_available() else ("–",))


def test_the_exit_code_follows_from_the_targets(everything):
    code, printed, found = everything
    missed = []
    for row in found["rows"]:
        judged = row["target"] is not None
        enough = judged and (row["ours"] <= row["target"] if row["unit"] == "s" else row["ours"] >= row["target"])
        assert row["met"] == (enough if judged else None)
        if judged and not enough:
            missed.append(f"missed: {row['work']}, batch {row['batch']}, {row['precision']}: ")
    assert [line for line in missed if line not in printed] == []
    assert printed.count("missed: ") == len(missed)
    assert code == (1 if missed else 0)
    assert "the figures mean nothing" in printed


# Comparisons


@pytest.fixture
def sections(gpu, monkeypatch):
    """The module of comparisons; children answer in this process, and what rows measure takes no time.

    A stand-in makes 30 images/s as the package does it and 10 by the baseline.
    """
    import gpu_comparisons
    from namm.generative import diffusion
    from namm.simulators import burgers

    usual = diffusion.can_record

    def stand_in(bench, **options):
        ours = diffusion.can_record is usual and burgers._has_kernel(None, None)
        return gpu.Figures(30.0 if ours else 10.0, 1.0, 2.0 if ours else 8.0, {})

    monkeypatch.setattr(burgers, "_has_kernel", lambda *_: True)
    for name in ("score_step", "sampling", "distance", "map_step"):
        monkeypatch.setattr(gpu_comparisons, name, stand_in)

    def run_apart(script, arguments, caches):
        flag, section, *given, quick = arguments
        assert (flag, quick) == ("--child", "--quick")
        return gpu_comparisons.CHILDREN[section](bench(gpu), *given)

    monkeypatch.setattr(gpu_comparisons, "run_apart", run_apart)
    return gpu_comparisons


def bench(gpu):
    return gpu.Bench(torch.device("cpu"), 1, "fp32", True)


ROWS = {
    **{
        "update": 2,
        "muon": 2,
        "closed-form": 2,
        "recorded": 3,
        "implicit-step": 4,
        "warm-up": 4,
        "posterior-memory": 2,
    },
    **{"forward-euler": 1, "mmd": 3},
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="miniatures are for a CPU")
@pytest.mark.parametrize("name", ROWS)
def test_every_section_compares_ours_with_a_named_baseline(gpu, sections, tmp_path, name):
    assert ROWS.keys() == sections.SECTIONS.keys()
    code, printed, found = told(gpu, tmp_path / "found.json", "--only", name)
    assert (code, len(found["comparisons"]), found["rows"]) == (0, ROWS[name], [])
    for row in found["comparisons"]:
        quotient = row["ours"] / row["theirs"]
        assert row["ratio"] == pytest.approx(quotient if row["unit"] == "images/s" else 1 / quotient)
        assert f"{row['what']}: " in printed
        assert f"{row['baseline']} " in printed
        if name in ("recorded", "implicit-step"):
            assert row["ratio"] == pytest.approx(4 if row["unit"] == "s" else 3)


def test_mmd_in_blocks_is_that_of_whole_matrices(sections):
    x, y = torch.rand(80, 1, 4, 4), torch.rand(80, 1, 4, 4) ** 2
    assert sections.mmd2(x, y) == pytest.approx(sections.full_matrices(x, y), rel=1e-4)


def test_a_comparison_beyond_its_limit_falls_short(gpu, monkeypatch, capsys):
    found = gpu.Comparison("first step", "s", 16.0, "compiled", 32.0, 15.0)
    assert found.line() == "first step: 16 s, compiled 32, ratio 2.00; at most 15: no"
    assert not replace(found, ours=14.0).falls_short
    monkeypatch.setitem(gpu.SECTIONS, "update", lambda bench: [found])
    assert gpu.main(["--quick", "--only", "update"]) == 1
    assert "missed: first step" in capsys.readouterr().out


def test_a_child_that_needs_no_gpu_is_not_refused(gpu, capsys):
    assert gpu.main(["--child", "mmd", "blocks", "64", "4"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["MiB"] > 100


def test_a_child_prints_its_figures_last(gpu, capsys):
    assert gpu.main(["--quick", "--child", "implicit-step", "distance", "sweeps"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]).keys() == {"images/s", "s"}


def test_autograd_finds_what_the_closed_form_is(sections):
    g, x = ICNN(2, 2, 4).double(), torch.rand(2, 2, 8, 12, dtype=torch.double)
    assert torch.allclose(sections.by_autograd(g, x), g(x), rtol=1e-12, atol=1e-12)


# Rows


def work(gpu, rate, **changes):
    figures = runpy.run_path(str(BENCHMARKS / "gpu_tools.py"))["Figures"](rate, 1e9, 0.5, {"gemm": 1 / rate})
    return gpu.Work(**{"name": "a", "title": "work A", "batch": 16, "measure": lambda bench: figures} | changes)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"target": 99.0}, 0),
        ({"target": 101.0}, 1),
        ({}, 0),
        ({"target": 11.0, "n": 1000}, 0),  # 10 seconds at 100 images/s
        ({"target": 9.0, "n": 1000}, 1),
    ],
)
def test_a_target_is_met_or_missed(gpu, tmp_path, changes, code):
    got, printed, found = told(gpu, tmp_path / "a.json", chosen=[work(gpu, 100.0, **changes)])
    assert got == code
    assert ("missed: work A" in printed) == bool(code)
    assert found["rows"][0]["tflops"] == pytest.approx(0.1)


def test_a_row_that_fails_leaves_the_others(gpu, tmp_path):
    def fail(bench):
        raise torch.OutOfMemoryError("nothing left\nof it")

    chosen = [work(gpu, 1.0, name="bad", title="work B", measure=fail, target=1.0), work(gpu, 100.0, target=50.0)]
    code, printed, found = told(gpu, tmp_path / "b.json", chosen=chosen)
    bad, good = found["rows"][0], found["rows"][len(PRECISIONS)]
    assert code == 1
    assert bad["error"] == "OutOfMemoryError: nothing left"
    assert (bad["ours"], bad["met"]) == (None, None)
    assert (good["ours"], good["met"]) == (100.0, True)
    assert "failed: work B, batch 2" in printed


def test_who_is_asked_to_stop_tells_what_is_measured_so_far(gpu, tmp_path):
    def stop(bench):
        raise Interrupted("a training was asked to stop")

    reached = []
    chosen = [work(gpu, 100.0), work(gpu, 1.0, measure=stop), work(gpu, 1.0, measure=reached.append)]
    code, printed, found = told(gpu, tmp_path / "s.json", chosen=chosen)
    assert (code, len(found["rows"])) == (1, len(PRECISIONS))
    assert f"asked to stop: {2 * len(PRECISIONS)} rows are missing" in printed
    assert not reached


def test_a_warm_up_fails_only_where_a_row_does(gpu):
    def fail(bench):
        raise torch.OutOfMemoryError("nothing left")

    slow, bad = work(gpu, 1.0, target=50.0), work(gpu, 1.0, measure=fail)
    assert gpu.main(["--quick", "--warm"], chosen=[slow]) == 0
    assert gpu.main(["--quick", "--warm"], chosen=[slow, bad]) == 1


def test_a_warm_up_draws_what_is_short_only(tools):
    drawn = []

    def measure(prepares):
        bench = tools.Bench(torch.device("cpu"), 2, "fp32", quick=True, prepares=prepares)
        tools.calls(bench, lambda: drawn.append("short"), 2, 1.0, lambda: drawn.append("long"), 10.0)
        return drawn.count("long")

    assert measure(prepares=True) == 0
    assert measure(prepares=False) > 0


def test_only_what_is_named_is_measured(gpu, tmp_path, capsys):
    chosen = [work(gpu, 1.0, name=name) for name in "abc"]
    _, _, found = told(gpu, tmp_path / "c.json", "--only", "c", "a", chosen=chosen)
    assert [row["name"] for row in found["rows"]] == [name for name in "ac" for _ in PRECISIONS]
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--only", "maps"])
    assert "'maps'" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_every_row_is_prepared_once(gpu, monkeypatch, capsys):
    asked = []

    def run(command, **options):
        asked.append(tuple(command[2:]))
        return SimpleNamespace(returncode=2 if "g" in command else 0, stdout="a table", stderr="no memory")

    monkeypatch.setitem(gpu.prepare.__globals__, "subprocess", SimpleNamespace(run=run))
    gpu.prepare("gpu.py", gpu.warm_up_calls(["map", "g"], ["bf16", "tf32"]), 2)
    assert sorted(asked) == [
        ("--only", name, "--precision", precision, "--warm") for name in ("g", "map") for precision in ("bf16", "tf32")
    ]
    shown = capsys.readouterr().out
    assert shown.count("prepared") == 4
    assert shown.count("exit code 2, no memory") == 2


def test_a_cpu_is_refused(gpu, capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu.main([])
    assert "--quick" in capsys.readouterr().err


CONV = "sm90_xmma_fprop_implicit_gemm_bf16bf16"
FUSED = "triton_poi_fused__to_copy_convolution_relu_3"  # adds a bias, is no convolution


@pytest.mark.parametrize(
    ("kernels", "wall", "word"),
    [
        ({CONV: 6.0}, 10.0, "launch"),
        ({CONV: 4.0, FUSED: 3.5}, 10.0, "arithmetic"),
        ({CONV: 3.5, FUSED: 4.0}, 10.0, "memory"),
        ({"nvjet_hsh_128x256": 9.0}, 10.0, "arithmetic"),
        ({"triton_tem_fused_convolution_1": 9.0}, 10.0, "arithmetic"),
        ({"void convert_kernel": 9.0}, 10.0, "memory"),
        ({}, 1.0, "launch"),
    ],
)
def test_what_bounds_it(tools, kernels, wall, word):
    assert tools.bound(kernels, wall) == word


def test_kernels_are_summed_by_kind(tools):
    found = tools.by_kind(
        {
            CONV: 1.0,
            FUSED: 2.0,
            "triton_per_fused_mean_1": 3.0,
            "void fused_dropout_kernel_vec<BFloat16>": 4.0,
            "multi_tensor_apply_kernel<FusedAdam>": 5.0,
            "Memcpy DtoD": 6.0,
            "ampere_sgemm_128x64": 0.5,
            "void softmax": 7.0,
        }
    )
    names = ("others", "copies", "optimiser", "random", "reductions", "pointwise", "matrix")
    assert list(found.items()) == list(zip(names, (7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.5), strict=True))


def test_every_row_has_a_name_of_its_own(gpu):
    names = [work.name for work in gpu.works()]
    assert len(set(names)) == len(names)


def test_flops_are_two_per_product(tools):
    conv = torch.nn.Conv2d(3, 5, 3, padding=1)
    assert tools.flops(conv, (3, 8, 8)) == 2 * (3 * 3 * 3) * 5 * (8 * 8)
    step = tools.flops(lambda x: conv(x).sum().backward(), (3, 8, 8))
    assert step == 2 * tools.flops(conv, (3, 8, 8))  # forward, and the gradient of the weights
    attention = torch.nn.functional.scaled_dot_product_attention
    assert tools.flops(lambda q: attention(q, q, q), (1, 16, 4)) == 2 * 2 * 16 * 16 * 4


def test_a_profile_counts_what_ran(tools):
    bench = tools.Bench(torch.device("cpu"), 1, "fp32", True)
    profiled, a = tools.Profile(bench), torch.ones(64, 64)
    for _ in range(4):
        a = (a @ a).clamp(max=1)
        profiled.after_step(first=1, last=3)  # two products are inside
    once, halved = profiled.kernels(1), profiled.kernels(2)
    assert once["aten::mm"] > 0
    assert halved["aten::mm"] == pytest.approx(once["aten::mm"] / 2)
    assert sum(event.name == "aten::mm" for event in profiled.profiler.events()) == 2


def test_another_process_tells_its_last_line_or_why_not(tools, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys\n"
        "print('other words')\n"
        "print(json.dumps([sys.argv[1:], os.environ['TRITON_CACHE_DIR'], sys.dont_write_bytecode]))\n"
        "sys.exit('no such thing' if 'fail' in sys.argv else 0)\n"
    )
    assert tools.run_apart(str(script), ["a", "b"], "place") == [["a", "b"], "place", False]
    with pytest.raises(SystemExit, match=r"fail failed:\nno such thing"):
        tools.run_apart(str(script), ["fail"], "place")


def test_a_baseline_records_nothing(tools):
    from namm.generative import diffusion
    from namm.training import trainer

    before = trainer.can_record
    with tools.compiled_by_torch():
        assert not trainer.can_record(None, None)
        assert not diffusion.can_record(None, None)
    assert trainer.can_record is diffusion.can_record is before
