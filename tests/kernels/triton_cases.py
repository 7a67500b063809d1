"""What Triton's kernels do beyond the contract, run by Triton's interpreter on the CPU.

`test_interpreted.py` runs this file in a process of its own, where TRITON_INTERPRET is set.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import triton
from triton.runtime import interpreter as triton_interpreter

from adahop_jax import OperandSpec
from adahop_jax.reference import operations as reference
from tests import oracle
from tests.kernels import interpreter
from tests.kernels.test_contract import SEED, SPECS, by_axis, check_quantizing, random, special
from triton_kernels import _launch, quantize_columns, quantize_rows, quantize_tiles
from triton_kernels.operations import Backend

# Of numbers out of range, which the kernels look for afterwards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    interpreter.install(monkeypatch)


def _ops(path="fp8"):
    return Backend(interpreter.MACHINE, path, processors=3)


TILES = {  # that tensor cores rotate
    "iht": SPECS["iht"],
    "h16-signs-scaled": OperandSpec(hadamard=16, signs="random", pre_scale=0.75),
    "floor": OperandSpec(hadamard=32, scale_rule="floor"),
    "mxfp6": OperandSpec(hadamard=32, format="mxfp6"),
}


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("shape, dtype", [((64, 128), "bfloat16"), ((70, 136), "float16")])
def test_both_directions_in_one_read_equal_the_reference(
    kernels, rng, monkeypatch, shape, dtype, name
):
    for module in (quantize_rows, quantize_columns):
        monkeypatch.setattr(module, "_kernel", None)
    spec, x = TILES[name], random(rng, shape, dtype)
    # Rows of MXFP6 are folded by the kernel that need not guess.
    stored = spec.format == "mxfp6"
    wanted = [
        reference.Wanted(True, 0, spec, None, jnp.asarray(SEED), True),
        reference.Wanted(stored, 1, spec, None, jnp.asarray(SEED)),
    ]
    (codes, scales, norms), last = _ops().views(x, *wanted)
    (want, want_scales, want_norms), want_last = reference.views(x, *wanted)
    np.testing.assert_array_equal(codes, want)
    np.testing.assert_array_equal(scales, want_scales)
    np.testing.assert_allclose(norms, want_norms, rtol=1e-6)
    assert last[-1] is None
    if stored:
        np.testing.assert_array_equal(last[0], want_last[0])
        np.testing.assert_array_equal(last[1], want_last[1])
    else:
        # Numbers of ordinary size: nothing is below the window.
        np.testing.assert_array_equal(kernels.values(last[0]), want_last[0].astype(jnp.float32))


def _masked(x):
    """The first 8 tokens of each of 8 sequences are masked."""
    x = x.reshape(8, -1, x.shape[1]).copy()
    x[:, :8] = 0
    return x.reshape(-1, x.shape[2])


def _scaled(x, rows, columns, factor):
    x = x.copy()
    x[rows, columns] *= factor
    return x


ALL, EVERY_128TH = slice(None), slice(None, None, 128)
ORDINARY = {
    "normal": (lambda x: x, {}),
    "few values": (lambda x: np.where(np.abs(x) < 1.6, 0, x), {}),
    "masked": (_masked, {}),
    "one column large": (lambda x: _scaled(x, ALL, 37, 1000), {}),
    "one column large, mxfp6": (lambda x: _scaled(x, ALL, 37, 1000), {"format": "mxfp6"}),
    "first tokens large, mxfp4": (lambda x: _scaled(x, EVERY_128TH, ALL, 1000), {}),
    "scaled": (lambda x: x, {"pre_scale": 2.0**12}),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_guesses_serve_tensors_as_they_occur(kernels, rng, monkeypatch, name):
    """What is flagged is done again, at many times the cost."""
    flagged = []

    def note(inputs, flags, *view, first_flag=0, axis, **rest):
        count = -(-inputs[0].shape[1 - axis] // rest["flagged"])
        flagged.append(int((np.asarray(flags)[first_flag : first_flag + count] > 0).sum()))
        return view

    for module in (quantize_tiles, quantize_columns):
        monkeypatch.setattr(module, "settle", note)
    change, options = ORDINARY[name]
    x = jnp.asarray(change(rng.standard_normal((512, 256)).astype(np.float32)), jnp.bfloat16)
    spec = OperandSpec(hadamard=32, **options)
    kernels.ops.views(x, *(reference.Wanted(False, axis, spec) for axis in (1, 0)))
    assert flagged and not any(flagged), flagged


def test_a_row_longer_than_one_pass(kernels, rng):
    x = random(rng, (2, 16500), "bfloat16").at[1, 16400].set(1e4)
    check_quantizing(kernels, x, SPECS["iht"], 1)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_nothing_is_launched_for_empty_arrays(monkeypatch, shape):
    monkeypatch.setattr(_launch, "launch", None)
    ops, x = _ops(), jnp.zeros(shape, jnp.bfloat16)
    for axis in (0, 1):
        codes, scales = ops.quantize(x, axis=axis, spec=SPECS["iht"])
        want = reference.quantize(x, axis=axis, spec=SPECS["iht"])
        assert (codes.shape, scales.shape) == (want[0].shape, want[1].shape)
        left, _ = ops.operand(x, axis=axis, spec=SPECS["iht"])
        y = ops.matmul(left, left, scale=1.0, dtype=jnp.dtype(jnp.bfloat16))
        assert y.shape == (shape[1 - axis],) * 2 and not np.asarray(y, np.float32).any()


E2M1 = oracle.grid(oracle.E2M1)


def _decode(data, kind, packed_axis):
    """What a matrix unit makes of loaded elements: two E2M1 a byte, the lower nibble first."""
    if kind == "e4m3":
        return data.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    nibbles = np.stack([data & 15, data >> 4], axis=packed_axis + 1)
    shape = list(data.shape)
    shape[packed_axis] *= 2
    nibbles = nibbles.reshape(shape)
    return np.where(nibbles > 7, -1, 1) * E2M1[nibbles & 7]


def _dot_scaled(self, a, a_scale, a_kind, b, b_scale, b_kind, fast, a_pack, b_pack, acc):
    """`tl.dot_scaled`, which the interpreter lacks, from what the kernel has loaded."""
    kind = {"E2M1": "e2m1", "E4M3": "e4m3"}
    left = _decode(a.data, kind[a_kind.name], 1)
    right = _decode(b.data, kind[b_kind.name], 0)
    left = left * np.repeat(oracle.scale_values(a_scale.data), 32, axis=1)
    right = right * np.repeat(oracle.scale_values(b_scale.data), 32, axis=1).T
    y = (left.astype(np.float64) @ right.astype(np.float64)).astype(np.float32) + acc.data
    return triton_interpreter.TensorHandle(y, acc.dtype.scalar)


@pytest.mark.parametrize("m, n, k", [(33, 40, 96), (1, 130, 32), (140, 24, 160)])
@pytest.mark.parametrize("left, right", [("iht", "iht"), ("mxfp6", "mxfp6"), ("plain", "mxfp6")])
def test_native_product_reads_its_operands_right(rng, monkeypatch, m, n, k, left, right):
    monkeypatch.setattr(
        triton_interpreter.InterpreterBuilder, "create_dot_scaled", _dot_scaled, raising=False
    )
    ops, left, right = _ops("native"), SPECS[left], SPECS[right]
    a, b = random(rng, (m, k), "float32"), random(rng, (k, n), "float32")
    # NaN in the last row's first block: rows that end within a step must not read its scale.
    a, b = a.at[-1, 0].set(np.nan), b.at[0, -1].set(np.nan)
    codes, scales, _ = ops.residual(a, axis=1, spec=left)
    loaded, made = ops.load(codes, scales, spec=left), ops.operand(b, axis=0, spec=right)[0]
    got = ops.matmul(loaded, made, scale=0.25, dtype=jnp.dtype(jnp.float32))
    want = reference.matmul(
        reference.operand(a, axis=1, spec=left)[0],
        reference.operand(b, axis=0, spec=right)[0],
        scale=0.25,
        dtype=jnp.dtype(jnp.float32),
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert np.isfinite(got).sum() == (m - 1) * (n - 1)


@by_axis
def test_operands_in_bfloat16_are_the_reference_s(rng, axis):
    ops, x = _ops("bf16"), special(rng, "bfloat16")
    for name in ("iht", "mxfp6"):
        got, _ = ops.operand(x, axis=axis, spec=SPECS[name])
        want, _ = reference.operand(x, axis=axis, spec=SPECS[name])
        np.testing.assert_array_equal(got.values.astype(jnp.float32), want.astype(jnp.float32))


def test_interpreter_is_on():
    assert triton.knobs.runtime.interpret
    assert jax.default_backend() == "cpu"
