"""`namm assimilate`: what a run's models make of noisy, partial observations of held-out images."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from namm.cli.options import RunName, log, parse, require_hdf5
from namm.errors import UsageError
from namm.experiments.engine.folder import find_run
from namm.formatting import format_estimate, format_number, print_table
from namm.precision import Precision

if TYPE_CHECKING:
    from namm.experiments.assimilation.assimilate import Sampling, Score, Setting
    from namm.experiments.assimilation.tasks import Task
    from namm.experiments.engine.run_parts import RunParts
    from namm.generative.mirrored import Mirrored

Method = Literal["dps", "cg-dps", "mirror-dps"]


@dataclass(frozen=True)
class Assimilate:
    """Sample the images behind noisy, partial observations of held-out images, with the models of a run.

    The run must be complete up to `dm`. Writes an HDF5 file (samples, mean, spread, ℓ, χ², error, coverage of every
    truth), the table as JSON and a figure beside it. Interrupted, the same command goes on. A complete file is left
    alone, another is never overwritten. With --trust, a rule of the run's that you have not run before is run: it is
    Python code.
    """

    run: RunName
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
    polish: bool = False
    """Move every sample onto the rule in the end, observed pixels in units of the noise, and keep a certificate."""
    seed: int = 0
    """Seed of the samples and of the noise on the observations."""
    out: Annotated[Path, arg(aliases=["-o"])] = Path("assimilation.h5")
    """File to write."""


def main(arguments: list[str]) -> None:
    """Draw, measure, show."""
    options = parse(Assimilate, arguments, "namm assimilate")
    _check(options)
    run = find_run(options.run)

    from namm.experiments.assimilation.assimilate import PAPER_STEPS, Polishing, Sampling, priors
    from namm.experiments.assimilation.posterior_file import (
        outcomes_figure,
        read_certificates,
        read_scores,
        write_outcomes,
    )
    from namm.experiments.assimilation.tasks import make_task
    from namm.experiments.engine.run_parts import RunParts
    from namm.files import only_writer, write_json
    from namm.inverse import AncestralSteps, DDIMSteps
    from namm.report.figures import look, save

    trained = RunParts.load(run)
    numbers = range(options.first, options.first + options.truths)
    task = make_task(trained, options.observe, options.noise, numbers, options.seed)
    steps = AncestralSteps(options.steps) if options.steps >= PAPER_STEPS else DDIMSteps(options.steps)
    sampling = Sampling(options.n, steps, options.batch_size, options.seed, precision=options.precision)
    polished = replace(sampling, polish=Polishing.of(trained) if options.polish else None)
    sources = priors(trained, options.method)
    shape = "×".join(map(str, task.truth.shape[1:]))
    log(
        f"{run}: truths {numbers.start} to {numbers.stop - 1} of {shape} pixels, observed by {task.observed} "
        f"({task.measured} values) with noise {options.noise:g}; {options.n} samples each, "
        f"{type(steps).__name__} of {options.steps}, guided by {options.guidance}"
    )
    with only_writer(options.out):
        pass  # refuses a place that cannot be written before hours are spent
    settings = _tuned(options, trained, task, sources, sampling) if options.tune else _given(options)
    write_outcomes(options.out, task, sources, settings, trained.rule(), polished)
    scores, certificates = read_scores(options.out), read_certificates(options.out)
    _show(scores)
    for setting, certificate in certificates.items():
        print(f"{setting.title}, {certificate}")
    table, picture = options.out.with_suffix(".json"), options.out.with_suffix(".png")
    about: dict[str, Any] = {"observed": task.observed, "values": task.measured, "truths": list(task.numbers)}
    if certificates:
        about["certificates"] = {setting.method: each.summary() for setting, each in certificates.items()}
    write_json(table, {**about, "methods": {score.setting.method: asdict(score) for score in scores}})
    with look("light"):
        save(outcomes_figure(options.out, task, trained.rule()), picture)
    print(f"{options.out} holds the samples, {table} the table, {picture} the figure")


def _check(options: Assimilate) -> None:
    """Refuse what can be refused before anything is loaded."""
    require_hdf5(options.out, "-o", "assimilation.h5")
    for name, least in {"truths": 1, "n": 1, "tune_truths": 1, "tune_n": 1, "batch_size": 1, "steps": 2}.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, not {value}.")
    if not options.method or len(set(options.method)) < len(options.method):
        raise UsageError(f"--method needs at least one method, and each once, not {' '.join(options.method)}.")
    for name in ("zeta", "weight"):
        given = getattr(options, name)
        if len(given) > 1 and not options.tune:
            raise UsageError(f"--{name} takes one value, or several with --tune, which chooses among them.")
        if any(not 0 <= value < float("inf") for value in given):
            raise UsageError(f"--{name} must be finite and not negative, not {' '.join(map(str, given))}.")


def _given(options: Assimilate) -> "list[Setting]":
    from namm.experiments.assimilation.assimilate import DEFAULTS, Setting

    zeta, weight = DEFAULTS[options.guidance]
    zeta, weight = (*options.zeta, zeta)[0], (*options.weight, weight)[0]
    return [Setting(method, zeta, weight if method == "cg-dps" else 0.0, options.guidance) for method in options.method]


def _tuned(
    options: Assimilate, trained: "RunParts", task: "Task", sources: "Mapping[str, Mirrored]", sampling: "Sampling"
) -> "list[Setting]":
    """The best setting of each method on other truths, each tried once and remembered beside the file."""
    from namm.experiments.assimilation.posterior_file import remembered
    from namm.experiments.assimilation.tasks import make_task, other_numbers
    from namm.experiments.assimilation.tuning import WEIGHTS, ZETAS, choose, tune

    numbers = other_numbers(trained, task.numbers, options.tune_truths)
    others = make_task(trained, task.observed, options.noise, numbers, options.seed)
    few, form = replace(sampling, n=options.tune_n), options.guidance
    grid: Any = {"guidance": form, "zetas": options.zeta or ZETAS[form], "weights": options.weight or WEIGHTS[form]}
    tried = remembered(
        options.out, others, sources, few, grid, lambda: tune(sources, others, trained.rule(), few, **grid)
    )
    chosen = {method: choose(scores, others.truth_chi2) for method, scores in tried.items()}
    for method, best in chosen.items():
        weight = f" and weight {best.setting.weight:g}" if method == "cg-dps" else ""
        log(
            f"{method}: ζ {format_number(best.setting.zeta)}{weight}, of {len(tried[method])} settings tried on truths "
            f"{numbers.start} to {numbers.stop - 1}: χ² {format_number(best.chi2)}, error {format_number(best.error)}, "
            f"ℓ {format_number(best.distance)}"
        )
    return [best.setting for best in chosen.values()]


def _show(scores: "Sequence[Score]") -> None:
    columns = ("method", "ζ", "mean ℓ", "χ²", "error", "spread", "coverage", "redrawn", "failed", "seconds")
    rows = (
        (
            score.setting.title,
            format_number(score.setting.zeta),
            format_estimate(score.distance, score.distance_std),
            *map(format_number, (score.chi2, score.error, score.spread)),
            format_number(score.coverage, ".2f"),
            *(str(score.redrawn), str(score.failed), format_number(score.seconds, ".1f")),
        )
        for score in scores
    )
    print_table(columns, rows, width=120)
    print(
        "ℓ ± standard deviation over samples; χ² per observed value, 1 for the truth; error of the samples' mean,\n"
        "root mean square; coverage: share of the truth's pixels inside the samples' central 90 %"
    )
