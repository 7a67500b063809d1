"""Runs the contract and Triton's own cases under Triton's interpreter.

It has to be on before the import of Triton, and so in a process of its own.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = [
    f"{file}::{node.name}"
    for file in ("test_contract.py", "triton_cases.py")
    for node in ast.parse((HERE / file).read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


# Starting a process takes ten seconds. The first test takes as long as each of the other groups.
FIRST, *REST = TESTS
GROUPS = [[FIRST], REST[::4], REST[1::4], REST[2::4] + REST[3::4]]


def test_every_case_is_run():
    assert len(TESTS) > 15 and "triton_cases.py::test_interpreter_is_on" in TESTS
    assert sorted(name for group in GROUPS for name in group) == sorted(TESTS)


@pytest.mark.parametrize("group", GROUPS, ids=range(len(GROUPS)))
def test_kernels_under_the_interpreter(group):
    options = ["-q", "-rpfE", "-p", "no:cacheprovider"]
    names = [f"{HERE}/{name}" for name in group]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *names],
        env=os.environ
        | {
            "TRITON_INTERPRET": "1",
            "JAX_PLATFORMS": "cpu",
            # What surrounds the kernels is compiled for one call.
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        },
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    # All of them: none deselected or expected to fail, and skipped only what says why.
    last = done.stdout.splitlines()[-1]
    assert re.search(r"^(=+ )?[1-9]\d* passed(, \d skipped)? in ", last), done.stdout
    passed = re.findall(r"^PASSED .*?(\w+\.py::\w+)", done.stdout, re.MULTILINE)
    assert set(passed) == set(group), done.stdout
