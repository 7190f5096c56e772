"""Training the network that counts galaxies: `train_counter`.

    min over the counter   E (counter(x) − k)²,      x an image of k galaxies, k uniform on the labels

Images are drawn with each label, and their number travels in one more row of pixels, so that whatever shuffles images
shuffles labels with them. Galaxies look the same from every side: each image is seen in one of its eight orientations,
drawn anew at every step, which makes eight images of one. Descent starts from a fit in closed form
(`set_first_weights`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from namm.constraints.count import Counter
from namm.datasets.batches import in_chunks
from namm.datasets.galaxies import Galaxies
from namm.distributed import process_state
from namm.errors import UsageError
from namm.files import require_same
from namm.numerics import fold
from namm.training.objectives import Losses, Objective
from namm.training.settings import TrainSettings
from namm.training.trainer import train

COUNTER_SETTINGS = TrainSettings(
    budget="20 epochs",
    batch_size=64,
    learning_rate=1e-3,
    betas=(0.9, 0.999),
    schedule="cosine",
    warmup_steps=100,
    ema_decay=0.999,
    precision="fp32",
    keep=1,
)
"""Adam at 1e-3 as in the paper; the schedule is ours."""
CHUNK = 128
"""Images counted at a time."""
FITTED, RIDGE = 2048, 0.01
"""Images, evenly spread, that the first weights are fitted to, and the fit's regularisation."""


class CountObjective(Objective):
    """Squared error of a counter; a batch is (images with their numbers,)."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def draw(self, batch: tuple[Tensor, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
        """Whether to flip rows, flip columns and exchange the two: (B, 3) of zeros and ones."""
        numbered = batch[0]
        return (torch.randint(2, (len(numbered), 3), generator=generator, device=numbered.device),)

    def forward(self, *tensors: Tensor) -> Losses:
        """Numbered images and orientations -> mean squared and mean absolute error."""
        numbered, orientations = tensors
        images, numbers = separate(numbered)
        error = self.counter(turn(images, orientations)).float() - numbers
        return {"loss": error.square().mean(), "error": error.abs().mean()}


def train_counter(
    path: str | Path,
    *,
    size: int = 128,
    labels: Sequence[int] = range(6, 11),
    n_train: int = 10_000,
    n_val: int = 1000,
    settings: TrainSettings = COUNTER_SETTINGS,
    like: Mapping[str, float] | None = None,
    progress: bool = True,
) -> Counter:
    """Train a counter of galaxies and write it to `path`, a safetensors file; or read it back if it is there.

    Checkpoints and logs are kept beside the file, in a folder of its name that ends in `.training`: called again with
    the same arguments, an unfinished training goes on. All images are held in memory: 3.6 GB for the defaults.

    Args:
        path: The file to write. One that holds a counter of other settings is not overwritten.
        size: Pixels along a side of an image, a multiple of 4.
        labels: Numbers of galaxies to tell apart.
        n_train: Images per label to train on.
        n_val: Images per label to measure the counter with.
        settings: Budget, batch, rate, seed and the rest.
        like: Other parameters of the `Galaxies` to count, such as `blur`.
        progress: Show a progress bar.

    Returns:
        The counter in evaluation mode. `counter.facts` holds how it was trained and, measured on the held-out images,
        its mean absolute error as `error` and, for each label, as `errors`.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise UsageError(f"a counter is written to a file that ends in .safetensors, which {path} does not.")
    if not labels or n_train < 1 or n_val < 1:
        raise UsageError(f"labels {list(labels)}, n_train {n_train} and n_val {n_val}: there must be some of each.")
    asked: dict[str, Any] = {"size": size, "labels": list(labels), "n_train": n_train, "n_val": n_val}
    asked["settings"] = settings.identity() | {"betas": list(settings.betas)}
    recipes = [Galaxies(size=size, count=label, **dict(like or {})) for label in labels]
    if unusual := {name: value for name, value in (like or {}).items() if value != getattr(Galaxies, name)}:
        asked["galaxies"] = unusual
    if path.exists():
        counter = Counter.load(path)
        require_same(path, counter.facts.get("training", {}), asked, "a counter of other settings")
        return counter
    counter = Counter(size)
    seed = fold(settings.seed, "counter")  # so that it is not trained on the images of a run with the same seed
    data, held_out = (numbered_images(recipes, seed, split, n) for split, n in (("train", n_train), ("val", n_val)))
    set_first_weights(counter, data, settings.seed)
    trained = train(
        CountObjective(counter),
        (data,),
        settings,
        validation=(held_out,),
        folder=path.with_suffix(".training"),
        description={"counter": counter.config, "data": asked},
        title="counter",
        progress=progress,
    )
    errors = mean_errors(counter, held_out)
    counter.facts = {
        "training": asked,
        "steps": trained.steps,
        "error": sum(errors.values()) / len(errors),
        "errors": {str(label): error for label, error in errors.items()},
    }
    counter.cpu()
    processes = process_state()
    if processes.is_main_process:
        counter.save(path)
    processes.wait_for_everyone()
    return counter


@torch.no_grad()
def set_first_weights(counter: Counter, numbered: Tensor, seed: int) -> None:
    """Start from the best to be had without descent: random features, averaged over each image, and least squares.

    The convolutions are random, half of the first filters without mean (they see bumps, not brightness); their biases
    let pass what stands out. The hidden layer projects the features' averages at random, the last one is fitted. All
    of it depends on the seed and on some of the images alone.
    """
    images, numbers = separate(numbered[:: max(1, len(numbered) // FITTED)])
    rng = torch.Generator().manual_seed(fold(seed, "init"))
    nn.init.kaiming_normal_(counter.first.weight, generator=rng)
    nn.init.kaiming_normal_(counter.second.weight, generator=rng)
    counter.first.weight[::2] -= counter.first.weight[::2].mean((1, 2, 3), keepdim=True)
    some = images[:: max(1, len(images) // CHUNK)]
    _standardise(counter.first, some, rng)
    _standardise(counter.second, functional.avg_pool2d(counter.first(some).relu(), 2), rng)

    averages = torch.cat([counter.features(chunk).mean((2, 3)) for chunk in images.split(CHUNK)])
    variance, mean = torch.var_mean(averages, 0)
    width, filters = counter.hidden.out_features, len(mean)
    projection = torch.randn(width, filters, generator=rng) / (filters * variance + 1e-9).sqrt()
    counter.hidden.weight.copy_(projection.repeat_interleave(counter.hidden.in_features // filters, 1))
    counter.hidden.bias.copy_(-(projection @ mean))

    inner = (averages @ projection.T + counter.hidden.bias).relu().double()
    offsets, targets = inner - inner.mean(0), (numbers - numbers.mean()).double()
    weights = torch.linalg.solve(offsets.T @ offsets + RIDGE * len(images) * torch.eye(width), offsets.T @ targets)
    counter.number.weight.copy_(weights[None])
    counter.number.bias.fill_(numbers.double().mean() - inner.mean(0) @ weights)


def _standardise(layer: nn.Conv2d, x: Tensor, rng: torch.Generator) -> None:
    """Give every filter's response to `x` the variance 1 and a mean that is uniform from −2 to 0."""
    bias = cast(Tensor, layer.bias).zero_()
    variance, mean = torch.var_mean(layer(x), (0, 2, 3))
    deviation = (variance + 1e-12).sqrt()
    layer.weight.div_(deviation[:, None, None, None])
    bias.copy_(-mean / deviation - 2 * torch.rand(len(mean), generator=rng))


def numbered_images(recipes: Sequence[Galaxies], seed: int, split: str, n: int) -> Tensor:
    """`n` images of each recipe with a last row that repeats its count: (n · recipes, 1, size + 1, size).

    Each count has a seed of its own: from one stream, images of different counts would share their skies.
    """
    size = recipes[0].size
    numbered = torch.empty(n * len(recipes), 1, size + 1, size)
    for part, recipe in zip(numbered.split(n), recipes, strict=True):
        part[..., -1, :] = recipe.count
        done = 0
        for piece in recipe.pieces(fold(seed, recipe.count), split, 0, n):
            part[done : done + len(piece), :, :-1] = piece
            done += len(piece)
    return numbered


def separate(numbered: Tensor) -> tuple[Tensor, Tensor]:
    """Images (B, 1, size, size) and their numbers (B,)."""
    return numbered[..., :-1, :], numbered[:, 0, -1, 0]


def turn(images: Tensor, orientations: Tensor) -> Tensor:
    """Square images (B, C, n, n), flipped and transposed where `orientations` (B, 3) says so."""
    rows, columns, exchange = orientations.bool()[:, :, None, None, None].unbind(1)
    images = torch.where(rows, images.flip(-2), images)
    images = torch.where(columns, images.flip(-1), images)
    return torch.where(exchange, images.transpose(-1, -2), images)


@torch.no_grad()
def mean_errors(counter: Counter, numbered: Tensor) -> dict[int, float]:
    """Mean |counter(x) − k| over the images of each number k."""
    device = next(counter.parameters()).device
    errors, numbers = [], []
    for chunk in in_chunks(numbered, CHUNK):
        images, k = separate(chunk)
        errors.append((counter(images.to(device)).cpu() - k).abs().double())
        numbers.append(k)
    error, number = torch.cat(errors), torch.cat(numbers)
    return {int(k): error[number == k].mean().item() for k in number.unique()}
