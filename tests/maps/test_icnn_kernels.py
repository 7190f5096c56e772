"""The kernels of g by triton's interpreter, which needs no GPU; in a process of their own, which it alters."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from namm.maps import ICNN

CHILD = """
import torch
from namm.maps import ICNN
from namm.maps.icnn_kernels import icnn

torch.manual_seed(0)
for channels, layers, filters, rows, columns in ((1, 3, 16, 16, 16), (2, 2, 16, 8, 16), (1, 1, 32, 16, 24)):
    g = ICNN(channels, layers, filters)
    with torch.no_grad():
        g.hidden.uniform_(0, 0.05)
        g.output.uniform_(0, 0.05)
        g.bias.normal_(std=0.3)
    x = torch.rand(2, channels, rows, columns)
    assert g.has_kernels(x)
    found = icnn(g, x, tf32=False)
    true = g.double()(x.double())
    assert (true - x).abs().max() > 0.1
    assert (found - true).abs().max() < 3e-6 * true.abs().max()
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed here")
def test_kernels_agree_with_the_closed_form_in_float64():
    added = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, env=os.environ | added)
    assert done.returncode == 0, done.stderr


def test_other_networks_and_images_have_none():
    x = torch.rand(2, 1, 16, 16)
    assert ICNN(filters=16).has_kernels(x)
    assert not ICNN(filters=24).has_kernels(x)
    assert not ICNN(filters=16, kernel_size=5).has_kernels(x)
    assert not ICNN(filters=16).has_kernels(x[..., :15])
    assert not ICNN(filters=16).has_kernels(x.double())
    assert not ICNN(filters=16).has_kernels(x[:1].expand(2**17, 1, 16, 16))
