"""Runs `interpreted_cases.py` under Triton's interpreter, which has to be on before the import."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("interpreted_cases.py")
TREE = ast.parse(CASES.read_text())
TESTS = [
    node.name
    for node in TREE.body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


def test_every_case_is_run():
    assert len(TESTS) > 10 and not any(isinstance(node, ast.ClassDef) for node in TREE.body)


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
    # All of them: none skipped, deselected or expected to fail.
    last = done.stdout.splitlines()[-1]
    assert re.search(r"^(=+ )?[1-9]\d* passed in ", last), done.stdout
