"""The kernels, run by Triton's interpreter on the CPU, against the reference and the oracle.

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
from adahop_jax._formats import FORMATS
from adahop_jax.reference import operations as reference
from tests import oracle
from tests.kernels import interpreter
from triton_kernels import _launch, quantize_columns, quantize_rows
from triton_kernels.operations import Backend

SEED = np.array([123456789, 987654321], np.uint32)
STOCHASTIC = {"rounding": "stochastic", "scale_rule": "ceil"}
SPECS = {
    "plain": OperandSpec(),
    "floor": OperandSpec(scale_rule="floor"),
    "iht": OperandSpec(hadamard=32),
    "iht-stochastic": OperandSpec(hadamard=32, **STOCHASTIC),
    "h2": OperandSpec(hadamard=2),
    "h64-signs": OperandSpec(hadamard=64, signs="random"),
    "h16-signs-scaled": OperandSpec(hadamard=16, signs="random", pre_scale=0.75, **STOCHASTIC),
    "mxfp6": OperandSpec(format="mxfp6"),
    "mxfp6-stochastic": OperandSpec(format="mxfp6", hadamard=32, **STOCHASTIC),
}
BINADES = {"mxfp4": 29, "mxfp6": 12}  # of block scale that fold exactly
# FP8's least step, over a row's largest scale. The interpreter cuts off where a GPU rounds.
LEAST_STEP = {"mxfp4": 2.0**-29, "mxfp6": 2.0**-14}
by_axis = pytest.mark.parametrize("axis", [0, 1])

# Of numbers out of range, which the kernels look for afterwards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    monkeypatch.setattr(triton_interpreter.InterpreterBuilder, "create_dot", interpreter.dot)


@pytest.fixture
def rng(request):
    return np.random.default_rng([ord(c) for c in request.node.name])


def _ops(path="fp8"):
    return Backend(interpreter.MACHINE, path, processors=3)


def _random(rng, shape, dtype):
    return jnp.asarray(rng.standard_normal(shape), jnp.dtype(dtype))


def _special(rng, dtype):
    """Rows of zeros, -0, subnormals, huge and tiny values; columns that start with zeros."""
    x = rng.standard_normal((72, 96)).astype(np.float32)
    x[0], x[1] = 0.0, -0.0
    x[2] *= 2.0**-127
    x[3] = rng.choice([-3e38, 3e38, 1.0], 96)
    x[4] *= 1e-36
    x[5] *= 1e30
    x[:64, 40:44] = 0.0
    x[:, 50] *= 1e-20
    return jnp.asarray(x).astype(dtype)


def _both(spec, axis, x):
    """Residual and operand of the kernels and of the reference."""
    common = {"axis": axis, "spec": spec, "seed": jnp.asarray(SEED), "sign_seed": jnp.asarray(SEED)}
    ops = _ops()
    got = ops.residual(x, norms=True, **common)
    want = reference.residual(x, norms=True, **common)
    return got, ops.operand(x, **common)[0].values, want, reference.operand(x, **common)[0]


def _values(view):
    """A folded view's values, float64."""
    exponents = np.asarray(view.refs, np.float64) - 127
    return np.asarray(view.data.astype(jnp.float32), np.float64) * 2.0 ** exponents[:, None]


def _assert_folded(view, values, scales, fmt):
    """Exact inside the window of a row, and off by less than FP8's least step below it."""
    got, values = _values(view), np.asarray(values.astype(jnp.float32), np.float64)
    scales = np.asarray(scales).astype(np.float64)
    largest = np.where(scales == 255, 0, scales).max(1, keepdims=True)
    inside = np.repeat(scales > largest - BINADES[fmt], 32, axis=1)
    np.testing.assert_array_equal(got[inside], values[inside])
    bound = np.broadcast_to(LEAST_STEP[fmt] * 2.0 ** (largest - 127), got.shape)
    assert (np.abs(got - values) < bound)[~inside].all()


QUANTIZED = [
    *((name, (40, 70), "bfloat16") for name in SPECS),
    *((name, (33, 41), "float32") for name in SPECS),
    *((name, (64, 32), "float16") for name in ("plain", "iht-stochastic", "mxfp6")),
]


@by_axis
@pytest.mark.parametrize("name, shape, dtype", QUANTIZED, ids=str)
def test_quantizing_equals_the_reference(rng, name, shape, dtype, axis):
    spec, x = SPECS[name], _random(rng, shape, dtype)
    (codes, scales, norms), operand, want, values = _both(spec, axis, x)
    np.testing.assert_array_equal(codes, want[0])
    np.testing.assert_array_equal(scales, want[1])
    np.testing.assert_allclose(norms, want[2], rtol=1e-6)
    loaded = _ops().load(codes, scales, spec=spec).values
    for view in (operand, loaded):
        _assert_folded(view, values, want[1], spec.format)


TILES = {  # that tensor cores rotate
    "iht": SPECS["iht"],
    "h16-signs-scaled": OperandSpec(hadamard=16, signs="random", pre_scale=0.75),
    "floor": OperandSpec(hadamard=32, scale_rule="floor"),
    "mxfp6": OperandSpec(hadamard=32, format="mxfp6"),
}


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("shape, dtype", [((64, 128), "bfloat16"), ((70, 136), "float16")])
def test_both_directions_in_one_read_equal_the_reference(rng, monkeypatch, shape, dtype, name):
    for module in (quantize_rows, quantize_columns):
        monkeypatch.setattr(module, "_kernel", None)
    spec, x = TILES[name], _random(rng, shape, dtype)
    wanted = [
        reference.Wanted(stored, axis, spec, None, jnp.asarray(SEED), norms)
        for stored, axis, norms in ((True, 0, True), (False, 1, False))
    ]
    (codes, scales, norms), (operand, none) = _ops().views(x, *wanted)
    (want, want_scales, want_norms), (values, _) = reference.views(x, *wanted)
    np.testing.assert_array_equal(codes, want)
    np.testing.assert_array_equal(scales, want_scales)
    np.testing.assert_allclose(norms, want_norms, rtol=1e-6)
    assert none is None
    # Numbers of ordinary size: nothing is below the window.
    np.testing.assert_array_equal(_values(operand.values), values.astype(jnp.float32))


SPECIAL = [
    *((name, "bfloat16") for name in ("plain", "floor", "iht", "mxfp6")),
    *((name, "float32") for name in ("plain", "iht-stochastic")),
]


@by_axis
@pytest.mark.parametrize("name, dtype", SPECIAL)
def test_special_values_equal_the_reference(rng, name, dtype, axis):
    x = _special(rng, dtype)
    spec = SPECS[name]
    (codes, scales, _), operand, want, values = _both(spec, axis, x)
    np.testing.assert_array_equal(codes, want[0])
    np.testing.assert_array_equal(scales, want[1])
    if spec.format == "mxfp4":  # the interpreter casts NaN to E4M3 wrongly
        _assert_folded(operand, values, want[1], spec.format)


@by_axis
@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_a_fault_marks_its_block_and_no_other(rng, fault, axis):
    x = _random(rng, (64, 64), "bfloat16").at[37, 5].set(fault)
    for name in ("plain", "iht"):
        (codes, scales, _), operand, want, values = _both(SPECS[name], axis, x)
        np.testing.assert_array_equal(codes, want[0])
        np.testing.assert_array_equal(scales, want[1])
        assert (np.asarray(scales) == 255).sum() == 1
        assert np.isnan(_values(operand)).sum() == 32
        np.testing.assert_array_equal(_values(operand), values.astype(jnp.float32))


@by_axis
@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp6"])
def test_rows_that_span_more_than_fp8_does(rng, fmt, axis):
    """Small rows stay whole beside large ones; within a row, small blocks lose bits as stated."""
    x = rng.standard_normal((64, 256)).astype(np.float32)
    x *= np.repeat(2.0 ** rng.integers(-40, 40, (64, 8)), 32, axis=1)
    x[7] *= 2.0**-60
    x = jnp.asarray(x if axis else x.T)
    spec = OperandSpec(format=fmt)
    _, operand, want, values = _both(spec, axis, x)
    _assert_folded(operand, values, want[1], fmt)
    seventh = _values(operand)[7]
    assert np.abs(seventh).max() == np.abs(np.asarray(values[7].astype(jnp.float32))).max() > 0


def test_a_row_longer_than_one_pass(rng):
    x = _random(rng, (2, 16500), "bfloat16").at[1, 16400].set(1e4)
    (codes, scales, _), operand, want, values = _both(SPECS["iht"], 1, x)
    np.testing.assert_array_equal(codes, want[0])
    np.testing.assert_array_equal(scales, want[1])
    _assert_folded(operand, values, want[1], "mxfp4")


@pytest.mark.parametrize("rule", ["even", "floor", "ceil"])
@by_axis
def test_codes_and_scales_equal_the_oracle(rng, rule, axis):
    x = _random(rng, (64, 96), "float32") * 2.0 ** rng.integers(-90, 90, (64, 1))
    codes, scales = _ops().quantize(x, axis=axis, spec=OperandSpec(scale_rule=rule))
    want = oracle.quantize(np.asarray(x), axis=axis, rule=rule)
    np.testing.assert_array_equal(codes, oracle.pack(want.codes, 4, axis))
    np.testing.assert_array_equal(scales, want.scales)


@by_axis
def test_stochastic_codes_equal_the_oracle(rng, axis):
    x = _random(rng, (64, 96), "bfloat16")
    spec = OperandSpec(**STOCHASTIC)
    codes, scales = _ops().quantize(x, axis=axis, spec=spec, seed=jnp.asarray(SEED))
    want = oracle.quantize(np.asarray(x), axis=axis, rule="ceil", key=SEED)
    np.testing.assert_array_equal(codes, oracle.pack(want.codes, 4, axis))
    np.testing.assert_array_equal(scales, want.scales)


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp6"])
def test_every_code_and_scale_loads_exactly(rng, fmt):
    """All codes at each of 255 scales; a scale of 255 is NaN."""
    spec = OperandSpec(format=fmt)
    bits = FORMATS[fmt].element_bits
    codes = rng.permuted(np.tile(np.arange(2**bits), (256, 128 // 2**bits)), axis=1)
    packed = oracle.pack(codes.astype(np.uint8), bits, 1)
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 4, axis=1)
    view = _ops().load(jnp.asarray(packed), jnp.asarray(scales), spec=spec).values
    want = reference.dequantize(packed, scales, axis=1, fmt=FORMATS[fmt])
    finite = np.isfinite(np.asarray(want))
    np.testing.assert_array_equal(_values(view)[finite], np.asarray(want, np.float64)[finite])
    assert np.isnan(_values(view)[255]).all() or fmt == "mxfp6"


@pytest.mark.parametrize(
    "m, n, k, axis, dtype, name",
    [
        (33, 40, 96, 0, "float32", "iht"),
        (1, 1, 1, 0, "bfloat16", "plain"),
        (130, 24, 160, 0, "bfloat16", "iht"),
        (16, 260, 64, 1, "float16", "plain"),
        (5, 7, 2300, 1, "float32", "plain"),  # a sum that is broken off
        (3, 8, 4100, 1, "float32", "iht"),  # split among programs
    ],
)
def test_product_is_that_of_the_values(rng, m, n, k, axis, dtype, name):
    spec, ops = SPECS[name], _ops()
    a, b = _random(rng, (m, k), dtype), _random(rng, (n, k) if axis else (k, n), dtype)
    left, right = ops.operand(a, axis=1, spec=spec)[0], ops.operand(b, axis=axis, spec=spec)[0]
    got = ops.matmul(left, right, scale=0.5, dtype=jnp.dtype(dtype))
    want = _values(left.values) @ _values(right.values).T * 0.5
    assert got.dtype == jnp.dtype(dtype)
    eps = float(jnp.finfo(jnp.dtype(dtype)).eps)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=eps, atol=1e-4)


@pytest.mark.parametrize(
    "a, b", [(0, 254), (1, 253), (7, 200), (254, 3), (13, 254), (254, 13), (127, 127), (40, 60)]
)
def test_product_of_scales_far_apart(rng, a, b):
    """Small scales on one side and large ones on the other: the product is an ordinary number."""
    ops, spec = _ops(), SPECS["plain"]
    left, right = (
        ops.load(
            jnp.asarray(rng.integers(0, 256, (16, 32)), jnp.uint8),
            jnp.asarray(byte + rng.integers(-(byte > 2), 1, (16, 2)), jnp.uint8),
            spec=spec,
        )
        for byte in (a, b)
    )
    got = ops.matmul(left, right, scale=1.0, dtype=jnp.dtype(jnp.float32))
    want = _values(left.values) @ _values(right.values).T
    assert np.isfinite(want).all() and np.abs(want).max() > 0
    want = np.where(np.abs(want) < 2.0**-126, 0, want)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-5, atol=2.0**-125)


def test_columns_and_rows_are_replaced(rng):
    ops, spec = _ops(), SPECS["iht"]
    a, b = _random(rng, (70, 64), "float32"), _random(rng, (50, 64), "float32")
    operands = [ops.operand(x, axis=1, spec=spec)[0] for x in (a, b)]
    plain = np.array(ops.matmul(*operands, scale=1.0, dtype=jnp.dtype(jnp.float32)))
    index, values = jnp.array([3, 49, 0]), _random(rng, (70, 3), "float32")
    got = ops.matmul(*operands, scale=1.0, dtype=jnp.dtype(jnp.float32), columns=(index, values))
    plain[:, np.asarray(index)] = values
    np.testing.assert_array_equal(got, plain)


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
    a, b = _random(rng, (m, k), "float32"), _random(rng, (k, n), "float32")
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
    ops, x = _ops("bf16"), _special(rng, "bfloat16")
    for name in ("iht", "mxfp6"):
        got, _ = ops.operand(x, axis=axis, spec=SPECS[name])
        want, _ = reference.operand(x, axis=axis, spec=SPECS[name])
        np.testing.assert_array_equal(got.values.astype(jnp.float32), want.astype(jnp.float32))


@pytest.mark.parametrize("n, k", [(1, 1), (7, 3), (1024, 16), (2500, 5)])
def test_the_largest_norms_ties_to_the_lower_index(rng, n, k):
    norms = rng.choice([0.0, 1e-40, 1.0, 2.5, 1e30, np.inf], n).astype(np.float32)
    norms[n // 2] = np.nan
    got = _ops().largest(jnp.asarray(norms), k)
    order = sorted(range(n), key=lambda i: (not np.isnan(norms[i]), -norms[i], i))
    assert set(np.asarray(got).tolist()) == set(order[:k])


def test_interpreter_is_on():
    assert triton.knobs.runtime.interpret
    assert jax.default_backend() == "cpu"
