"""Who may import whom, and what may not stand in the source at all."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = {"adahop_jax": 400, "train": 400, "triton_kernels": 600, "pallas_kernels": 600}

# The lowest layer first; a module imports from its own row and from earlier ones. The reference
# takes plain arrays: it sees neither plans nor MXArray.
LAYERS = (
    {"_formats", "_shapes", "_devices"},
    {"reference"},
    {"_view"},
    {"_kernels"},
    {"_plan", "_plan_json", "_strategy", "_patterns", "_random", "_sharding"},
    {"_dispatch"},
    {"_mxarray"},
    {"_product", "_observe"},
    {"_dense", "_matmul"},
    {"nn"},
    {"_calibrate"},
    {"_explain"},
    {"__init__"},
    {"train"},
)
RANK = {module: rank for rank, layer in enumerate(LAYERS) for module in layer}

# Of the library, what kernels may import: formats, the operations whose contract they fulfil, and
# what a backend made of kernels is.
BELOW_KERNELS = {"_formats", "reference", "_view", "_kernels"}


def _files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def _everywhere() -> list[Path]:
    folders = (path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != ".")
    return _files(*(set(folders) - {"build", "runs"}))


def _name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), filename=str(file))


def _imports(file: Path) -> Iterator[str]:
    """Yields the dotted name of everything `file` imports, inside functions too."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{_name(file)}:{node.lineno}: relative import; write it in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module(dotted: str) -> str | None:
    """Returns the entry of LAYERS that an imported name belongs to, None for foreign ones."""
    package, _, rest = dotted.partition(".")
    if package == "train":
        return "train"
    if package != "adahop_jax":
        return None
    part = rest.partition(".")[0]
    folder = ROOT / "adahop_jax"
    known = bool(part) and ((folder / f"{part}.py").exists() or (folder / part).is_dir())
    return part if known else "__init__"


def _own_module(file: Path) -> str:
    package, *parts = file.relative_to(ROOT).with_suffix("").parts
    return "train" if package == "train" else parts[0]


LIBRARY = _files("adahop_jax", "train")
KERNELS = _files("triton_kernels", "pallas_kernels")
by_library_file = pytest.mark.parametrize("file", LIBRARY, ids=_name)
by_kernel_file = pytest.mark.parametrize("file", KERNELS, ids=_name)
by_file = pytest.mark.parametrize("file", LIBRARY + KERNELS, ids=_name)


@by_library_file
def test_imports_point_down(file: Path) -> None:
    own = _own_module(file)
    assert own in RANK, f"{_name(file)} stands in no row of LAYERS; put it where it belongs"
    upward = [
        name
        for name in _imports(file)
        if (module := _module(name)) is not None and RANK.get(module, 0) > RANK[own]
    ]
    assert not upward, f"{_name(file)} imports from a layer that is built on it: {upward}"


@by_kernel_file
def test_kernels_see_formats_and_reference_only(file: Path) -> None:
    package = file.relative_to(ROOT).parts[0]
    own = {path.name for path in ROOT.iterdir() if path.is_dir()} - {package}
    above = [
        name
        for name in _imports(file)
        if name.partition(".")[0] in own and _module(name) not in BELOW_KERNELS
    ]
    assert not above, f"{_name(file)} imports what is built on the kernels: {above}"


@by_library_file
def test_kernels_are_named_by_the_dispatch_only(file: Path) -> None:
    """And imported there by name, when a GPU asks for them: the library does without Triton."""
    packages = {"triton_kernels", "pallas_kernels"}
    assert not {name.partition(".")[0] for name in _imports(file)} & {"triton", *packages}
    if file != ROOT / "adahop_jax" / "_dispatch.py":
        assert not any(package in file.read_text() for package in packages)


@by_file
def test_source_avoids_private_jax_and_blanket_handlers(file: Path) -> None:
    assert "jax._src" not in file.read_text()
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "Exception"
            assert "Exception" not in re.findall(r"\w+", caught), (
                f"{_name(file)}:{node.lineno} catches everything; name what can happen"
            )


@by_file
def test_file_is_short_enough_to_read(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= MAX_LINES[file.relative_to(ROOT).parts[0]]


def test_jax_triton_is_imported_in_one_place() -> None:
    importers = {
        _name(file)
        for file in _everywhere()
        for name in _imports(file)
        if name.partition(".")[0] == "jax_triton"
    }
    assert importers == {"triton_kernels/_launch.py"}


def test_import_needs_no_triton_and_leaves_the_environment_alone() -> None:
    script = (
        "import json, os, sys; before = dict(os.environ); import adahop_jax;"
        "loaded = sorted({'triton', 'jax_triton'} & set(sys.modules));"
        "now = dict(os.environ);"
        "changed = sorted(k for k in before | now if before.get(k) != now.get(k));"
        "print(json.dumps([loaded, changed]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [[], []]
