"""The contract that every backend fulfils, against the reference and the NumPy oracle.

Runs as it is for the reference and for Pallas, whose kernels JAX's interpreter runs and looks for
races in; `test_interpreted.py` runs it again for Triton, in a process where its interpreter is on.
On a GPU, both run compiled.
"""

import contextlib
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from adahop_jax import OperandSpec
from adahop_jax._dispatch import resolve
from adahop_jax._formats import FORMATS
from adahop_jax.reference import operations as reference
from adahop_jax.reference.operations import Wanted
from tests import oracle
from tests.dense import COMPILER_OPTIONS
from tests.kernels.on_gpu import lost, poison

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
# FP8's least step, over a row's largest scale. Triton's interpreter cuts off where a GPU rounds.
LEAST_STEP = {"mxfp4": 2.0**-29, "mxfp6": 2.0**-14}
POISON = 0xA5
# Fusing what is computed once takes longer than computing it.
OPTIONS = COMPILER_OPTIONS["cpu"] | {"xla_disable_hlo_passes": "fusion"}

by_axis = pytest.mark.parametrize("axis", [0, 1])
# Of numbers out of range, which the kernels look for afterwards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Subject:
    """A backend under test: `run` calls a function of its operations and of arrays."""

    def __init__(self, name):
        self.name, _, compiled = name.partition(" ")
        self.compiled = bool(compiled)
        if self.compiled:
            self.ops = resolve(self.name)[1]
        elif name == "pallas":
            from pallas_kernels.operations import Backend

            self.ops = Backend(processors=3)
        elif name == "triton":
            from tests.kernels import interpreter
            from triton_kernels.operations import Backend

            self.ops = Backend(interpreter.MACHINE, "fp8", processors=3)
        else:
            self.ops = reference

    def run(self, function, *arrays):
        call = functools.partial(function, self.ops)
        if self.compiled:
            poison()
            return jax.block_until_ready(jax.jit(call)(*arrays))
        if self.name == "triton":  # whose interpreter wants arrays, not what `jit` traces
            return call(*arrays)
        with contextlib.ExitStack() as stack:
            if self.name == "pallas":
                races = plgpu.InterpretGPUParams(detect_races=True)
                stack.enter_context(plgpu.force_gpu_interpret_mode(races))
            return jax.block_until_ready(jax.jit(call, compiler_options=OPTIONS)(*arrays))

    def values(self, operand):
        """An operand's values, float64."""
        if self.name == "reference":
            return _f64(operand)
        view = operand.values
        exponents = np.asarray(view.refs, np.float64) - 127
        return _f64(view.data) * 2.0 ** exponents[:, None]


INTERPRETED = "triton" if "TRITON_INTERPRET" in os.environ else "pallas"
KERNELS = [INTERPRETED]
if INTERPRETED == "pallas":
    on_gpu = pytest.mark.gpu
    KERNELS += [pytest.param(f"{name} compiled", marks=on_gpu) for name in ("triton", "pallas")]


@pytest.fixture(params=KERNELS)
def kernels(request, monkeypatch):
    """A backend of kernels, which are held against the reference."""
    return _subject(request.param, monkeypatch)


@pytest.fixture(params=[*KERNELS, "reference"])
def subject(request, monkeypatch):
    """Any backend: all are held against the oracle, and products against float64."""
    return _subject(request.param, monkeypatch)


def _subject(name, monkeypatch):
    """A backend whose results start poisoned."""
    if name == "triton":
        from tests.kernels import interpreter

        interpreter.install(monkeypatch)
    elif name.startswith("pallas"):
        from pallas_kernels import _launch

        monkeypatch.setattr(_launch, "_memory", _poisoned)
    return Subject(name)


def _poisoned(result):
    if isinstance(result, jax.Array):
        return result
    size = int(np.prod(result.shape)) * jnp.dtype(result.dtype).itemsize
    raw = np.full(size, POISON, np.uint8)
    return jnp.asarray(raw.view(result.dtype).reshape(result.shape))


@pytest.fixture
def rng(request):
    return np.random.default_rng([ord(c) for c in request.node.originalname])


def _f64(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def random(rng, shape, dtype):
    return jnp.asarray(rng.standard_normal(shape), jnp.dtype(dtype))


def special(rng, dtype):
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


def _quantized(ops, x, seed, *, axis, spec):
    """Residual, the operand, and the residual loaded as one."""
    common = {"axis": axis, "spec": spec, "seed": seed, "sign_seed": seed}
    codes, scales, norms = ops.residual(x, norms=True, **common)
    operand, none = ops.operand(x, **common)
    assert none is None
    return codes, scales, norms, operand, ops.load(codes, scales, spec=spec)


def check_quantizing(kernels, x, spec, axis):
    """Codes and scales equal the reference's, operands and what is loaded within their window."""
    run = functools.partial(_quantized, axis=axis, spec=spec)
    codes, scales, norms, *operands = kernels.run(run, x, jnp.asarray(SEED))
    with jax.default_device(jax.devices("cpu")[0]):
        want, want_scales, want_norms, values, _ = run(reference, np.asarray(x), jnp.asarray(SEED))
    np.testing.assert_array_equal(codes, want)
    np.testing.assert_array_equal(scales, want_scales)
    finite = np.isfinite(np.asarray(want_norms))
    np.testing.assert_allclose(norms[finite], want_norms[finite], rtol=1e-6)
    for operand in operands:
        _assert_folded(kernels.values(operand), _f64(values), want_scales, spec.format)
    return scales, kernels.values(operands[0])


def _assert_folded(got, values, scales, fmt):
    """Exact inside the window of a row, and off by less than FP8's least step below it."""
    scales = np.asarray(scales).astype(np.float64)
    largest = np.where(scales == 255, 0, scales).max(1, keepdims=True)
    inside = np.repeat(scales > largest - BINADES[fmt], 32, axis=1)
    np.testing.assert_array_equal(got[inside], values[inside])
    bound = np.broadcast_to(LEAST_STEP[fmt] * 2.0 ** (largest - 127), got.shape)
    assert (np.abs(got - values) < bound)[~inside].all()


QUANTIZED = [
    # Philox by halves takes Pallas' interpreter long: what else is stochastic, Triton's alone.
    *(
        (name, (40, 70), "bfloat16")
        for name, spec in SPECS.items()
        if INTERPRETED == "triton" or spec.rounding == "nearest" or name == "iht-stochastic"
    ),
    *((name, (33, 41), "float32") for name in ("plain", "h64-signs")),
    *((name, (64, 32), "float16") for name in ("plain", "mxfp6")),
]


@by_axis
@pytest.mark.parametrize("name, shape, dtype", QUANTIZED, ids=str)
def test_quantizing_equals_the_reference(kernels, rng, name, shape, dtype, axis):
    check_quantizing(kernels, random(rng, shape, dtype), SPECS[name], axis)


@pytest.mark.parametrize("shape", [(32, 64), (96, 160), (130, 7), (257, 130)], ids=str)
def test_views_of_any_size_equal_the_reference(kernels, rng, shape):
    """Both axes at once, at sizes of few blocks and of few tiles."""
    spec, x = SPECS["iht"], random(rng, shape, "bfloat16")
    wanted = Wanted(False, 1, spec, norms=True), Wanted(True, 0, spec, norms=True)
    found = kernels.run(lambda ops, x: ops.views(x, *wanted), x)
    (operand, norms), (codes, scales, other_norms) = found
    (values, want_norms), (want, want_scales, want_other) = reference.views(x, *wanted)
    np.testing.assert_array_equal(kernels.values(operand), _f64(values))
    np.testing.assert_array_equal(codes, want)
    np.testing.assert_array_equal(scales, want_scales)
    np.testing.assert_allclose(norms, want_norms, rtol=1e-6)
    np.testing.assert_allclose(other_norms, want_other, rtol=1e-6)


SPECIAL = [
    *((name, "bfloat16") for name in ("plain", "floor", "iht", "mxfp6")),
    *((name, "float32") for name in ("plain", "iht")),
]


@by_axis
@pytest.mark.parametrize("name, dtype", SPECIAL)
def test_special_values_equal_the_reference(kernels, rng, name, dtype, axis):
    if (kernels.name, name) == ("triton", "mxfp6"):
        pytest.skip("Triton's interpreter casts NaN to E4M3 wrongly")
    check_quantizing(kernels, special(rng, dtype), SPECS[name], axis)


@by_axis
@pytest.mark.parametrize("name", ["plain", "iht"])
def test_faults_mark_their_blocks_and_no_other(kernels, rng, name, axis):
    x = random(rng, (64, 64), "bfloat16")
    x = x.at[37, 5].set(np.nan).at[50, 40].set(np.inf).at[2, 3].set(-np.inf)
    scales, values = check_quantizing(kernels, x, SPECS[name], axis)
    assert (np.asarray(scales) == 255).sum() == 3
    assert np.isnan(values).sum() == 96


@by_axis
def test_inputs_below_the_normal_are_zeros_whatever_scales_them(kernels, rng, axis):
    """And norms of large numbers are finite where the reference's are."""
    signs = rng.choice([-1.0, 1.0], (64, 64))
    x = jnp.asarray(np.where(np.arange(64) < 32, 1.5 * 2.0**-127, 2.0**58.7) * signs)
    x = x.astype(jnp.bfloat16)
    check_quantizing(kernels, x, OperandSpec(hadamard=32, pre_scale=3.0), axis)


@by_axis
@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp6"])
def test_rows_that_span_more_than_fp8_does(kernels, rng, fmt, axis):
    """Small rows stay whole beside large ones; within a row, small blocks lose bits as stated."""
    x = rng.standard_normal((64, 256)).astype(np.float32)
    x *= np.repeat(2.0 ** rng.integers(-40, 40, (64, 8)), 32, axis=1)
    x[7] *= 2.0**-60
    x = jnp.asarray(x if axis else x.T)
    spec = OperandSpec(format=fmt)
    _, values = check_quantizing(kernels, x, spec, axis)
    want = _f64(reference.operand(x, axis=axis, spec=spec)[0])
    assert np.abs(values[7]).max() == np.abs(want[7]).max() > 0


@by_axis
@pytest.mark.parametrize("rule", ["even", "floor", "ceil", "stochastic"])
def test_codes_and_scales_equal_the_oracle(subject, rng, rule, axis):
    x = random(rng, (64, 96), "float32") * 2.0 ** rng.integers(-90, 90, (64, 1))
    key = SEED if rule == "stochastic" else None
    spec = OperandSpec(**STOCHASTIC) if key is not None else OperandSpec(scale_rule=rule)
    codes, scales = subject.run(
        lambda ops, x, seed: ops.quantize(x, axis=axis, spec=spec, seed=seed),
        x.astype(jnp.float32),
        jnp.asarray(SEED),
    )
    want = oracle.quantize(np.asarray(x, np.float32), axis=axis, rule=spec.scale_rule, key=key)
    np.testing.assert_array_equal(codes, oracle.pack(want.codes, 4, axis))
    np.testing.assert_array_equal(scales, want.scales)


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp6"])
def test_every_code_and_scale_loads_exactly(kernels, rng, fmt):
    """All codes at each of 255 scales; a scale of 255 is NaN."""
    spec = OperandSpec(format=fmt)
    bits = FORMATS[fmt].element_bits
    codes = rng.permuted(np.tile(np.arange(2**bits), (256, 128 // 2**bits)), axis=1)
    packed = jnp.asarray(oracle.pack(codes.astype(np.uint8), bits, 1))
    scales = jnp.asarray(np.repeat(np.arange(256, dtype=np.uint8)[:, None], 4, axis=1))
    got = kernels.values(kernels.run(lambda ops, *a: ops.load(*a, spec=spec), packed, scales))
    want = np.asarray(reference.dequantize(packed, scales, axis=1, fmt=FORMATS[fmt]), np.float64)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[finite], want[finite])
    assert np.isnan(got[255]).all() or (kernels.name, fmt) == ("triton", "mxfp6")


@pytest.mark.parametrize(
    "m, n, k, axis, dtype, name",
    [
        (33, 40, 96, 0, "float32", "iht"),
        (1, 1, 1, 0, "bfloat16", "plain"),
        (130, 24, 160, 0, "bfloat16", "iht"),
        (16, 260, 64, 1, "float16", "plain"),
        (5, 7, 2300, 1, "float32", "plain"),  # a sum that is broken off
        (3, 8, 4100, 1, "float32", "iht"),  # one that Triton splits among programs
    ],
)
def test_product_is_that_of_the_values(subject, rng, m, n, k, axis, dtype, name):
    spec = SPECS[name]
    a, b = random(rng, (m, k), dtype), random(rng, (n, k) if axis else (k, n), dtype)

    def product(ops, a, b):
        left, right = ops.operand(a, axis=1, spec=spec)[0], ops.operand(b, axis=axis, spec=spec)[0]
        return left, right, ops.matmul(left, right, scale=0.5, dtype=jnp.dtype(dtype))

    left, right, got = subject.run(product, a, b)
    a, b = subject.values(left), subject.values(right)
    want = a @ b.T * 0.5
    assert got.dtype == jnp.dtype(dtype)
    allowed = float(jnp.finfo(jnp.dtype(dtype)).eps) * np.abs(want) + 1e-4
    if subject.compiled:
        allowed += lost(np.abs(a) @ np.abs(b).T * 0.5, k, spec)
    assert (np.abs(np.asarray(got, np.float64) - want) <= allowed).all()


@pytest.mark.parametrize(
    "a, b", [(0, 254), (1, 253), (7, 200), (254, 3), (13, 254), (254, 13), (127, 127), (40, 60)]
)
def test_product_of_scales_far_apart(kernels, rng, a, b):
    """Small scales on one side and large ones on the other: the product is an ordinary number."""
    spec = SPECS["plain"]
    sides = [
        (
            jnp.asarray(rng.integers(0, 256, (16, 32)), jnp.uint8),
            jnp.asarray(byte + rng.integers(-(byte > 2), 1, (16, 2)), jnp.uint8),
        )
        for byte in (a, b)
    ]

    def product(ops, left, right):
        left, right = ops.load(*left, spec=spec), ops.load(*right, spec=spec)
        return left, right, ops.matmul(left, right, scale=1.0, dtype=jnp.dtype(jnp.float32))

    left, right, got = kernels.run(product, *sides)
    want = kernels.values(left) @ kernels.values(right).T
    assert np.isfinite(want).all() and np.abs(want).max() > 0
    want = np.where(np.abs(want) < 2.0**-126, 0, want)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-5, atol=2.0**-125)


@pytest.mark.parametrize("m", [70, 150])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_columns_and_rows_are_replaced(subject, rng, m, dtype):
    spec, kept = SPECS["iht"], jnp.dtype(dtype)
    a, b = random(rng, (m, 64), "float32"), random(rng, (50, 64), "float32")
    index, values = jnp.array([3, 49, 0]), random(rng, (m, 3), "float32")
    rows, row_values = jnp.array([m - 1, 2]), random(rng, (2, 50), "float32")

    def products(ops, a, b, index, values, rows, row_values):
        left, right = (ops.operand(x, axis=1, spec=spec)[0] for x in (a, b))
        product = functools.partial(ops.matmul, left, right, scale=1.0, dtype=kept)
        return (
            product(),
            product(columns=(index, values)),
            product(rows=(rows, row_values)),
        )

    plain, columns, replaced = subject.run(products, a, b, index, values, rows, row_values)
    want = np.array(plain)
    want[:, np.asarray(index)] = values.astype(kept)
    np.testing.assert_array_equal(columns, want)
    want = np.array(plain)
    want[np.asarray(rows)] = row_values.astype(kept)
    np.testing.assert_array_equal(replaced, want)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_empty_arrays(subject, shape):
    def run(ops, x):
        results = []
        for axis in (0, 1):
            left, _ = ops.operand(x, axis=axis, spec=SPECS["iht"])
            y = ops.matmul(left, left, scale=1.0, dtype=jnp.dtype(jnp.bfloat16))
            results.append((*ops.quantize(x, axis=axis, spec=SPECS["iht"]), y))
        return results

    x = jnp.zeros(shape, jnp.bfloat16)
    for axis, (codes, scales, y) in enumerate(subject.run(run, x)):
        want = reference.quantize(x, axis=axis, spec=SPECS["iht"])
        assert (codes.shape, scales.shape) == (want[0].shape, want[1].shape)
        assert y.shape == (shape[1 - axis],) * 2 and not np.asarray(y, np.float32).any()


@pytest.mark.parametrize("n, k", [(1, 1), (7, 3), (1024, 16), (2500, 5)])
def test_the_largest_norms_ties_to_the_lower_index(subject, rng, n, k):
    norms = rng.choice([0.0, 1e-40, 1.0, 2.5, 1e30, np.inf], n).astype(np.float32)
    if subject.name != "reference":  # whose `top_k` takes subnormal numbers for zeros, as XLA does
        norms[n // 2] = np.nan
    else:
        norms[norms < 1e-30] = 0
    got = subject.run(lambda ops, norms: ops.largest(norms, k), jnp.asarray(norms))
    order = sorted(range(n), key=lambda i: (not np.isnan(norms[i]), -norms[i], i))
    assert set(np.asarray(got).tolist()) == set(order[:k])
