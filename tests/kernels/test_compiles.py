"""Every kernel compiles for every machine of the table, and its assembly holds what it is for."""

import importlib
import pkgutil
import re
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import triton

import triton_kernels
from adahop_jax import OperandSpec
from adahop_jax.reference.operations import Wanted
from tests.kernels.launches import Recorder
from triton_kernels import _launch
from triton_kernels.machines import MACHINES
from triton_kernels.operations import Backend

PATHS = [(name, path) for name, machine in MACHINES.items() for path in machine.paths]
by_path = pytest.mark.parametrize("name, path", PATHS, ids=[f"{n}-{p}" for n, p in PATHS])

IHT = OperandSpec(hadamard=32)
PLAIN = OperandSpec()
IHT6 = OperandSpec(hadamard=32, format="mxfp6")
STOCHASTIC = OperandSpec(
    hadamard=32, rounding="stochastic", scale_rule="ceil", signs="random", pre_scale=0.75
)
FLOOR = OperandSpec(scale_rule="floor")

SHARED_MEMORY = {  # bytes that a program may have, on the least of a row's architectures
    "9.0": 232448,
    "10.0": 232448,
    "8.9": 101376,
    "12.0": 101376,
    "8.0": 101376,  # as 8.6; 8.0 itself has 166912
    "gfx950": 163840,
    "gfx942": 65536,
}


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(_launch, "launch", recorder)
    return recorder


def _shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


SEED = _shape(2, dtype=jnp.uint32)


def _product(backend, recorder, spec, dtype, *shapes):
    """Launches of a product alone, of operands quantized beforehand."""
    sides = [
        jax.eval_shape(lambda x: backend.operand(x, axis=1, spec=spec)[0], shape)
        for shape in shapes
    ]
    return recorder.record(
        lambda a, b: backend.matmul(a, b, scale=1.0, dtype=jnp.dtype(dtype)), *sides
    )


def _everything(backend, recorder):
    """Launches of all operations: formats, dtypes, directions, rounding, sizes of every class."""
    found = {}

    def note(function, *shapes):
        found.update(dict.fromkeys(recorder.record(function, *shapes)))

    for axis in (0, 1):
        for spec, dtype in ((IHT, jnp.bfloat16), (FLOOR, jnp.float32), (IHT6, jnp.float16)):
            x = _shape(224, 160, dtype=dtype)
            note(lambda x, a=axis, s=spec: backend.operand(x, axis=a, spec=s, norms=True), x)
            note(lambda x, a=axis, s=spec: backend.residual(x, axis=a, spec=s, norms=True), x)
        note(
            lambda x, seed, a=axis: backend.operand(
                x, axis=a, spec=STOCHASTIC, seed=seed, sign_seed=seed
            ),
            _shape(224, 160),
            SEED,
        )
        note(lambda x, a=axis: backend.operand(x, axis=a, spec=IHT), _shape(99, 101))
    wanted = Wanted(True, 0, IHT, norms=True), Wanted(False, 1, IHT6)
    note(lambda x: backend.views(x, *wanted), _shape(128, 192))
    note(lambda x: backend.operand(x, axis=1, spec=PLAIN), _shape(3, 40000))  # two passes
    for spec, shape in ((IHT, (96, 224)), (IHT6, (96, 224)), (IHT, (3, 40000))):
        codes, scales, _ = jax.eval_shape(
            lambda x, s=spec: backend.residual(x, axis=1, spec=s), _shape(*shape)
        )
        note(lambda c, s, spec=spec: backend.load(c, s, spec=spec), codes, scales)
    for spec, (m, n, k), dtype in (
        (IHT, (4096, 4096, 512), "bfloat16"),  # large tiles
        (IHT, (2048, 2048, 16384), "float32"),  # a sum that is broken off
        (PLAIN, (512, 256, 16384), "bfloat16"),  # small tiles, split along K
        (PLAIN, (500, 256, 16384), "bfloat16"),  # likewise, in shares that descriptors would mix
        (IHT6, (96, 40, 64), "float16"),
        (IHT, (33, 41, 96), "bfloat16"),  # rows that no descriptor takes
    ):
        shapes = _shape(m, k), _shape(n, k)
        found.update(dict.fromkeys(_product(backend, recorder, spec, dtype, *shapes)))
    for k in (1, 5):
        note(lambda norms, k=k: backend.largest(norms, k), _shape(3000, dtype=jnp.float32))
    y = _shape(96, 64)
    note(
        lambda a, b, index, values: backend.matmul(
            backend.operand(a, axis=1, spec=IHT)[0],
            backend.operand(b, axis=1, spec=IHT)[0],
            scale=1.0,
            dtype=jnp.dtype(jnp.bfloat16),
            columns=(index, values),
        ),
        y,
        y,
        _shape(3, dtype=jnp.int32),
        _shape(96, 3, dtype=jnp.float32),
    )
    return list(found)


def _kernels():
    """Every kernel that a module of the package defines."""
    names = (module.name for module in pkgutil.iter_modules(triton_kernels.__path__))
    modules = [importlib.import_module(f"triton_kernels.{name}") for name in names]
    return {
        (module.__name__, name)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction) and name.endswith("_kernel")
    }


def test_no_kernel_is_left_out(recorder):
    launches = [
        launch
        for name, path in PATHS
        for launch in _everything(Backend(MACHINES[name], path, processors=132), recorder)
    ]
    found = {(launch.kernel.fn.__module__, launch.kernel.fn.__name__) for launch in launches}
    assert found == _kernels()


@by_path
def test_every_kernel_compiles(name, path, recorder):
    machine = MACHINES[name]
    launches = _everything(Backend(machine, path, processors=132), recorder)
    assert len(launches) > 10
    for launch in launches:
        compiled = launch.compile(machine.target)
        assert compiled.metadata.shared <= SHARED_MEMORY[name], launch.name
        # CUDA graphs take no kernel that needs memory of its own.
        assert not getattr(compiled.metadata, "global_scratch_size", 0), launch.name


def _assembly(recorder, name, path, spec, dtype="bfloat16", k=512):
    """The product's own assembly on a machine."""
    machine = MACHINES[name]
    backend = Backend(machine, path, processors=132)
    (launch,) = _product(backend, recorder, spec, dtype, _shape(4096, k), _shape(4096, k))
    assert launch.name in ("matmul", "native")
    compiled = launch.compile(machine.target)
    return compiled, compiled.asm.get("ptx") or compiled.asm["amdgcn"]


@pytest.mark.parametrize("k", [512, 16384])
@pytest.mark.parametrize("spec, kind", [(IHT, "e5m2.e5m2"), (IHT6, "e4m3.e4m3")], ids=str)
def test_hopper_product_is_fp8_wgmma_fed_by_tma(recorder, spec, kind, k):
    compiled, ptx = _assembly(recorder, "9.0", "fp8", spec, k=k)
    assert re.search(rf"wgmma\.mma_async[\w.]*\.f32\.{kind}", ptx)
    assert "cp.async.bulk.tensor" in ptx
    # Matrix instructions follow each other; waiting for each, as ptxas makes them if it cannot
    # follow the accumulator, costs a quarter of the speed.
    sequence = re.findall(r"(QGMMA|WARPGROUP\.DEPBAR)", _sass(compiled))
    assert sequence[:4] == ["QGMMA"] * 4


def _sass(compiled):
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(compiled.asm["cubin"])
        command = [str(tool), "-c", str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("stored", [False, True])
def test_hopper_rotates_by_wgmma_and_keeps_the_sums_in_registers(recorder, stored):
    """What a thread has is what it stores: only the matrix goes through shared memory."""
    backend = Backend(MACHINES["9.0"], "fp8", processors=132)
    wanted = Wanted(stored, 0, IHT), Wanted(False, 1, IHT)
    launches = recorder.record(lambda x: backend.views(x, *wanted), _shape(8192, 8192))
    (tiles,) = [launch for launch in launches if launch.name == "quantize_tiles"]
    assembly = tiles.compile(MACHINES["9.0"].target).asm["ptx"]
    assert len(re.findall(r"wgmma.mma_async\S*m64n64k16.f32.bf16.bf16", assembly)) == 8
    assert "cp.async.bulk.tensor" in assembly
    assert "ld.shared" not in assembly


@pytest.mark.parametrize(
    "name, spec, pattern",
    [
        ("10.0", IHT, r"tcgen05\.mma\S*kind::mxf4\.block_scale"),
        ("10.0", IHT6, r"tcgen05\.mma\S*kind::mxf8f6f4\.block_scale"),
        ("gfx950", IHT, r"v_mfma_scale_f32_\w*f8f6f4"),
        ("gfx950", IHT6, r"v_mfma_scale_f32_\w*f8f6f4"),
    ],
    ids=["blackwell-mxfp4", "blackwell-mxfp6", "cdna4-mxfp4", "cdna4-mxfp6"],
)
def test_native_product_uses_the_block_scaled_instruction(recorder, name, spec, pattern):
    assert re.search(pattern, _assembly(recorder, name, "native", spec)[1])


@pytest.mark.parametrize("name", ["8.9", "12.0"])
def test_product_without_wgmma_is_fp8(recorder, name):
    assert re.search(r"mma\.sync\S*e5m2\.e5m2", _assembly(recorder, name, "fp8", IHT)[1])
