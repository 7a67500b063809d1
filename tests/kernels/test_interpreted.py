"""Runs `interpreted_cases.py` under Triton's interpreter, which has to be on before the import."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("interpreted_cases.py")
TESTS = [
    node.name
    for node in ast.parse(CASES.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.mark.parametrize("name", TESTS)
def test_kernels_under_the_interpreter(name):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{CASES}::{name}"],
        env=os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"},
        cwd=CASES.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout, done.stdout
