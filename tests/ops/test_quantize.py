"""Nearest-even quantisation, bit for bit against the oracle: every edge of the range."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import adahop_jax as ah
from tests import oracle

RULES = oracle.SCALE_RULES
FORMATS = [
    pytest.param(ah.MXFP4, oracle.E2M1, id="mxfp4"),
    pytest.param(ah.MXFP6, oracle.E2M3, id="mxfp6"),
]
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
F32_MAX = float(np.finfo(np.float32).max)
BF16_PATTERNS = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)

quantize = jax.jit(ah.quantize, static_argnames=("axis", "format", "scale_rule"))
matmul = jax.jit(ah.matmul, static_argnames=("strategy",))
dequantize = jax.jit(lambda q: q.dequantize())
unpack = jax.jit(lambda q: q.unpack())

each_rule = pytest.mark.parametrize("rule", RULES)
each_format = pytest.mark.parametrize("fmt, spec", FORMATS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def _check(x, *, axis=-1, fmt=ah.MXFP4, spec=oracle.E2M1, rule="even"):
    got = quantize(jnp.asarray(x), axis=axis, format=fmt, scale_rule=rule)
    want = oracle.quantize(x, axis=axis, fmt=spec, rule=rule)
    oracle.assert_equal(got, want)
    return got, want


def _block(*values, fill=0.0, length=32):
    block = np.full(length, fill, np.float32)
    block[: len(values)] = values
    return block


NEIGHBOURS = {
    "zeros": lambda p, rng: np.zeros((len(p), 32), np.float32),
    "of-its-size": lambda p, rng: p[:, None] * rng.choice([-1, 0.75, 0.6, 0.25, 0.05], (1, 32)),
    "ones": lambda p, rng: np.full((len(p), 32), -1, np.float32),
    "huge": lambda p, rng: np.full((len(p), 32), F32_MAX, np.float32),
    "any-pattern": lambda p, rng: rng.permuted(np.tile(p, (32, 1)), axis=1).T,
}


@each_rule
@pytest.mark.parametrize("position", [0, 13, 31])
@pytest.mark.parametrize("neighbours", NEIGHBOURS)
def test_quantize_every_bf16_pattern(neighbours, position, rule):
    with np.errstate(over="ignore", invalid="ignore"):
        patterns = BF16_PATTERNS.astype(np.float32)
        x = NEIGHBOURS[neighbours](patterns, np.random.default_rng(position))
        x = np.asarray(x, np.float32).astype(ml_dtypes.bfloat16)
    x[:, position] = BF16_PATTERNS
    _check(x, rule=rule)


def _random_blocks(rng, count):
    """Blocks around one exponent, with raw bit patterns and short mantissas (ties) among them."""
    x = rng.normal(size=(count, 32)).astype(np.float32)
    x *= np.exp2(rng.integers(-6, 1, (count, 32))).astype(np.float32)
    bits = x.view(np.uint32)
    bits[::3] &= np.uint32(0xFFE00000)  # two mantissa bits: many ties
    bits[1::7] = rng.integers(0, 2**32, bits[1::7].shape, np.uint32)
    with np.errstate(over="ignore", invalid="ignore"):
        return x * np.exp2(rng.integers(-130, 128, (count, 1))).astype(np.float32)


@each_rule
@pytest.mark.parametrize("chunk", range(10))
def test_quantize_ten_million_random_values(chunk, rule):
    x = _random_blocks(np.random.default_rng([chunk, RULES.index(rule)]), 2**15)
    _check(x, rule=rule)


@each_rule
def test_quantize_random_values_to_mxfp6(rule):
    x = _random_blocks(np.random.default_rng(7), 2**14)
    _check(x, fmt=ah.MXFP6, spec=oracle.E2M3, rule=rule)


@each_dtype
@each_format
def test_quantize_takes_each_dtype(fmt, spec, dtype):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 96)) * np.exp2(rng.integers(-24, 15, (64, 1)))
    with np.errstate(over="ignore"):
        _check(x.astype(dtype), fmt=fmt, spec=spec)


def test_quantize_keeps_float16_subnormals():
    got, _ = _check(np.arange(1, 33, dtype=np.uint16).view(np.float16))
    assert np.asarray(got.scales)[0] == 127 - 24 + 5 - 2
    assert np.asarray(dequantize(got))[31] == 2.0**-19


@each_format
@pytest.mark.parametrize("length", [1, 31, 32, 33, 95, 129])
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_quantize_any_axis_and_length(axis, length, fmt, spec):
    shape = [3, 2, 5]
    shape[axis] = length
    x = np.random.default_rng(length).normal(size=shape).astype(np.float32)
    got, want = _check(x, axis=axis, fmt=fmt, spec=spec)
    assert got.axis == (axis if axis < 0 else axis - 3) and got.shape == x.shape
    np.testing.assert_array_equal(np.asarray(dequantize(got)), want.dequantize())
    np.testing.assert_array_equal(np.asarray(unpack(got)), want.codes)


@pytest.mark.parametrize(
    "shape, axis", [((40,), 0), ((2, 1, 3, 40), -1), ((2, 40, 3, 4), 1), ((40, 1, 2, 1, 2), 0)]
)
def test_quantize_any_rank(shape, axis):
    _check(np.random.default_rng(0).normal(size=shape).astype(np.float32), axis=axis)


@pytest.mark.parametrize(
    "shape, axis", [((0, 40), -1), ((0, 40), 0), ((2, 0, 40), -1), ((3, 0), -1), ((3, 0), 0)]
)
def test_quantize_empty(shape, axis):
    got, want = _check(np.zeros(shape, np.float32), axis=axis)
    assert np.asarray(dequantize(got)).shape == want.dequantize().shape == shape


def test_quantize_padding_adds_nothing():
    x = np.random.default_rng(0).normal(size=(8, 33)).astype(np.float32)
    short, long = quantize(x), quantize(np.pad(x, ((0, 0), (0, 31))))
    np.testing.assert_array_equal(short.codes, long.codes)
    np.testing.assert_array_equal(short.scales, long.scales)


@each_rule
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
def test_A1_scale_of_every_power_of_two(dtype, rule):
    exponents = np.arange(-126, 128)
    x = np.zeros((254, 32), np.float32)
    x[:, 9] = np.exp2(exponents.astype(np.float64))
    got, _ = _check(x.astype(dtype), rule=rule)
    np.testing.assert_array_equal(got.scales[:, 0], np.maximum(exponents + 125, 0))


@pytest.mark.parametrize(
    "bits, bytes_by_rule",
    [
        pytest.param(0x43FFFFFF, {"floor": 133, "even": 134, "ceil": 134}, id="just-under-512"),
        pytest.param(0x40600001, {"floor": 126, "even": 127, "ceil": 127}, id="just-over-3.5"),
        pytest.param(0x405FFFFF, {"floor": 126, "even": 126, "ceil": 127}, id="just-under-3.5"),
        pytest.param(0x40400000, {"floor": 126, "even": 126, "ceil": 126}, id="3"),
        pytest.param(0x40400001, {"floor": 126, "even": 126, "ceil": 127}, id="just-over-3"),
    ],
)
def test_A7_scale_comes_from_the_float32_value(bits, bytes_by_rule):
    x = _block(np.uint32(bits).view(np.float32))
    for rule, byte in bytes_by_rule.items():
        assert np.asarray(_check(x, rule=rule)[0].scales)[0] == byte


@each_dtype
@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_A8_a_fault_at_each_position_poisons_its_block_alone(axis, fault, dtype):
    x = np.random.default_rng(0).normal(size=(32, 96)).astype(dtype)
    clean = oracle.quantize(x).dequantize()
    x[np.arange(32), 32 + np.arange(32)] = fault
    x = x if axis else x.T.copy()
    got, _ = _check(x, axis=axis)
    scales, values = np.asarray(got.scales), np.asarray(dequantize(got))
    scales, values = (scales, values) if axis else (scales.T, values.T)
    assert (scales[:, 1] == 255).all() and np.isnan(values[:, 32:64]).all()
    np.testing.assert_array_equal(values[:, :32], clean[:, :32])
    np.testing.assert_array_equal(values[:, 64:], clean[:, 64:])


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf], ids=str)
def test_A9_a_fault_reaches_the_product_as_nan(fault):
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 96), (96, 5)))
    a[1, 40] = fault
    y = np.asarray(matmul(a, b, "mxfp4"))
    assert np.isnan(y[1]).all() and np.isfinite(np.delete(y, 1, axis=0)).all()
    a[1, 40], b[70, 2] = 1.0, fault
    y = np.asarray(matmul(a, b, "mxfp4"))
    assert np.isnan(y[:, 2]).all() and np.isfinite(np.delete(y, 2, axis=1)).all()


@pytest.mark.parametrize("exponent", [-126, -124, -118, 127], ids="amax=2^{}".format)
def test_A3_extreme_scales_meet_their_opposite_in_a_product(exponent):
    rng = np.random.default_rng(0)
    a = np.ldexp(np.float32(1), exponent) * rng.choice(np.float32([-1, 1]), (3, 64))
    b = np.ldexp(rng.normal(size=(64, 5)), -exponent if exponent < 100 else -120)
    b = b.astype(np.float32)
    assert oracle.quantize(a).scales[0, 0] == {-126: 0, -124: 1, -118: 7, 127: 252}[exponent]
    y = np.asarray(matmul(a, b, "mxfp4"))
    want = oracle.quantized_product(a, b)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("zero, byte", [(0.0, 0x00), (-0.0, 0x88)], ids=["plus", "minus"])
def test_A10_zero_block(zero, byte):
    x = _block(3.0, length=96)
    x[32:64] = zero
    for rule in RULES:
        got, _ = _check(x, rule=rule)
        assert np.asarray(got.scales)[1] == 0
        np.testing.assert_array_equal(got.codes[16:32], np.full(16, byte))
        values = np.asarray(dequantize(got))[32:64]
        assert (values == 0).all() and (np.signbit(values) == np.signbit(zero)).all()


@each_dtype
@each_rule
@pytest.mark.parametrize("sign", [1, -1], ids=["plus", "minus"])
def test_A11_ties_go_to_even(sign, rule, dtype):
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype)
    under, over = np.nextafter(ties, dtype(0)), np.nextafter(ties, dtype(6))
    x = np.concatenate([[dtype(6)], ties, under, over, np.zeros(10, dtype)]) * dtype(sign)
    got, _ = _check(x, rule=rule)
    assert np.asarray(got.scales)[0] == 127
    values = sign * np.asarray(dequantize(got))
    np.testing.assert_array_equal(values[1:8], [0, 1, 1, 2, 2, 4, 4])
    np.testing.assert_array_equal(values[8:15], [0, 0.5, 1, 1.5, 2, 3, 4])
    np.testing.assert_array_equal(values[15:22], [0.5, 1, 1.5, 2, 3, 4, 6])


@each_rule
@each_format
@pytest.mark.parametrize("byte", [0, 1, 2, 64, 127, 200, 252, 254])
def test_A12_codes_round_trip(byte, fmt, spec, rule):
    count = 2 ** oracle.element_bits(spec)
    codes = np.resize(np.arange(count, dtype=np.uint8), max(count, 32))
    scales = np.full(len(codes) // 32, byte, np.uint8)
    codes[::32] = count // 2 - 1  # the largest, so that each block keeps its scale
    with np.errstate(over="ignore"):
        x = oracle.dequantize(codes, scales, spec).astype(np.float32)
    got, _ = _check(x, fmt=fmt, spec=spec, rule=rule)
    if byte == 254:  # the largest element overflows float32 there: a fault
        np.testing.assert_array_equal(got.scales, np.full_like(scales, 255))
        return
    negative = codes & (count // 2)
    want = np.where(np.abs(x) < oracle.MIN_NORMAL, negative, codes)  # no subnormal input survives
    np.testing.assert_array_equal(got.scales, scales)
    np.testing.assert_array_equal(unpack(got), want)


@each_rule
@each_format
def test_A12_quantizing_twice_changes_nothing(fmt, spec, rule):
    x = np.random.default_rng(0).normal(size=(512, 96)).astype(np.float32)
    once = quantize(x, format=fmt, scale_rule=rule)
    twice = quantize(dequantize(once), format=fmt, scale_rule=rule)
    np.testing.assert_array_equal(dequantize(twice), dequantize(once))
    if rule != "ceil":  # there a block may shrink under half the range, and its scale with it
        np.testing.assert_array_equal(twice.codes, once.codes)


@pytest.mark.parametrize(
    "rule, want", [("floor", [6, 6, 6, 6]), ("even", [6, 6, 8, 8]), ("ceil", [6, 6, 8, 8])]
)
def test_A13_largest_element_by_rule(rule, want):
    x = np.stack([_block(amax) for amax in (6.0, 6.5, 7.0, 7.5)])
    np.testing.assert_array_equal(dequantize(_check(x, rule=rule)[0])[:, 0], want)


TINY = 1e-40
CORNERS = {
    "zero": _block(),
    "minus-zero": _block(fill=-0.0),
    "min-normal": _block(2.0**-126),
    "all-min-normal": _block(fill=-(2.0**-126)),
    "twice-min-normal": _block(2.0**-125, -(2.0**-126)),
    "min-subnormal": _block(2.0**-149, -(2.0**-149)),
    "max-subnormal": _block(np.nextafter(np.float32(2.0**-126), np.float32(0))),
    "all-subnormal": _block(fill=-TINY),
    "one-with-subnormal": _block(1.0, TINY, -TINY),
    "min-normal-with-subnormal": _block(2.0**-126, TINY, -TINY),
    "mixed-inf": _block(1.0, np.inf, -3.0),
    "mixed-minus-inf": _block(1.0, -np.inf, -3.0),
    "mixed-nan": _block(1.0, np.nan, -3.0),
    "nan-inf-subnormal": _block(np.nan, -np.inf, TINY),
    "six": _block(6.0, -6.0),
    "six-large": _block(6 * 2.0**100, -6 * 2.0**100),
    "six-small": _block(6 * 2.0**-120, -6 * 2.0**-120),
    "float-max": _block(F32_MAX, -F32_MAX, 1.0),
    "all-float-max": _block(fill=F32_MAX),
    "cap-even": _block(1.75 * 2.0**127),
    "under-cap-even": _block(np.nextafter(np.float32(1.75 * 2.0**127), np.float32(0))),
    "cap-ceil": _block(np.nextafter(np.float32(1.5 * 2.0**127), np.float32(np.inf))),
    "under-cap-ceil": _block(1.5 * 2.0**127),
    "huge-with-tiny": _block(2.0**126, fill=2.0**-126),
    "one-with-thirty-one-tiny": _block(1.0, fill=2.0**-20),
    "negative-underflow": _block(6.0, -1e-3),
    "last-place": np.roll(_block(5.0), 31),
    "subnormal-result": _block(2.0**-126, 1.25 * 2.0**-126),
}


@each_rule
@each_format
@pytest.mark.parametrize("corner", CORNERS)
def test_A14_corner(corner, fmt, spec, rule):
    x = CORNERS[corner]
    got, want = _check(x, fmt=fmt, spec=spec, rule=rule)
    eager = ah.quantize(jnp.asarray(x), format=fmt, scale_rule=rule)
    oracle.assert_equal(eager, want)
    values = want.dequantize().astype(np.float32)
    np.testing.assert_array_equal(dequantize(got), values)
    np.testing.assert_array_equal(np.signbit(dequantize(got)), np.signbit(values))
    if np.isfinite(x).all():
        assert np.isfinite(values).all()


@each_rule
def test_A14_corners_in_bf16_and_f16(rule):
    with np.errstate(over="ignore"):
        for dtype in (ml_dtypes.bfloat16, np.float16):
            _check(np.stack(list(CORNERS.values())).astype(dtype), rule=rule)


def test_A16_bytes_by_hand():
    x = _block(0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6, -0.0)
    got = quantize(x)
    assert np.asarray(got.codes)[:8].tobytes().hex() == "21436507a9cbed8f"
    assert np.asarray(got.scales).tolist() == [127]
    # E2M3 in steps of an eighth below 2, four codes in three bytes
    x = _block(0.125, 0.25, 0.375, 0.5, 7.5, -7.5, -0.125, 1.0)
    got = quantize(x, format=ah.MXFP6)
    assert np.asarray(got.codes)[:6].tobytes().hex() == "813010df1f22"


@each_rule
@pytest.mark.parametrize("axis", [-1, -2])
def test_B16_eager_jit_vmap_and_scan_agree(axis, rule):
    x = np.stack([np.tile(block, (33, 3)) for block in CORNERS.values()])
    x[:, ::2] = np.random.default_rng(0).normal(size=x[:, ::2].shape)
    want = oracle.quantize(x, axis=axis, rule=rule)
    f = functools.partial(ah.quantize, axis=axis, scale_rule=rule)
    x = jnp.asarray(x)
    oracle.assert_equal(f(x), want)
    oracle.assert_equal(jax.jit(f)(x), want)
    oracle.assert_equal(jax.vmap(f)(x), want)
    oracle.assert_equal(jax.jit(jax.vmap(f))(x), want)
    oracle.assert_equal(jax.lax.scan(lambda carry, row: (carry, f(row)), None, x)[1], want)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        pytest.param({"axis": 2}, ValueError, ["quantize", "axis 2", "(3, 40)"], id="axis"),
        pytest.param({"axis": -3}, ValueError, ["quantize", "axis -3", "(3, 40)"], id="low-axis"),
        pytest.param(
            {"scale_rule": "round"}, ValueError, ["'round'", "'even'", "'ceil'"], id="rule"
        ),
        pytest.param({"rounding": "up"}, ValueError, ["'up'", "'stochastic'"], id="rounding"),
        pytest.param({"rounding": "stochastic"}, ValueError, ["key"], id="no-key"),
        pytest.param({"backend": "abacus"}, NotImplementedError, ["abacus"], id="backend"),
    ],
)
def test_quantize_rejects(arguments, error, words):
    with pytest.raises(error) as caught:
        ah.quantize(jnp.ones((3, 40), jnp.float32), **arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "complex64", "bool"])
def test_quantize_rejects_dtype(dtype):
    with pytest.raises(TypeError, match=f"quantize.*{dtype}.*float32"):
        ah.quantize(jnp.ones((3, 40), dtype))


def test_quantize_rejects_a_scalar():
    with pytest.raises(ValueError, match="quantize"):
        ah.quantize(jnp.float32(1))


@pytest.mark.parametrize("rule", ["even", "floor"])
def test_quantize_rejects_stochastic_rounding_under_a_rule_that_clips(rule, key):
    with pytest.raises(ValueError, match="ceil"):
        ah.quantize(jnp.ones(32), rounding="stochastic", scale_rule=rule, key=key)
