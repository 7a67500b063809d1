"""Which backend and path a device gets, and what is said where one that was named cannot run."""

import dataclasses
import logging
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from adahop_jax import Dense, OperandSpec, Plan, _dispatch
from adahop_jax._view import CHUNK
from adahop_jax.reference import operations as reference
from pallas_kernels import matmul as pallas_matmul
from triton_kernels import _launch
from triton_kernels.machines import MACHINES, PATHS, machine_of, path_for

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Device:
    """As much of a `jax.Device` as is asked for its kind."""

    compute_capability: str
    platform: str = "gpu"
    core_count: int = 7

    def __str__(self) -> str:
        return f"{self.platform}:0"


TURING = Device("7.5")
CPU = Device("", platform="cpu")
X = jax.ShapeDtypeStruct((96, 160), jnp.bfloat16)


@pytest.fixture(autouse=True)
def _nothing_remembered():
    for cached in (_dispatch._load, _dispatch._log_once):
        cached.cache_clear()
    yield
    for cached in (_dispatch._load, _dispatch._log_once):
        cached.cache_clear()


@pytest.fixture
def on(monkeypatch):
    """Makes a device JAX's default one."""
    return lambda device: monkeypatch.setattr(_dispatch, "default_device", lambda: device)


@pytest.mark.parametrize(
    "found, row, path",
    [
        ("9.0", "9.0", "fp8"),
        ("10.0", "10.0", "native"),
        ("10.3", "10.0", "native"),
        ("8.9", "8.9", "fp8"),
        ("12.0", "12.0", "fp8"),
        ("12.1", "8.0", "bf16"),
        ("8.0", "8.0", "bf16"),
        ("8.6", "8.0", "bf16"),
        ("8.7", "8.0", "bf16"),
        ("gfx950", "gfx950", "native"),
        ("gfx950:sramecc+:xnack-", "gfx950", "native"),
        ("gfx942:sramecc+:xnack-", "gfx942", "bf16"),
        ("gfx90a:sramecc+:xnack-", "gfx942", "bf16"),
    ],
)
def test_a_gpu_gets_its_row_and_its_best_path(on, found, row, path):
    device = Device(found)
    assert machine_of(device) is MACHINES[row]
    assert path_for(device, None) == (path, "")
    on(device)
    for backend in ("triton", f"triton:{path}"):
        assert _dispatch.resolve(backend)[0] == f"triton:{path}"
    best = "triton+pallas" if row == "9.0" else "triton"
    assert _dispatch.resolve(None)[0] == f"{best}:{path}"


@pytest.mark.parametrize("found", ["7.5", "11.0", "9", "9.00", "8.1", "gfx1100", "gfx9500", ""])
def test_other_gpus_have_no_row(found):
    device = Device(found)
    assert machine_of(device) is None
    path, refusal = path_for(device, None)
    assert path == "" and f"architecture is {found}, " in refusal
    for machine in MACHINES.values():
        for name in (machine.name, *machine.runs):
            assert name in refusal


def test_a_device_that_does_not_say_its_architecture_has_no_row():
    path, refusal = path_for(object(), None)
    assert path == "" and "unknown" in refusal


@pytest.mark.parametrize("name", MACHINES)
def test_a_row_is_sound(name):
    machine = MACHINES[name]
    names = [n for m in MACHINES.values() for n in (m.name, *m.runs)]
    assert len(set(names)) == len(names)
    assert machine.path == machine.paths[0]
    assert list(machine.paths) == [path for path in PATHS if path in machine.paths]
    assert "bf16" in machine.paths
    assert bool(machine.measured) == (machine.rates is not None)
    for tile in (machine.large, machine.small):
        for size in (tile.m, tile.n, tile.k, tile.warps):
            assert size & (size - 1) == 0
        # Blocks of 32 do not straddle steps, and sums are broken off between steps.
        assert tile.k % 32 == 0 and all(chunk % tile.k == 0 for chunk in CHUNK.values())
        assert tile.n >= machine.small.n and tile.m >= machine.small.m


def test_every_path_has_a_backend_of_its_name():
    paths = (f"triton:{path}" for path in PATHS)
    assert _dispatch.BACKENDS == ("triton+pallas", "triton", *paths, "pallas", "reference")


@pytest.mark.parametrize(
    "device, backend, reason",
    [
        (Device("9.0"), "triton:native", r"architecture 9\.0 has no path 'native', only .*fp8"),
        (Device("8.6"), "triton:fp8", r"architecture 8\.0 has no path 'fp8', only .*bf16"),
        (Device("10.3"), "triton:fp8", r"architecture 10\.0 has no path 'fp8', only .*native"),
        (Device("gfx950:xnack-"), "triton:fp8", "architecture gfx950 has no path 'fp8'"),
        (Device("8.9"), "triton+pallas", r"Pallas was not measured on architecture 8\.9"),
        (Device("10.0"), "pallas", r"architecture is 10\.0, and Pallas' kernels are for 9\.0"),
        (CPU, "pallas", "needs a GPU, and JAX's default device is a cpu"),
        (TURING, "triton", r"architecture is 7\.5, and the kernels serve .*9\.0"),
        (TURING, "triton:bf16", r"architecture is 7\.5, and the kernels serve .*9\.0"),
        (CPU, "triton", "needs a GPU, and JAX's default device is a cpu"),
        (CPU, "triton:fp8", "needs a GPU, and JAX's default device is a cpu"),
        (Device("", platform="tpu"), "triton", "needs a GPU, and JAX's default device is a tpu"),
    ],
    ids=lambda value: value.compute_capability if isinstance(value, Device) else None,
)
def test_a_backend_asked_for_by_name_runs_or_says_why_not(on, device, backend, reason):
    on(device)
    said = rf"'{re.escape(backend)}' cannot run on .*: .*{reason}"
    with pytest.raises(NotImplementedError, match=said):
        _dispatch.resolve(backend)


@pytest.mark.parametrize("backend", ["pallas:fp8", "triton:fp4", "Triton", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(on, backend):
    on(Device("9.0"))
    with pytest.raises(NotImplementedError, match=f"{backend!r} is unknown; .*'triton:native'"):
        _dispatch.resolve(backend)


@pytest.mark.parametrize("device, warnings", [(CPU, 0), (TURING, 1)])
def test_none_falls_to_the_reference_and_logs_it_once(on, caplog, device, warnings):
    on(device)
    with caplog.at_level(logging.INFO, logger="adahop_jax"):
        for _ in range(2):
            assert _dispatch.resolve(None) == ("reference", reference)
    chosen, *warned = caplog.records
    assert "'reference'" in chosen.getMessage() and chosen.levelno == logging.INFO
    # A GPU that has to do without kernels is worth a warning; a CPU has none to do without.
    assert len(warned) == warnings
    assert all("architecture is 7.5" in record.getMessage() for record in warned)


@pytest.mark.parametrize("device", [CPU, TURING, Device("9.0")], ids=str)
def test_the_reference_runs_wherever_it_is_asked_for(on, device):
    on(device)
    assert _dispatch.resolve("reference") == ("reference", reference)


@pytest.mark.parametrize("name", ["triton_kernels", "pallas_kernels"])
def test_a_strange_package_of_the_kernels_name_is_left_alone(on, monkeypatch, name):
    on(Device("9.0"))
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert _dispatch.resolve(None)[0] == "reference"
    with pytest.raises(NotImplementedError, match=f"`{name}` is another package"):
        _dispatch.resolve("triton")


@pytest.mark.parametrize("missing", ["triton", "jax_triton"])
@pytest.mark.parametrize("device, left", [(Device("9.0"), "pallas:fp8"), (TURING, "reference")])
def test_without_triton_a_gpu_takes_what_else_can_run(on, monkeypatch, missing, device, left):
    on(device)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("triton_kernels", missing):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert _dispatch.resolve(None)[0] == left
    with pytest.raises(NotImplementedError, match=f"{missing}.*; install triton and jax-triton"):
        _dispatch.resolve("triton")


def test_the_product_occupies_as_many_programs_as_the_gpu_has_processors(on, monkeypatch):
    grids = {}

    def launch(kernel, *arrays, out, grid, **constants):
        grids[kernel.fn.__module__] = grid
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out)

    monkeypatch.setattr(_launch, "launch", launch)
    on(Device("9.0", core_count=7))
    operations = _dispatch.resolve("triton")[1]
    x = jax.ShapeDtypeStruct((4096, 64), jnp.bfloat16)

    def product(x):
        side, _ = operations.operand(x, axis=1, spec=OperandSpec())
        return operations.matmul(side, side, scale=1.0, dtype=jnp.dtype(jnp.bfloat16))

    jax.eval_shape(product, x)
    assert grids["triton_kernels.matmul"] == 7


@pytest.mark.parametrize(
    "shape, module",
    [
        ((4096, 128), "pallas_kernels"),
        ((4000, 160), "pallas_kernels"),  # no whole tiles
        ((4096, 4224), "triton_kernels"),  # longer sums than pay
        ((4096, 2176), "triton_kernels"),  # longer than the FP8 units may sum
        ((256, 128), "triton_kernels"),  # too few for all processors
    ],
)
def test_large_products_of_short_sums_are_pallas(on, monkeypatch, shape, module):
    called = []

    def launch(kernel, *arrays, out, **constants):
        called.append(kernel.fn.__module__)
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out)

    def multiply(a, b, *, dtype, **options):
        called.append("pallas_kernels.matmul")
        return jnp.zeros((a.data.shape[0], b.data.shape[0]), dtype)

    monkeypatch.setattr(_launch, "launch", launch)
    monkeypatch.setattr(pallas_matmul, "matmul", multiply)
    on(Device("9.0", core_count=132))
    operations = _dispatch.resolve(None)[1]

    def product(x):
        side, _ = operations.operand(x, axis=1, spec=OperandSpec())
        return operations.matmul(side, side, scale=1.0, dtype=jnp.dtype(jnp.bfloat16))

    jax.eval_shape(product, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    assert called[-1] == f"{module}.matmul"


def test_the_library_runs_where_triton_cannot_be_imported():
    script = (
        "import sys; sys.modules.update({'triton': None, 'jax_triton': None})\n"
        "import adahop_jax, jax.numpy as jnp\n"
        "q = adahop_jax.quantize(jnp.ones((4, 32), jnp.float32), axis=1)\n"
        "print(q.codes.shape, 'triton_kernels' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "(4, 16) False\n", done.stderr


@pytest.mark.parametrize("backend", ["triton", "pallas"])
def test_products_close_over_no_arrays(on, backend):
    """What they close over, `scan` keeps for the backward pass and the compiler in its text."""
    on(Device("9.0"))
    layer = Dense(128, plan=Plan.uniform("iht"), dtype=jnp.bfloat16, backend=backend)
    variables = jax.eval_shape(layer.clone(plan=Plan.full()).init, jax.random.key(0), X)

    def loss(variables, x):
        return jnp.sum(layer.apply(variables, x).astype(jnp.float32))

    assert jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(variables, X).consts == []
