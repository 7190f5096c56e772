"""The kernels of g by triton's interpreter, which needs no GPU; in a process of their own, which it alters."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
CHILD = """
import torch
from icnn_kernels import icnn
from namm.maps import ICNN

torch.manual_seed(0)
for channels, layers, filters, rows, columns in ((1, 3, 16, 16, 16), (2, 2, 16, 8, 16), (1, 1, 32, 16, 24)):
    g = ICNN(channels, layers, filters)
    with torch.no_grad():
        g.hidden.uniform_(0, 0.05)
        g.output.uniform_(0, 0.05)
        g.bias.normal_(std=0.3)
    x = torch.rand(2, channels, rows, columns)
    found = icnn(g, x, tf32=False)
    true = g.double()(x.double())
    assert (true - x).abs().max() > 0.1
    assert (found - true).abs().max() < 3e-6 * true.abs().max()
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed here")
def test_kernels_agree_with_the_closed_form_in_float64():
    added = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, env=os.environ | added | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
