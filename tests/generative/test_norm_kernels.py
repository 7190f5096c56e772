"""The kernels of group norm by triton's interpreter, which needs no GPU; in a process of their own, which it alters."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "norms.py"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed here")
def test_kernels_agree_with_torch_in_float64(tmp_path):
    file = tmp_path / "norms.json"
    command = [sys.executable, str(SCRIPT), "--json", str(file)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 0, done.stderr
    assert 0 < json.loads(file.read_text())["difference"] < 1e-5
