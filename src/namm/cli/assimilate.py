"""`namm assimilate`: what a run's models make of noisy, partial observations of held-out images."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from namm.cli.options import parse
from namm.errors import UsageError
from namm.experiments.engine.folder import find_run
from namm.precision import Precision

if TYPE_CHECKING:
    from namm.experiments.assimilation.assimilate import Sampling, Score, Setting
    from namm.experiments.assimilation.tasks import Task
    from namm.experiments.engine.run_parts import Trained
    from namm.inverse import Steps

Method = Literal["dps", "cg-dps", "mirror-dps"]


@dataclass(frozen=True)
class Assimilate:
    """Sample the images behind noisy, partial observations of held-out images, with a run's models.

    Writes an HDF5 file (samples, mean, spread, ℓ, χ², error, coverage of every truth), the table as JSON and a figure
    beside it. Interrupted, the same command goes on. A complete file is left alone, another is never overwritten.
    With --trust, a rule of the run's that you have not run before is run: it is Python code.
    """

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """Folder of the run, or its name in `runs`; it must be complete up to `dm`."""
    observe: Annotated[str | None, arg(metavar="WHAT")] = None
    """What was observed: columns:8, states:first,last, mask:0.3, mask:FILE.npy, blur:1.5 or downsample:4. By default
    the paper's: of Burgers' equation the first eighth of the columns, of Kolmogorov flow the first and last state."""
    noise: float = 0.2
    """Standard deviation of the noise on it."""
    method: tuple[Method, ...] = ("dps", "cg-dps", "mirror-dps")
    """The plain model; the plain model guided by the rule too; the mirrored model through the finetuned f."""
    truths: int = 4
    """How many held-out images, from the split `test`."""
    first: int = 0
    """Number of the first of them there."""
    n: Annotated[int, arg(aliases=["-n"])] = 32
    """Samples of each."""
    steps: int = 1000
    """1000 ancestral steps as in the paper, or fewer by DDIM."""
    guidance: Literal["dps", "likelihood"] = "dps"
    """Steps of ζ as in the paper, or a likelihood that knows how uncertain the guess is, which needs no tuning."""
    zeta: tuple[float, ...] = ()
    """Pull of the measurement: ζ in the paper's units, 0.1 by default, or the likelihood's strength, 1 by default. With
    --tune, the values to try."""
    weight: tuple[float, ...] = ()
    """Weight of the rule in cg-dps; 200 by default, 2000 beside a likelihood. With --tune, the values to try."""
    tune: bool = False
    """First choose each method's ζ (and weight) on other held-out images."""
    tune_truths: int = 4
    """How many others."""
    tune_n: int = 8
    """Samples of each of them."""
    batch_size: int | None = None
    """Samples made together, which bounds the memory."""
    precision: Precision = "auto"
    """How a GPU computes: bf16 where it has it, unless told otherwise."""
    seed: int = 0
    """Seed of the samples and of the noise on the observations."""
    out: Annotated[Path, arg(aliases=["-o"])] = Path("assimilation.h5")
    """File to write."""


def main(arguments: list[str]) -> int:
    """Draw, measure, show."""
    options = parse(Assimilate, arguments, prog="namm assimilate")
    if isinstance(options, int):
        return options
    _check(options)
    run = find_run(options.run)

    from namm.datasets.partial import only_writer
    from namm.experiments.assimilation.assimilate import Sampling, priors
    from namm.experiments.assimilation.figures import outcomes_figure
    from namm.experiments.assimilation.posterior_file import read_scores, write_outcomes
    from namm.experiments.assimilation.tasks import make_task
    from namm.experiments.engine.run_parts import Trained
    from namm.report.figures import look, save

    trained = Trained.load(run)
    numbers = range(options.first, options.first + options.truths)
    task = make_task(trained, options.observe, options.noise, numbers, options.seed)
    sampling = Sampling(options.n, _steps(options.steps), options.batch_size, options.seed, precision=options.precision)
    sources = priors(trained, options.method)
    shape = "×".join(map(str, task.truth.shape[1:]))
    print(
        f"{run}: truths {numbers.start} to {numbers.stop - 1} of {shape} pixels, observed by {task.observed} "
        f"({task.measured} values) with noise {options.noise:g}; {options.n} samples each, "
        f"{type(sampling.steps).__name__} of {options.steps}, guided by {options.guidance}",
        flush=True,
    )
    with only_writer(options.out):
        pass  # refuses a place that cannot be written before hours are spent
    settings = _tuned(options, trained, task, sampling) if options.tune else _given(options)
    write_outcomes(options.out, task, sources, settings, trained.rule(), sampling)
    scores = read_scores(options.out)
    _show(scores)
    table, picture = options.out.with_suffix(".json"), options.out.with_suffix(".png")
    _write_table(table, task, scores)
    with look("light"):
        save(outcomes_figure(options.out, task, trained.rule()), picture)
    print(f"{options.out} holds the samples, {table} the table, {picture} the figure")
    return 0


def _check(options: Assimilate) -> None:
    """Refuse what can be refused before anything is loaded."""
    if options.out.suffix not in (".h5", ".hdf5"):
        raise UsageError(f"-o must name an HDF5 file, such as assimilation.h5, not {options.out}.")
    for name in ("truths", "n", "tune_truths", "tune_n"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}.")
    if options.batch_size is not None and options.batch_size < 1:
        raise UsageError(f"--batch-size must be at least 1, not {options.batch_size}.")
    if options.steps < 2:
        raise UsageError(f"--steps must be at least 2, not {options.steps}.")
    if not options.method or len(set(options.method)) < len(options.method):
        raise UsageError(f"--method needs at least one method, and each once, not {' '.join(options.method)}.")
    for name in ("zeta", "weight"):
        given = getattr(options, name)
        if len(given) > 1 and not options.tune:
            raise UsageError(f"--{name} takes one value, or several with --tune, which chooses among them.")
        if any(not 0 <= value < float("inf") for value in given):
            raise UsageError(f"--{name} must be finite and not negative, not {' '.join(map(str, given))}.")


def _steps(steps: int) -> "Steps":
    from namm.experiments.assimilation.assimilate import PAPER_STEPS
    from namm.inverse import AncestralSteps, DDIMSteps

    return AncestralSteps(steps) if steps >= PAPER_STEPS else DDIMSteps(steps)


def _given(options: Assimilate) -> "list[Setting]":
    from namm.experiments.assimilation.assimilate import DEFAULTS, Setting

    zeta, weight = DEFAULTS[options.guidance]
    zeta, weight = (*options.zeta, zeta)[0], (*options.weight, weight)[0]
    form = options.guidance
    return [Setting(method, zeta, weight if method == "cg-dps" else 0.0, form) for method in options.method]


def _tuned(options: Assimilate, trained: "Trained", task: "Task", sampling: "Sampling") -> "list[Setting]":
    """The best setting of each method on other truths, each tried once and remembered beside the file."""
    from dataclasses import replace

    from namm.experiments.assimilation.assimilate import priors
    from namm.experiments.assimilation.posterior_file import remembered
    from namm.experiments.assimilation.tasks import make_task, other_numbers
    from namm.experiments.assimilation.tuning import WEIGHTS, ZETAS, choose, tune

    numbers = other_numbers(trained, task.numbers, options.tune_truths)
    others = make_task(trained, task.observed, options.noise, numbers, options.seed)
    few, sources = replace(sampling, n=options.tune_n), priors(trained, options.method)
    form = options.guidance
    zetas, weights = options.zeta or ZETAS[form], options.weight or WEIGHTS[form]
    found = remembered(
        options.out,
        others,
        sources,
        few,
        {"guidance": form, "zetas": zetas, "weights": weights},
        lambda: tune(sources, others, trained.rule(), few, guidance=form, zetas=zetas, weights=weights),
    )
    chosen = {method: choose(tried, others.truth_chi2) for method, tried in found.items()}
    for method, best in chosen.items():
        weight = f" and weight {best.setting.weight:g}" if method == "cg-dps" else ""
        print(
            f"{method}: ζ {best.setting.zeta:.3g}{weight}, of {len(found[method])} settings tried on truths "
            f"{numbers.start} to {numbers.stop - 1}: χ² {best.chi2:.3g}, error {best.error:.3g}, ℓ {best.distance:.3g}",
            flush=True,
        )
    return [best.setting for best in chosen.values()]


def _show(scores: "Sequence[Score]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("method", "ζ", "mean ℓ", "χ²", "error", "spread", "coverage", "redrawn", "failed", "seconds")
    for s in scores:
        table.add_row(
            *(s.setting.title, f"{s.setting.zeta:.3g}", f"{s.distance:.3g} ± {s.distance_std:.2g}", f"{s.chi2:.3g}"),
            *(f"{s.error:.3g}", f"{s.spread:.3g}", "–" if s.coverage is None else f"{s.coverage:.2f}"),
            *(str(s.redrawn), str(s.failed), f"{s.seconds:.1f}"),
        )
    Console(width=110).print(table)
    print(
        "ℓ ± standard deviation over samples; χ² per observed value, 1 for the truth; error of the samples' mean,\n"
        "root mean square; coverage: share of the truth's pixels inside the samples' central 90 %"
    )


def _write_table(path: Path, task: "Task", scores: "Sequence[Score]") -> None:
    from dataclasses import asdict

    from namm.files import write_json

    about = {"observed": task.observed, "values": task.measured, "truths": list(task.numbers)}
    write_json(path, {**about, "methods": {s.setting.method: asdict(s) for s in scores}})
