"""Shared fixtures: the parity files, a quiet, deterministic torch, an interpreter of kernels, a run at a tiny size."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from browser import chromium
from namm.evaluation.verdict import Watched
from namm.experiments.engine.folder import read_record, stage_digests, write_record
from namm.experiments.engine.run import run
from namm.experiments.engine.settings import ForwardSettings, NetworkSettings, SamplerSettings, VAESettings
from namm.experiments.presets import Preset, preset
from namm.report import page

MEMORY, ROOM = Path("/dev/shm"), 4 * 2**30


def pytest_configure() -> None:
    """Keep the tests' folders in memory, where there is room: thousands of small writes would wait for the disk."""
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


hypothesis.settings.register_profile("default", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("default")


@pytest.fixture
def parity() -> Callable[[str], Mapping[str, np.ndarray]]:
    """Read a file of reference numbers, or skip, saying so, where the folder is absent.

    The folder is `$NAMM_PARITY`, or `shared/parity` beside the project's root.
    """
    default = Path(__file__).resolve().parents[2] / "shared" / "parity"
    folder = Path(os.environ.get("NAMM_PARITY", default))

    def read(name: str) -> Mapping[str, np.ndarray]:
        path = folder / name
        if not path.exists():
            pytest.skip(f"reference numbers {name} are not beside the project (set NAMM_PARITY to their folder)")
        return np.load(path, allow_pickle=False)

    return read


@pytest.fixture(scope="session")
def interpreted(tmp_path_factory) -> Iterator[Callable[..., str]]:
    """Run a script with kernels on a CPU by triton's interpreter, in a process of its own: what it prints."""
    pytest.importorskip("triton", reason="triton is not installed here")
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    program = [sys.executable, str(Path(__file__).with_name("interpreter.py"))]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as interpreter:

        def run_interpreted(script: str, *arguments: str) -> str:
            folder = tmp_path_factory.mktemp("interpreted")
            print(json.dumps([script, arguments, str(folder)]), file=interpreter.stdin, flush=True)
            code = interpreter.stdout.readline()
            assert code, "the interpreter of kernels has ended"
            printed, errors = ((folder / name).read_text() for name in ("out", "err"))
            if "InterpreterError: TypeError('only 0-dimensional arrays" in errors:
                pytest.skip("the interpreter of this triton cannot count loops with this numpy")  # 3.6 with 2.4
            assert int(code) == 0, errors
            return printed

        yield run_interpreted


@pytest.fixture(autouse=True, scope="session")
def _record_of_trust(tmp_path_factory) -> Iterator[None]:
    """No test reads or writes the record of rules that the user who runs the tests trusts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NAMM_TRUST", str(tmp_path_factory.mktemp("trust") / "trusted.json"))
        patch.setenv("NAMM_TRUSTED", "")
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_preset() -> Preset:
    """Burgers' equation, so small that every stage takes a second."""
    base = preset("burgers")
    s, sampler = base.settings, SamplerSettings("dpm-solver", 4)

    def short(part):
        return replace(part, train=replace(part.train, budget="6 steps", batch_size=4))

    network = NetworkSettings(filters=8, multipliers=(1,), blocks=1, attention=(), dropout=0.0, unshuffle=2)
    f = replace(s.map.f, filters=4, blocks=1, downsamplings=1)
    settings = replace(
        s,
        data=replace(s.data, size=8, n_train=80, n_val=20, n_test=70),
        map=short(replace(s.map, g=ForwardSettings(1, 4), f=f)),
        mdm=short(replace(s.mdm, network=network)),
        samples=replace(s.samples, n=70, n_val=10, sampler=sampler),
        finetune=short(s.finetune),
        dm=short(s.dm),
        evaluate=replace(s.evaluate, n=64, subset=32, mmd_subsets=2, sampler=sampler),
        vae=short(VAESettings(4, 4)),
    )
    return replace(base, settings=settings)


@pytest.fixture(scope="session")
def unwatched() -> Callable[[], AbstractContextManager[None]]:
    """A context in which finetuning keeps its last f, however poor: another than the map's, with all its milestones."""

    @contextmanager
    def context() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Watched, "improves", lambda *_: True)
            patch.setattr(Watched, "has_collapsed", lambda *_: False)
            yield

    return context


@pytest.fixture(scope="session")
def coarse_pictures() -> Callable[[], AbstractContextManager[None]]:
    """A context in which reports have pictures that nobody looks at: drawn whole, in few pixels."""

    @contextmanager
    def context() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(page, "png", partial(page.png, dpi=20))
            yield

    return context


@pytest.fixture(scope="session")
def rewrite() -> Callable[[Path, object], None]:
    """Gives a JSON file of a stage other content, as if the stage had written that: its record knows the new digest."""

    def write(path: Path, content: object) -> None:
        path.write_text(json.dumps(content))
        write_record(path.parent, replace(read_record(path.parent), digests=stage_digests(path.parent)))

    return write


@pytest.fixture(scope="session")
def whole_run(tiny_preset, tmp_path_factory, unwatched) -> Path:
    """A run of every stage from the data to the evaluation, and of both autoencoders; to be read, or copied."""
    folder = tmp_path_factory.mktemp("whole") / "burgers"
    with unwatched():
        for last in ("evaluate", "vae"):
            run(tiny_preset, folder, until=last, log=lambda line: None, progress=False, force=True)
    return folder


@pytest.fixture
def browser() -> Iterator[Any]:
    """A headless Chromium, driven by selenium; tests of pages are skipped, saying so, where there is none."""
    with chromium() as driver:
        yield driver
