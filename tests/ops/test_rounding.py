"""Stochastic rounding: the bits of Philox-4x32-10 at each element's index, and their statistics."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import adahop_jax as ah
from tests import oracle

FORMATS = [
    pytest.param(ah.MXFP4, oracle.E2M1, id="mxfp4"),
    pytest.param(ah.MXFP6, oracle.E2M3, id="mxfp6"),
]
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}

each_format = pytest.mark.parametrize("fmt, spec", FORMATS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)

stochastic = jax.jit(
    functools.partial(ah.quantize, rounding="stochastic"), static_argnames=("axis", "format")
)

dequantize = jax.jit(lambda q: q.dequantize())


def _seed(key):
    return np.asarray(jax.random.bits(key, (2,), jnp.uint32)).tolist()


def _check(x, key, *, axis=-1, fmt=ah.MXFP4, spec=oracle.E2M1):
    got = stochastic(jnp.asarray(x), axis=axis, format=fmt, key=key)
    oracle.assert_equal(got, oracle.quantize(x, axis=axis, fmt=spec, key=_seed(key)))
    return got


@each_format
@pytest.mark.parametrize(
    "shape, axis",
    [((40,), -1), ((7, 95), -1), ((95, 7), 0), ((33, 33), 0), ((33, 33), 1)]
    + [((3, 37, 5), axis) for axis in range(3)]
    + [((2, 3, 4, 33), axis) for axis in range(-4, 0)]
    + [((0, 5), 0), ((3, 0), 1), ((1, 1), 0), ((1, 129), 1), ((129, 1), 0)],
    ids=str,
)
def test_stochastic_bits_are_those_of_the_logical_element(shape, axis, fmt, spec, key):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    _check(x, key, axis=axis, fmt=fmt, spec=spec)


@each_dtype
@pytest.mark.parametrize("seed", range(3))
def test_stochastic_bits_over_wide_exponents(seed, dtype):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(4096, 96)) * np.exp2(rng.integers(-8, 1, (4096, 96)))
    limit = 12 if dtype is np.float16 else 120
    x = (x * np.exp2(rng.integers(-limit, limit, (4096, 1)))).astype(dtype)
    _check(x, jax.random.key(seed))


def test_stochastic_special_blocks(key):
    tiny, top = np.float32(1e-40), np.finfo(np.float32).max
    x = np.tile(np.float32([[0], [-0.0], [np.nan], [np.inf], [-tiny], [top], [2.0**-126]]), (1, 32))
    x[5, 1:] = np.geomspace(2.0**100, top, 31).astype(np.float32)
    x[6, 1:] = 2.0**-126 * np.linspace(1, 4, 31)
    values = np.asarray(dequantize(_check(x, key)))
    assert np.isfinite(values[[0, 1, 4, 5, 6]]).all() and np.isnan(values[2:4]).all()


@pytest.mark.parametrize(
    "make",
    [jax.random.key, functools.partial(jax.random.key, impl="rbg"), jax.random.PRNGKey],
    ids=["typed", "rbg", "raw"],
)
def test_stochastic_takes_keys_of_any_kind(make):
    x = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    _check(x, make(3))


def test_stochastic_follows_the_key(key):
    x = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    one, same, other = (stochastic(x, key=k).codes for k in (key, key, jax.random.key(1)))
    np.testing.assert_array_equal(one, same)
    assert np.mean(np.asarray(one) != np.asarray(other)) > 0.3


def test_stochastic_words_do_not_repeat_over_rows_and_columns(key):
    x = np.full((64, 64), 2.25, np.float32)
    x[:, ::32] = 6.0
    up = np.asarray(dequantize(stochastic(x, key=key))) == 3.0
    assert len(np.unique(up, axis=0)) == 64
    assert len(np.unique(np.delete(up, [0, 32], axis=1), axis=1)[0]) == 62


def test_stochastic_does_not_depend_on_axis_or_padding(key):
    x = np.random.default_rng(0).uniform(-6, 6, (128, 96)).astype(np.float32)
    x[::32, ::32] = x[np.arange(0, 128, 32) + 5, :] = 6.0
    x[:, [1, 33, 65]] = 6.0  # every block of either axis holds a 6, so all scales are 1
    along_rows, along_columns = (stochastic(x, axis=axis, key=key) for axis in (1, 0))
    assert np.unique(along_rows.scales) == np.unique(along_columns.scales) == 127
    values = np.asarray(dequantize(along_rows))
    np.testing.assert_array_equal(dequantize(along_columns), values)
    for axis in (0, 1):
        part = dequantize(stochastic(x[:70, :75], axis=axis, key=key))
        np.testing.assert_array_equal(part, values[:70, :75])


def test_stochastic_eager_jit_vmap_and_scan_agree(key):
    x = np.random.default_rng(0).normal(size=(4, 33, 64)).astype(np.float32)
    keys = jax.random.split(key, 4)
    want = [oracle.quantize(x[i], key=_seed(keys[i])) for i in range(4)]
    f = functools.partial(ah.quantize, rounding="stochastic")

    def by_key(x, key):
        return f(x, key=key)

    for i in range(4):
        oracle.assert_equal(by_key(jnp.asarray(x[i]), keys[i]), want[i])
    scanned = jax.lax.scan(lambda carry, xs: (carry, by_key(*xs)), None, (jnp.asarray(x), keys))[1]
    for got in (jax.vmap(by_key)(x, keys), jax.jit(jax.vmap(by_key))(x, keys), scanned):
        for i in range(4):
            oracle.assert_equal(jax.tree.map(lambda leaf, i=i: leaf[i], got), want[i])


# Found by search: under jax.random.key(KEY) the word of element (ROW, COL) has 24 leading zeros.
ZERO_DRAW = {"key": 3802, "row": 2, "col": 25}


@pytest.mark.parametrize("exponent", [-1, -30, -100, -125])
def test_stochastic_draw_of_zero_rounds_up_whatever_is_not_exact(exponent):
    row, col = ZERO_DRAW["row"], ZERO_DRAW["col"]
    x = np.zeros((row + 1, 64), np.float32)
    x[:, ::32] = 6 * np.exp2(min(exponent + 100, 120))
    x[row, col] = np.exp2(exponent)
    key = jax.random.key(ZERO_DRAW["key"])
    assert oracle.random_words(x.shape, _seed(key))[row, col] >> 8 == 0
    _check(x, key)
    x[row, col] = 0.0
    assert np.asarray(dequantize(_check(x, key)))[row, col] == 0


@pytest.mark.parametrize(
    "fmt, spec, dtype, parts",
    [
        pytest.param(ah.MXFP4, oracle.E2M1, np.float32, 16, id="mxfp4-f32"),
        pytest.param(ah.MXFP4, oracle.E2M1, ml_dtypes.bfloat16, 16, id="mxfp4-bf16"),
        pytest.param(ah.MXFP4, oracle.E2M1, np.float16, 16, id="mxfp4-f16"),
        pytest.param(ah.MXFP6, oracle.E2M3, np.float32, 4, id="mxfp6-f32"),
    ],
)
def test_C36_stochastic_is_unbiased_in_every_cell(fmt, spec, dtype, parts):
    draws, chunks = 50_000, 4
    grid = oracle.grid(spec)
    low, high = np.repeat(grid[:-1], parts), np.repeat(grid[1:], parts)
    fraction = np.tile(np.arange(parts) / parts, len(grid) - 1)
    points = low + (high - low) * fraction
    blocks = -(-len(points) // 31)  # of 31 points and the largest element, so that the scale is 1
    row = np.full((blocks, 32), grid[-1])
    places = np.flatnonzero(np.arange(row.size) % 32)[: len(points)]
    row.flat[places] = points
    x = jnp.asarray(np.tile(row.reshape(1, -1).astype(dtype), (draws, 1)))
    ups = np.zeros(len(points))
    for chunk in range(chunks):
        values = np.asarray(dequantize(stochastic(x, format=fmt, key=jax.random.key(chunk))))
        values = values[:, places]
        assert ((values == low) | (values == high)).all()
        ups += (values == high).sum(axis=0)
    sigma = np.sqrt(fraction * (1 - fraction) / (draws * chunks))
    assert (np.abs(ups / (draws * chunks) - fraction) <= 4 * sigma).all()


def test_stochastic_mean_shrinks_where_nearest_stays_put(key):
    x = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    keys = jax.random.split(key, 400)
    draws = jax.lax.map(lambda k: stochastic(x, key=k).dequantize(), keys)
    stochastic_error = np.abs(np.asarray(draws, np.float64).mean(axis=0) - x).mean()
    nearest_error = np.abs(np.asarray(dequantize(jax.jit(ah.quantize)(x))) - x).mean()
    assert stochastic_error < nearest_error / 8
