"""Damaged and hostile files against every reader: millions of mutations of small valid files, each with a limit.

    python benchmarks/fuzz.py --inputs 100000 --out runs/fuzz

A reader may read a mutated file or refuse it with an error of `namm.errors`. A finding is anything else: another
exception, more than 5 s, more than 1 GiB, the end of the process, or, of a reader that promises integrity, other
content than was written. Input i of a reader depends on (seed, reader, i) alone. Each reader has one process for all
its inputs, started anew only where one ends or hangs; HDF5 files pass the same guard as in the package, with a shorter
limit. Interrupted, the same call goes on. Exit code 1: there is a finding; its input and its traceback are kept.
"""

import hashlib
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile, ZipInfo

import tyro

SECONDS = 5.0
GROWTH = 2**30
START = 120.0
"""Seconds that a process may take to import everything, on a busy machine."""
CHECKPOINTS = ("step-000000001.safetensors",)
WEIGHTS = ("counter.safetensors", "model.safetensors")
MAP_FILES = (
    *(f"{side}/config.json" for side in ("g", "f", "rulenet/f")),
    *("standardisation.json", "g/diffusion_pytorch_model.safetensors"),
)
GUARD = 1.0
"""Seconds that the guard of HDF5 gives its child here: the files have a few kilobytes."""
SAVE_EVERY = 2.0
IN_MEMORY = Path("/dev/shm")
"""Where inputs are written, if there is such a place: a disk takes ten times as long as most readers."""

Read = Callable[[Path], Any]


@dataclass(frozen=True)
class Reader:
    """One reader under test.

    Attributes:
        make: Writes the valid files into a folder; it is called in the reader's own process.
        files: Those of them that are mutated, relative to the folder.
        read: Reads the folder after one of them was mutated. Is given the folder and that file's path.
        verifies: Whether it promises integrity, so that content which differs from the original's is a finding.
    """

    make: Callable[[Path], None]
    files: tuple[str, ...]
    read: Callable[[Path, Path], Any]
    verifies: bool = False


@dataclass(frozen=True)
class Options:
    """What to try."""

    inputs: int = 100_000
    """Inputs of each reader."""
    only: tuple[str, ...] = ()
    """Readers to try; all of them by default."""
    seed: int = 0
    workers: int = 1
    """Readers that are tried at the same time."""
    out: Path = Path("runs/fuzz")
    """Folder of progress and findings."""


# The readers and their valid files; imports wait for the process that needs them


def _yaml(folder: Path) -> None:
    (folder / "flow.yaml").write_text("experiment: periodic\ndata: {n_train: 100, threshold: null}\n")
    (folder / "block.yaml").write_text(
        "# settings\nexperiment: burgers\npreset: paper\nmap:\n  train:\n    betas:\n    - 0.5\n    - 0.9\n"
        "    budget: 3 steps\n  f:\n    kind: 'rulenet'\n    skip: true\n"
    )


def _read_yaml(_: Path, file: Path) -> Any:
    from namm.experiments.engine.settings_file import changes, read_yaml

    chosen = read_yaml(file)
    return chosen.settings, changes(file.read_text(), "experiment: burgers")


def _images(n: int = 6, channels: int = 2) -> Any:
    import numpy as np

    return np.random.default_rng(0).normal(size=(n, channels, 8, 8)).astype(np.float32)


def _hdf5(folder: Path) -> None:
    import h5py
    import numpy as np

    bits = (_images() > 0).astype(np.uint8)
    with h5py.File(folder / "plain.h5", "w") as file:
        file["images"] = _images()
        file["images"].attrs["units"] = "m/s"
        file["more/numbers"] = np.arange(5)
        file.attrs["made_by"] = ["somebody", "else"]
    with h5py.File(folder / "packed.h5", "w") as file:
        how: Any = {"chunks": (2, 2, 8, 8), "maxshape": (None, 2, 8, 8), "shuffle": True, "fletcher32": True}
        file.create_dataset("images", data=bits, compression="gzip", **how)
        file.create_dataset("lzf", data=bits, chunks=(2, 2, 8, 8), compression="lzf")
        file["soft"] = h5py.SoftLink("/images")
    with h5py.File(folder / "latest.h5", "w", libver="latest") as file:
        file.create_dataset("images", data=_images(), chunks=(1, 2, 8, 8), maxshape=(None, None, 8, 8))
        file["images"].attrs["long"] = np.arange(300)
        for k in range(20):
            file.attrs[f"number {k}"] = k


def _read_hdf5(_: Path, file: Path) -> Any:
    from namm.datasets import open_images

    with open_images(file, key="images", layout="NCHW") as images:
        return images[[0, len(images) - 1]], images[:]


def _store(folder: Path) -> None:
    from namm.datasets import BurgersTrajectories, write_store

    write_store(folder / "x.h5", BurgersTrajectories(size=8), {"train": 70, "val": 3, "test": 5}, quiet=True)


def _read_store(_: Path, file: Path) -> Any:
    from namm.cli.options import rule_settings
    from namm.datasets import open_store

    rule_settings("burgers", file)
    with open_store(file) as store:
        store.damaged()
        train, _sizes = store["train"], store.sizes
        return train[:], train[[2, 1]], store["val"][:], store["test"][:]


def _samples(folder: Path) -> None:
    import numpy as np

    from namm.datasets.store import grow, write_block
    from namm.exact.certificate import ARRAYS

    arrays = {"images": (70, 1, 8, 8), "mirror_images": (70, 1, 8, 8)}
    shapes = {**arrays, **dict.fromkeys(("distances", "seconds", *ARRAYS), (70,))}
    header = {"namm_version": "0", "samples": 70, "seed": 0, "rule": "flux", "floor": 0.5, "scores": {"samples": 1}}

    def fill(file: Any, blocks: Any) -> None:
        for name, k in blocks:
            write_block(file, (name, k), np.ones((min(64, 70 - 64 * k), *shapes[name][1:]), np.float32))

    grow(folder / "x.h5", shapes, header, fill)


def _read_samples(_: Path, file: Path) -> Any:
    from namm.generative.sample_file import SampleFile

    with SampleFile(file) as found:
        certificate = found.certificate
        lines = [] if certificate is None else certificate.lines()
        return found.images[:], found.mirror_images[[3]], found.distances, found.compute_seconds, lines


def _posterior(folder: Path) -> None:
    import numpy as np

    from namm.datasets.store import grow, write_block
    from namm.experiments.assimilation.assimilate import Setting

    image: dict[str, tuple[int, ...]] = {"samples": (2, 1, 4, 4), "mean": (1, 4, 4), "spread": (1, 4, 4)}
    numbers: dict[str, tuple[int, ...]] = dict.fromkeys(("distance", "chi2", "redrawn", "failed"), (2,))
    shapes = {**image, **numbers, **dict.fromkeys(("error", "coverage", "seconds"), ())}
    header = {
        "namm_version": "0",
        "made_from": {"methods": {"dps": asdict(Setting("dps")) | {"weights": "0"}}},
        "methods": json.dumps(["dps"]),
    }
    kinds = {"dps/redrawn": "i8", "dps/failed": "?"}

    def begin(file: Any) -> None:
        file["truth"] = file["measurement"] = np.ones((2, 1, 4, 4), np.float32)

    def fill(file: Any, blocks: Any) -> None:
        for name, k in blocks:
            shape = shapes[name.partition("/")[2]]
            write_block(file, (name, k), np.zeros((1, *shape), kinds.get(name, "f4")))

    arrays = {f"dps/{name}": (2, *shape) for name, shape in shapes.items()}
    grow(folder / "x.h5", arrays, header, fill, rows=1, dtypes=kinds, begin=begin)


def _read_posterior(_: Path, file: Path) -> Any:
    from namm.experiments.assimilation.posterior_file import read_distances, read_scores, read_truth

    return read_scores(file), read_truth(file, 1), read_distances(file)


def _npy(folder: Path) -> None:
    import numpy as np

    np.save(folder / "a.npy", _images())
    np.save(folder / "b.npy", (_images() > 0).astype(np.uint8))


def _npz(folder: Path) -> None:
    import numpy as np

    np.savez(folder / "plain.npz", images=_images(), others=np.arange(3))
    np.savez_compressed(folder / "packed.npz", images=(_images() > 0).astype(np.uint8))
    for name in ("plain.npz", "packed.npz"):
        _undated(folder / name)


def _undated(path: Path) -> None:
    """Write an NPZ file anew without the time of day, so that every process mutates the same bytes."""
    with ZipFile(path) as archive:
        members = [(info.filename, info.compress_type, archive.read(info)) for info in archive.infolist()]
    with ZipFile(path, "w") as archive:
        for name, how, content in members:
            archive.writestr(ZipInfo(name), content, compress_type=how)


def _read_numpy(_: Path, file: Path) -> Any:
    from namm.datasets import read_images

    return read_images(file, key="images" if file.suffix == ".npz" else None, layout="NCHW")


def _all_arrays(folder: Path) -> None:
    for make in (_hdf5, _npy, _npz):
        make(folder)


def _read_look(_: Path, file: Path) -> Any:
    from namm.datasets.user_files import content_hash, look

    found = look(file, "images" if file.suffix == ".h5" else None, "NCHW")
    return found, found.sizes({"train": 2, "val": 1, "test": 2}), content_hash(file)


def _png(folder: Path) -> None:
    import numpy as np
    from PIL import Image, PngImagePlugin

    about = PngImagePlugin.PngInfo()
    about.add_text("Comment", "a" * 200, zip=True)
    pixels = np.random.default_rng(0).integers(0, 255, (9, 7, 3), dtype=np.uint8)
    for name, image in (("grey", pixels[..., 0]), ("colour", pixels), ("bits", pixels[..., 0] > 99)):
        (folder / name).mkdir()
        Image.fromarray(image).save(folder / name / "x.png", pnginfo=about)


def _read_png(_: Path, file: Path) -> Any:
    from namm.datasets import read_images

    _fix_png(file)
    return read_images(file.parent)


def _fix_png(file: Path) -> None:
    """Let the checksums of a PNG's chunks agree with what was mutated, for every other input: else nobody looks."""
    content = bytearray(file.read_bytes())
    if sum(content) % 2:
        return
    place = 8
    while place + 12 <= len(content):
        end = place + 8 + int.from_bytes(content[place : place + 4], "big")
        if end + 4 > len(content):
            break
        content[end : end + 4] = zlib.crc32(content[place + 4 : end]).to_bytes(4, "big")
        place = end + 4
    file.write_bytes(content)


def _flax(folder: Path) -> None:
    import msgpack
    import numpy as np

    def pack(value: Any) -> bytes:
        def array(each: Any) -> Any:
            return msgpack.ExtType(1, msgpack.packb((each.shape, each.dtype.name, each.tobytes())))

        content: bytes = msgpack.packb(value, default=array)
        return content

    def layer(*shape: int) -> dict[str, Any]:
        return {"kernel": np.full(shape, 0.5, np.float32), "bias": np.zeros(shape[-1], np.float32)}

    g: dict[str, Any] = {name: {"kernel": np.ones((1, 1, 1, 1), np.float32)} for name in ("wz_0", "final_conv2d")}
    for k in (0, 1):
        g |= {f"wx_quad_{k}": {"kernel": np.ones((1, 1, 1, 1), np.float32)}, f"wx_lin_{k}": layer(1, 1, 1, 1)}
    norm = {"scale": np.ones(4, np.float32), "bias": np.zeros(4, np.float32)}
    block = {"Conv_0": layer(3, 3, 4, 4), "GroupNorm_0": norm, "Conv_1": layer(3, 3, 4, 4), "GroupNorm_1": norm}
    f = {"Conv_0": layer(7, 7, 1, 4), "ResNetBlock_0": block, "Conv_1": layer(7, 7, 4, 1), "GroupNorm_0": norm}
    (folder / "map").write_bytes(pack({"epoch": 3, "fwd_params_ema": g, "bwd_params": f}))
    (folder / "score").write_bytes(pack({"step": 1, "params_ema": {"Conv_0": layer(3, 3, 1, 8)}, "list": [1, None]}))


def _read_flax(_: Path, file: Path) -> Any:
    from namm.import_flax import official_map, official_network, read_official

    state = read_official(file)
    found = official_map(state) if state.kind == "map" else official_network(state)
    return state.epoch, found.state_dict()


def _run(folder: Path) -> None:
    from namm.experiments.engine.folder import Record, write_record
    from namm.files import write_json

    write_json(folder / "run.json", {"kind": "namm run", "experiment": "burgers", "created": "2026-01-01"})
    (folder / "settings.yaml").write_text("experiment: burgers\n")
    record = {"started": "2026-01-01", "finished": "2026-01-02", "seconds": 1.5, "results": {"n_train": 3}}
    about: dict[str, Any] = {"status": "complete", "files": ("data.h5",), "attempts": 1, **record}
    write_record(folder / "data", Record("data", "0123456789abcdef", {"a": 1}, {}, **about))
    write_json(folder / "failure.json", {"key": "k", "message": "it failed"})


def _read_run(folder: Path, _: Path) -> Any:
    from namm.experiments.engine.folder import describe_run, read_failure, read_record

    return describe_run(folder), read_record(folder / "data"), read_failure(folder, "k")


def _json(folder: Path) -> None:
    from namm.files import write_json

    numbers = {name: [0.5, 1e-9] for name in ("before", "after", "moved", "iterations", "rounding")}
    about = {"rule": "flux", "method": "none", "floor": 0.0, "notes": ["a note"], "reached": [True, False]}
    write_json(folder / "certificate.json", {**numbers, **about})
    trial = {"cost": 1.0, "left": 0.5, "cycle_error": 0.1, "total_variation": 1.0}
    tuning = {"sigma": 0.1, "weight": 2.0, "unit": 1.0, "distance_errors": 0.3, "distance_samples": None}
    write_json(folder / "tuning.json", {**tuning, "trials": [trial], "compute_seconds": 1.0})
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {k}, "loss": 0.{k}}}\n' for k in range(9)))
    write_json(folder / "trusted.json", {"sources": {"0" * 64: {"rule": "a:b", "files": ["a.py"]}}})


def _read_json(_: Path, file: Path) -> Any:
    from namm.exact.certificate import Certificate
    from namm.experiments.engine.user_rule import read_trusted
    from namm.training import tune
    from namm.training.log import read_metrics

    os.environ["NAMM_TRUST"] = str(file)
    readers: Mapping[str, Read] = {
        "certificate.json": lambda path: Certificate.load(path).lines(),
        "tuning.json": tune._read,
        "metrics.jsonl": read_metrics,
        "trusted.json": lambda _: read_trusted(),
    }
    return readers[file.name](file)


def _facts(folder: Path) -> None:
    import numpy as np

    from namm.constraints import TotalFlux
    from namm.experiments.engine.rule_facts import write_facts

    write_facts(folder, TotalFlux(1.0), {}, None)  # type: ignore[arg-type]
    np.savez(folder / "residuals.npz", finetuned_first=_images(2, 1))
    _undated(folder / "residuals.npz")


def _read_facts(folder: Path, _: Path) -> Any:
    from namm.experiments.engine import rule_facts

    return rule_facts._read_facts(folder)


def _mirror_space(folder: Path) -> None:
    import numpy as np

    from namm.experiments.engine.mirror_space import FILE

    images = {name: _images(2, 1) for name in ("data", "mirror", "sampled", "mirror_residuals")}
    np.savez(folder / FILE, data_distances=np.ones(2, np.float32), **images)
    _undated(folder / FILE)


def _read_mirror_space(folder: Path, _: Path) -> Any:
    from namm.experiments.engine.mirror_space import read_mirror_space

    return [method.images for method in read_mirror_space(folder)]


def _checkpoint(folder: Path) -> None:
    import torch

    from namm.training.checkpoint import Checkpoint, write

    tensors = {"a": torch.arange(24.0).reshape(2, 3, 4), "b": torch.ones(5, dtype=torch.int64)}
    write(folder / "step-000000001.safetensors", Checkpoint(tensors, {"step": 1, "seconds": 0.5}))


def _read_checkpoint(_: Path, file: Path) -> Any:
    from namm.training.checkpoint import read

    return read(file).tensors


def _weights(folder: Path) -> None:
    import torch

    from namm.constraints.count import Counter
    from namm.training.train_model import MODEL
    from namm.weights_file import write_weights

    torch.manual_seed(0)
    Counter(8, filters=(2, 2), width=4).save(folder / "counter.safetensors")
    write_weights(folder / MODEL, torch.nn.Linear(3, 2).state_dict(), {"model": "Linear"})


def _read_weights(folder: Path, file: Path) -> Any:
    import torch

    from namm.constraints.count import Counter
    from namm.training.train_model import load_model

    if file.name.startswith("counter"):
        return Counter.load(file).state_dict()
    model = torch.nn.Linear(3, 2)
    load_model(model, folder)
    return model.state_dict()


def _map(folder: Path) -> None:
    import torch

    from namm.maps import ICNN, MirrorMap, ResNet, RuleNet

    torch.manual_seed(0)
    MirrorMap(ICNN(1, 1, 2), ResNet(1, 2, 1, 1), [0.5], [2.0]).save(folder)
    MirrorMap(ICNN(1, 1, 2), RuleNet(1, 4, 4, 2, 1, 2, 1, 2)).save(folder / "rulenet")


def _read_map(folder: Path, file: Path) -> Any:
    from namm.maps import MirrorMap

    return MirrorMap.load(folder / "rulenet" if "rulenet" in file.parts else folder).state_dict()


def _unsigned(folder: Path) -> None:
    """Weights, a map and a stage without digests, as version 0.1 wrote them and as a stranger may."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    for make in (_checkpoint, _weights, _map, _run):
        make(folder)
    for path in list(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            about = {name: value for name, value in json.loads(file.metadata()["namm"]).items() if name != "sha256"}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file(tensors, path, metadata={"namm": json.dumps(about)})
    for path in folder.rglob("digests.json"):
        path.unlink()
    for path in (folder / "standardisation.json", folder / "data" / "stage.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps({name: value for name, value in content.items() if name != "sha256"}))


def _read_unsigned(folder: Path, file: Path) -> Any:
    if file.parent == folder and file.suffix == ".safetensors":
        return _read_checkpoint(folder, file) if file.name.startswith("step") else _read_weights(folder, file)
    return _read_run(folder, file) if file.parent.name == "data" else _read_map(folder, file)


def _source(folder: Path) -> None:
    (folder / "fuzzed_rule.py").write_text(
        '"""A rule."""\nimport math\nfrom fuzzed_part import scale\n\n\ndef rule(x):  # images\n'
        "    return (scale * x).abs().mean((1, 2, 3)) if math.pi > 3 else f'{x!r:>10}'\n"
    )
    (folder / "fuzzed_part.py").write_text("scale = 2.0\nclass A:\n    b: int = 1\n\n    async def c(self): ...\n")


def _read_source(folder: Path, _: Path) -> Any:
    from namm.experiments.engine.rule_source import locate

    source = locate("fuzzed_rule:rule", str(folder))
    return source.fingerprint, source.code_hash


READERS: dict[str, Reader] = {
    "settings": Reader(_yaml, ("flow.yaml", "block.yaml"), _read_yaml),
    "hdf5": Reader(_hdf5, ("plain.h5", "packed.h5", "latest.h5"), _read_hdf5),
    "store": Reader(_store, ("x.h5",), _read_store, verifies=True),
    "samples": Reader(_samples, ("x.h5",), _read_samples, verifies=True),
    "posterior": Reader(_posterior, ("x.h5",), _read_posterior, verifies=True),
    "npy": Reader(_npy, ("a.npy", "b.npy"), _read_numpy),
    "npz": Reader(_npz, ("plain.npz", "packed.npz"), _read_numpy),
    "look": Reader(_all_arrays, ("plain.h5", "latest.h5", "a.npy", "plain.npz"), _read_look),
    "png": Reader(_png, ("grey/x.png", "colour/x.png", "bits/x.png"), _read_png),
    "flax": Reader(_flax, ("map", "score"), _read_flax),
    "run": Reader(_run, ("run.json", "data/stage.json", "failure.json"), _read_run),
    "json": Reader(_json, ("certificate.json", "tuning.json", "metrics.jsonl", "trusted.json"), _read_json),
    "facts": Reader(_facts, ("rule.json", "residuals.npz"), _read_facts),
    "mirror-space": Reader(_mirror_space, ("mirror_space.npz",), _read_mirror_space),
    "checkpoint": Reader(_checkpoint, CHECKPOINTS, _read_checkpoint, verifies=True),
    "weights": Reader(_weights, WEIGHTS, _read_weights, verifies=True),
    "map": Reader(_map, MAP_FILES, _read_map, verifies=True),
    "unsigned": Reader(_unsigned, (*CHECKPOINTS, *WEIGHTS, *MAP_FILES, "data/stage.json"), _read_unsigned),
    "source": Reader(_source, ("fuzzed_rule.py", "fuzzed_part.py"), _read_source),
}


# Mutations

NUMBERS = [0, 1, 2, 3, 4, 7, 8, 16, 32, 63, 64, 127, 128, 255, 256, 1 << 15, (1 << 16) - 1, 1 << 24, (1 << 31) - 1]
NUMBERS += [1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
TOKENS = [
    *rb"""null NaN Infinity -1 1e999 true [] {} "" 0 100000000000000 1_000 2020-13-45 , : " ' # *a""".split(),
    *rb"../../.. __class__ \u0000 \ud800".split(),
    *(word + b" " for word in b"&a <<: ? !!python/object !!binary".split()),
    *(b"\n", b"\t", b"\x00", b"\xff\xfe", b"\xed\xa0\x80"),
    *(b"9" * 5000, b"0x" + b"F" * 5000, b"1:59" * 50, b"[" * 2000, b'{"a":' * 500, b"- " * 200, b"(" * 300),
    b"import a" + b".a" * 3000 + b"\n",
]


def mutated(original: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """One to four random changes of the content of a file."""
    content = bytearray(original)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        _mutate(content, others, rng)
    return bytes(content)


def _mutate(content: bytearray, others: list[bytes], rng: random.Random) -> None:
    kind, n = rng.randrange(10), len(content)
    here = rng.randrange(n) if n else 0
    length = min(1 << rng.randrange(10), max(1, n))
    if not n or kind == 0:
        content[here:here] = rng.randbytes(length)
    elif kind == 1:
        content[here] ^= 1 << rng.randrange(8)
    elif kind == 2:
        content[here] = rng.randrange(256)
    elif kind in (3, 4):
        width = rng.choice((1, 2, 4, 8))
        number = (rng.choice(NUMBERS) + rng.choice((0, 0, -1, 1))) % (1 << 8 * width)
        content[here : here + width] = number.to_bytes(width, rng.choice(("little", "big")))
    elif kind == 5:
        del content[here : here + length]
    elif kind == 6:
        content[here:here] = content[here : here + length] * rng.choice((1, 1, 2, 50))
    elif kind == 7:
        other = rng.choice(others)
        start = rng.randrange(len(other))
        content[here : here + length] = other[start : start + length]
    elif kind == 8:
        replaced = rng.choice((0, 1, length))
        content[here : here + replaced] = rng.choice(TOKENS)
    elif rng.random() < 0.3:
        del content[here:]
    else:
        _replace_number(content, here, rng)


def _replace_number(content: bytearray, here: int, rng: random.Random) -> None:
    """Write another token over the run of letters or digits at a place: numbers, words and keys of a text."""
    start = end = here
    while start > 0 and chr(content[start - 1]).isalnum():
        start -= 1
    while end < len(content) and chr(content[end]).isalnum():
        end += 1
    token = str(rng.choice(NUMBERS)).encode() if rng.random() < 0.5 else rng.choice(TOKENS)
    content[start:end] = token


# The process of one reader


def worker(name: str, seed: int, bounds: tuple[int, int], folder: Path, state: Any, findings: Any) -> None:
    """Try inputs `bounds`.

    `state` holds the input at work, when it was begun, how many were read, whether any was begun, and its file.
    """
    from diffusers.utils import logging

    from namm.errors import NammError

    warnings.simplefilter("ignore")
    logging.set_verbosity(logging.CRITICAL)
    reader = READERS[name]
    _speed_up_guard()
    reader.make(folder)
    originals = {file: (folder / file).read_bytes() for file in reader.files}
    expected = {file: fingerprint(_original(reader, folder, file)) for file in reader.files}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    state[1] = state[3] = time.time()
    parent = os.getppid()
    for i in range(*bounds):
        if os.getppid() != parent:
            break  # nobody waits for what is found
        file, content = input_number(i, name, seed, originals)
        path = folder / file
        state[1], state[0], state[4] = time.time(), i, reader.files.index(file)
        try:
            path.write_bytes(content)
            found = fingerprint(reader.read(folder, path))
            state[2] += 1
            if reader.verifies and found != expected[file]:
                findings.put((i, "silent", "the content differs from the original's", file, content))
        except NammError:
            pass
        except BaseException:
            findings.put((i, "foreign", traceback.format_exc(), file, content))
        path.write_bytes(originals[file])
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        if grown * 1024 > GROWTH:
            findings.put((i, "memory", f"grew by {grown / 2**20:.1f} GiB", file, content))
            state[0] = i + 1
            break
        state[0] = i + 1
    findings.close()
    findings.join_thread()


def _original(reader: Reader, folder: Path, file: str) -> Any:
    """What is read before anything is mutated; a few of the valid files are complete enough to be refused late."""
    from namm.errors import NammError

    try:
        return reader.read(folder, folder / file)
    except NammError:
        return None


def _speed_up_guard(put: Callable[..., None] = setattr) -> None:
    import namm.hdf5

    put(namm.hdf5, "SECONDS", GUARD)


def input_number(i: int, name: str, seed: int, originals: Mapping[str, bytes]) -> tuple[str, bytes]:
    """Which file is mutated in input i, and into what."""
    rng = random.Random(f"{seed} {name} {i}")
    file = rng.choice(list(originals))
    return file, mutated(originals[file], list(originals.values()), rng)


def fingerprint(value: Any) -> str:
    """A hash of whatever a reader returns; all of it is looked at."""
    digest = hashlib.sha256()
    for part in _parts(value):
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if hasattr(value, "numpy"):
        value = value.numpy()
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):
        yield f"{value.dtype} {value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield str(key).encode(errors="replace")
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _parts(each)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _parts(vars(value) if hasattr(value, "__dict__") else repr(value))
    else:
        yield repr(value).encode(errors="replace")


# The campaigns


@dataclass
class Progress:
    """How far one reader has come; kept as JSON."""

    seed: int
    done: int = 0
    read: int = 0
    seconds: float = 0.0
    findings: list[list[Any]] = field(default_factory=list)


class Campaign:
    """One reader, its progress and its process."""

    def __init__(self, name: str, options: Options) -> None:
        self.name, self.options = name, options
        self.file = options.out / f"{name}.json"
        self.progress = Progress(options.seed)
        if self.file.exists():
            before = Progress(**json.loads(self.file.read_text()))
            if before.seed == options.seed:
                self.progress = before
        self.context = multiprocessing.get_context("spawn")
        self.folder: Path | None = None
        self.process: Any = None
        self.saved = time.time()

    def start(self) -> None:
        """Start a process where the last one ended."""
        home = IN_MEMORY if IN_MEMORY.is_dir() else None
        self.folder = Path(tempfile.mkdtemp(prefix=f"namm-fuzz-{self.name}-", dir=home))
        self.state = self.context.Array("d", [self.progress.done, time.time(), 0, 0, 0], lock=False)
        self.findings = self.context.Queue()
        bounds = (self.progress.done, self.options.inputs)
        arguments = (self.name, self.options.seed, bounds, self.folder, self.state, self.findings)
        self.process = self.context.Process(target=worker, args=arguments, daemon=False)
        self.process.start()
        self.before, self.read_before = self.progress.seconds, self.progress.read

    def is_done(self) -> bool:
        """Look after the process; whether all inputs were tried."""
        if self.process is None:
            if self.progress.done >= self.options.inputs:
                return True
            self.start()
        alive = self.process.is_alive()
        ready = bool(self.state[3])
        self._collect()
        at_work = alive and self.progress.done < self.options.inputs
        if at_work and time.time() - self.state[1] > (SECONDS if ready else START) and self._is_stuck():
            self._end("hang", f"longer than {SECONDS:g} s")
        elif not alive:
            code = self.process.exitcode
            if not ready:
                raise RuntimeError(f"the process of {self.name} did not start: it ended with {code}")
            self._end("crash" if code != 0 else "", f"the process ended with {code}")
        elif time.time() - self.saved > SAVE_EVERY:
            self._save()
        return self.process is None and self.progress.done >= self.options.inputs

    def _is_stuck(self) -> bool:
        """Whether the same input is still at work a moment later: the clock may have been read between two."""
        at_work = self.state[0]
        time.sleep(0.2)
        return bool(self.state[0] == at_work and self.process.is_alive())

    def _collect(self) -> None:
        while not self.findings.empty():
            self._keep(*self.findings.get())
        self.progress.done = int(self.state[0])
        self.progress.read = self.read_before + int(self.state[2])
        if self.state[3]:
            now = time.time() if self.progress.done < self.options.inputs else self.state[1]
            self.progress.seconds = self.before + now - self.state[3]

    def _keep(self, i: int, kind: str, what: str, file: str, content: bytes) -> None:
        """Keep a finding, its input and what went wrong."""
        self.progress.findings.append([i, kind, what.strip().splitlines()[-1][:200]])
        home = self.options.out / self.name
        home.mkdir(parents=True, exist_ok=True)
        (home / f"{i}.txt").write_text(f"{kind}\n{what}\n", errors="replace")
        (home / f"{i}-{file.replace('/', '-')}").write_bytes(content)

    def _end(self, kind: str, what: str) -> None:
        """End the process, and go on after the input that it was at where that ended it."""
        self.process.kill()
        self.process.join()
        time.sleep(0.05)
        self._collect()
        assert self.folder is not None
        if kind:
            file = READERS[self.name].files[int(self.state[4])]
            self._keep(self.progress.done, kind, what, file, (self.folder / file).read_bytes())
            self.progress.done += 1
        shutil.rmtree(self.folder, ignore_errors=True)
        self.process = None
        self._save()

    def stop(self) -> None:
        """End the process and keep what it has done."""
        if self.process is not None:
            self._end("", "")

    def _save(self) -> None:
        from namm.files import write_json

        write_json(self.file, asdict(self.progress))
        self.saved = time.time()


def fuzz(options: Options) -> list[Campaign]:
    """Try all readers that were asked for, some at a time."""
    waiting = [Campaign(name, options) for name in options.only or READERS]
    everything, active = list(waiting), list[Campaign]()
    try:
        while waiting or active:
            while waiting and len(active) < options.workers:
                active.append(waiting.pop(0))
            for campaign in [each for each in active if each.is_done()]:
                active.remove(campaign)
                print(line(campaign), flush=True)
            time.sleep(0.02)
    finally:
        for campaign in active:
            campaign.stop()
    return everything


def line(campaign: Campaign) -> str:
    """A row of the table."""
    p = campaign.progress
    speed = p.done / p.seconds if p.seconds else math.nan
    row = f"{campaign.name:<12}{p.done:>10}{p.read:>10}{speed:>10.0f}{len(p.findings):>10}"
    return "\n".join([row, *(f"    input {i}: {kind}, {what}" for i, kind, what in p.findings[:8])])


def main(arguments: list[str] | None = None) -> int:
    options = tyro.cli(Options, description=__doc__, args=arguments)
    if unknown := set(options.only) - READERS.keys():
        sys.exit(f"there is no reader {', '.join(unknown)}; there are {', '.join(READERS)}.")
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"{'reader':<12}{'inputs':>10}{'readable':>10}{'inputs/s':>10}{'findings':>10}", flush=True)
    found = sum(len(campaign.progress.findings) for campaign in fuzz(options))
    print(f"{found} findings")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
