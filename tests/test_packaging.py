"""The wheel's contents, the pins, and environments that an install left half made."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_wheel_lists_every_package_of_the_library_and_its_kernels() -> None:
    tops = ("adahop_jax", "triton_kernels", "pallas_kernels")
    folders = {file.parent for top in tops for file in (ROOT / top).rglob("*.py")}
    found = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_constraints_pin_everything_installed_at_its_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    split = (line.split("==") for line in lines if not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in split}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = PROJECT["project"]["dependencies"] + [
        requirement for extra in extras if extra != "gpu" for requirement in extras[extra]
    ]
    installed = {}
    queue = [Requirement(text) for text in wanted]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        extras_asked = requirement.extras or {""}
        marker = requirement.marker
        if name in installed or (marker and not marker.evaluate({"extra": ""})):
            continue
        installed[name] = importlib.metadata.version(name)
        for text in importlib.metadata.requires(name) or []:
            child = Requirement(text)
            if not child.marker or any(child.marker.evaluate({"extra": e}) for e in extras_asked):
                child.marker = None
                queue.append(child)
    assert {name: pins.get(name) for name in installed} == installed


def test_cuda_is_pinned_and_asked_for_by_the_gpu_extra_only() -> None:
    assert re.search(r"^jax-cuda13-pjrt==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    extras = PROJECT["project"]["optional-dependencies"]
    assert [name for name in extras if "cuda" in " ".join(extras[name])] == ["gpu"]
    assert "cuda" not in " ".join(PROJECT["project"]["dependencies"])


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files that set up an environment."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/environment.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_failed_install_leaves_no_stamp_and_the_next_one_starts_afresh(checkout: Path) -> None:
    offline = {
        **os.environ,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "",
        "PIP_CONFIG_FILE": os.devnull,
    }
    command = [sys.executable, ".ci/environment.py", "demo", "cpu"]
    for _ in range(2):
        done = subprocess.run(command, cwd=checkout, env=offline, capture_output=True, text=True)
        assert done.returncode == 1
        assert "run make again to start afresh" in done.stderr
        assert "making a new environment" in done.stdout
        assert (checkout / ".venv" / "unfinished").exists()
        assert not (checkout / ".venv" / "demo-cpu").exists()
        assert not (checkout / ".venv" / "leftover").exists()
        (checkout / ".venv" / "leftover").touch()


def test_make_without_python_312_says_so(checkout: Path) -> None:
    programs = checkout / "programs"
    programs.mkdir()
    for name in ("python3.12", "python3"):
        (programs / name).write_text("#!/bin/sh\nexit 1\n")
        (programs / name).chmod(0o755)
    path = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(["make", "demo"], cwd=checkout, env=path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "found no Python 3.12" in done.stderr
    assert not (checkout / ".venv").exists()
