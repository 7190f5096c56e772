"""`namm train`: one trained thing of an experiment, and all that it needs; or the network that counts."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from namm.cli.help_text import format_usage
from namm.cli.options import parse, require_first
from namm.cli.run import OPTIONS as RUN_OPTIONS
from namm.cli.run import run_command
from namm.experiments.presets import EXPERIMENTS, require_name
from namm.formatting import format_number

TARGETS = {
    "map": "g and f on the data (Eq. 1)",
    "mdm": "the diffusion model on g(x)",
    "finetune": "f on samples of that model (Eq. 7)",
    "dm": "the baseline: the same diffusion model on x, at equal compute",
    "few": "the model of few evaluations, distilled from `mdm`",
    "mvae": "the autoencoder on g(x)",
    "vae": "its baseline: the same autoencoder on x, at equal compute",
    "counter": "the network that counts galaxies, for the rule `count`; belongs to no experiment",
}
OPTIONS = tuple(name for name in RUN_OPTIONS if name != "until")


def usage() -> str:
    """The help text that needs no experiment."""
    return format_usage(
        "namm train WHAT NAME [options of `namm run`] [--SETTING VALUE ...]\n"
        "namm train WHAT --data FILE --constraint RULE [the same options]\n"
        "namm train counter [-o FILE] [options]",
        "Train one thing of an experiment and whatever it needs that is not there yet: the same as "
        "`namm run NAME --until WHAT`, with its options (`namm run --help`). Interrupted, it goes on.",
        {
            **TARGETS,
            "NAME": ", ".join(EXPERIMENTS),
            "--SETTING": "any setting; `namm train WHAT NAME --help` shows the usual ones, "
            "`namm train WHAT NAME --help-all` all",
        },
    )


@dataclass(frozen=True)
class CounterOptions:
    """The counter's data and training; what is left out is that of `namm.training.counter`."""

    out: Annotated[Path, arg(aliases=["-o"])] = Path("counter.safetensors")
    """File to write; checkpoints are kept beside it."""
    size: int = 128
    """Pixels along a side of an image, as `data.size` of the experiment `count`."""
    labels: tuple[int, ...] = (6, 7, 8, 9, 10)
    """Numbers of galaxies to tell apart."""
    n_train: int = 10_000
    """Images per label to train on."""
    n_val: int = 1000
    """Images per label to measure the counter with."""
    budget: str | None = None
    """How long: "N steps", "N epochs" or "N minutes"; 20 epochs by default."""
    batch_size: int | None = None
    """Images per step; 64 by default."""
    learning_rate: float | None = None
    """The largest; 1e-3 by default."""
    seed: int = 0


def main(arguments: list[str]) -> None:
    """Train something."""
    target, rest = require_first(arguments, usage(), f"what to train comes first: namm train {'|'.join(TARGETS)}.")
    if require_name(target, TARGETS, "thing to train called") == "counter":
        _train_counter(parse(CounterOptions, rest, "namm train counter"))
    else:
        run_command(rest, f"namm train {target}", usage(), OPTIONS, until=target)


def _train_counter(options: CounterOptions) -> None:
    from namm.training.counter import COUNTER_SETTINGS, train_counter

    given = {name: getattr(options, name) for name in ("budget", "batch_size", "learning_rate", "seed")}
    settings = replace(COUNTER_SETTINGS, **{name: value for name, value in given.items() if value is not None})
    sizes = {name: getattr(options, name) for name in ("size", "labels", "n_train", "n_val")}
    facts = train_counter(options.out, **sizes, settings=settings).facts
    errors = ", ".join(f"{label}: {format_number(error)}" for label, error in facts["errors"].items())
    print(f"{options.out} counts to within {format_number(facts['error'])} on held-out images (by number {errors})")
