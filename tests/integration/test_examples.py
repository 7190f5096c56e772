"""Every example runs and shows what it says."""

import ast
import runpy
from pathlib import Path

import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_own_constraint_is_short_and_lowers_the_distance():
    torch.manual_seed(0)
    direct, mirrored = runpy.run_path(str(EXAMPLES / "own_constraint.py"))["main"]()
    assert mirrored < direct / 2


def test_own_constraint_fits_in_25_lines_of_code():
    tree = ast.parse((EXAMPLES / "own_constraint.py").read_text())
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, node.end_lineno + 1))
    lines = (EXAMPLES / "own_constraint.py").read_text().splitlines()
    code = [n for n, line in enumerate(lines, 1) if line.strip() and n not in docstrings]
    assert len(code) <= 25
