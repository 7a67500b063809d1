"""Writes constraints.txt: the newest versions that pyproject.toml allows, transitively.

python3.12 .ci/lock.py

Run it on Linux, x86-64. It resolves in an environment of its own; .venv stays as it is.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from environment import ROOT, TEXT, requirements

HEADER = """\
# Every package at one version, for `pip install --constraint`: pins what is asked for and installs
# nothing by itself, so the CUDA wheels at the end stay away from machines without a GPU.
# Written by .ci/lock.py.
"""


def main() -> None:
    """Resolves the layers afresh and writes down the outcome."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [Path(folder) / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", *requirements("dev", "cpu")], check=True)
        subprocess.run([*pip, "install", "--quiet", "--no-deps", TEXT], check=True)
        pins = _output(*pip, "freeze").splitlines()
        dry_run = ["install", "--quiet", "--dry-run", "--report", "-"]
        report = json.loads(_output(*pip, *dry_run, *requirements("dev", "gpu")))
    cuda = [f"{p['metadata']['name']}=={p['metadata']['version']}" for p in report["install"]]
    pins = [pin for pin in pins if re.fullmatch(r"[\w.-]+==[\w.!+-]+", pin)]
    (ROOT / "constraints.txt").write_text(HEADER + "\n".join([*pins, *sorted(cuda)]) + "\n")


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
