"""The block Hadamard transform: the oracle's butterfly, bit for bit; it cancels in products."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import adahop_jax as ah
from tests import oracle

SIZES = (2, 4, 8, 16, 32, 64, 128)
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}

hadamard = jax.jit(ah.hadamard, static_argnames=("axis", "size"))


def _equal(got, want):
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), want.view(np.uint32))


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("length", [1, 31, 32, 33, 95, 129])
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_hadamard_is_the_butterfly(axis, length, dtype):
    shape = [3, 2, 5]
    shape[axis] = length
    x = (_normal(*shape) * np.exp2(_normal(*shape, seed=1) * 4)).astype(dtype)
    got = hadamard(jnp.asarray(x), axis=axis)
    assert got.dtype == jnp.float32
    _equal(got, oracle.hadamard(x, axis=axis))


@pytest.mark.parametrize("size", SIZES)
def test_hadamard_of_each_size(size):
    x = _normal(7, 3 * size - 1)
    _equal(hadamard(x, size=size), oracle.hadamard(x, size=size))


def test_hadamard_over_wide_exponents():
    rng = np.random.default_rng(0)
    x = _normal(2048, 96) * np.exp2(rng.integers(-80, 120, (2048, 1))).astype(np.float32)
    x *= np.exp2(rng.integers(-12, 1, x.shape)).astype(np.float32)
    _equal(hadamard(x), oracle.hadamard(x))


@pytest.mark.parametrize("size", SIZES)
def test_D41_hadamard_is_its_own_inverse_but_for_its_size(size):
    h = np.asarray(hadamard(np.eye(size, dtype=np.float32), size=size))
    np.testing.assert_array_equal(np.abs(h), np.ones((size, size)))
    np.testing.assert_array_equal(h @ h.T, size * np.eye(size))
    np.testing.assert_array_equal(h, h.T)


def test_D41_gradient_of_hadamard_is_its_transpose():
    x, dy = _normal(5, 40), _normal(5, 64, seed=1)
    _, pull = jax.vjp(lambda x: ah.hadamard(x), jnp.asarray(x))
    np.testing.assert_allclose(
        pull(jnp.asarray(dy))[0], oracle.hadamard(dy)[:, :40], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("k", [32, 40, 96, 137])
@pytest.mark.parametrize("size", [2, 32, 64])
def test_D40_hadamard_cancels_in_products(size, k):
    a, b = _normal(9, k), _normal(k, 11, seed=1)
    left = np.asarray(hadamard(a, axis=1, size=size), np.float64)
    right = np.asarray(hadamard(b, axis=0, size=size), np.float64)
    want = a.astype(np.float64) @ b.astype(np.float64)
    bound = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=0)[None, :]
    assert (np.abs(left @ right / size - want) / bound).max() < 1e-6


@pytest.mark.parametrize("k", [40, 96, 137])
def test_D40_hadamard_cancels_exactly_for_integers(k):
    rng = np.random.default_rng(k)
    a, b = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((9, k), (k, 11)))
    left, right = np.asarray(hadamard(a, axis=1)), np.asarray(hadamard(b, axis=0))
    np.testing.assert_array_equal(left @ right / 32, a @ b)


def test_hadamard_eager_jit_vmap_and_scan_agree():
    x = _normal(6, 33, 70)
    for axis in (-1, -2):
        want = oracle.hadamard(x, axis=axis)

        def f(x, axis=axis):
            return ah.hadamard(x, axis=axis)

        _equal(f(jnp.asarray(x)), want)
        _equal(jax.jit(f)(x), want)
        _equal(jax.vmap(f)(x), want)
        _equal(jax.lax.scan(lambda carry, row, f=f: (carry, f(row)), None, jnp.asarray(x))[1], want)


@pytest.mark.parametrize("shape, axis", [((0, 40), -1), ((0, 40), 0), ((3, 0), 1), ((33,), 0)])
def test_hadamard_any_rank_and_empty(shape, axis):
    x = _normal(*shape)
    _equal(hadamard(x, axis=axis), oracle.hadamard(x, axis=axis))


def test_hadamard_takes_subnormal_inputs_as_zeros():
    x = _normal(4, 64)
    x[:, ::2] = 1e-40
    _equal(hadamard(x), oracle.hadamard(x))


def test_hadamard_overflow_shows_as_a_fault():
    x = np.full((2, 32), np.float32(2.0**127))
    x[1] = 2.0**122  # the largest input that cannot overflow
    q = jax.jit(lambda x: ah.quantize(ah.hadamard(x)))(x)
    assert np.asarray(q.scales)[:, 0].tolist() == [255, 252]


@functools.partial(jax.jit, static_argnames=("axis", "rotate"))
def _quantized(x, axis, rotate):
    return ah.quantize(ah.hadamard(x, axis=axis) if rotate else x, axis=axis).dequantize()


def _product(a, b, rotate):
    """a (M, K) times b (K, N), in float64 from the library's own transform and codes."""
    a, b = (np.asarray(_quantized(x, axis, rotate), np.float64) for axis, x in ((1, a), (0, b)))
    return a @ b / (32 if rotate else 1)


def _error_with_and_without(plant):
    """Mean relative error of products, rotated over plain, where `plant` puts outliers into a."""
    errors = {True: 0.0, False: 0.0}
    for seed in range(6):
        a, b = _normal(128, 96, seed=seed), _normal(96, 64, seed=seed + 100)
        plant(a)
        want = a.astype(np.float64) @ b.astype(np.float64)
        for rotate in errors:
            miss = np.linalg.norm(_product(a, b, rotate) - want)
            errors[rotate] += miss / np.linalg.norm(want)
    return errors[True] / errors[False]


def test_D45_hadamard_spreads_outlier_columns():
    def plant(a):
        a[:, [5, 37, 70]] *= 15

    assert 0.6 < _error_with_and_without(plant) < 0.85


def test_D45_hadamard_leaves_outlier_rows_as_they_are():
    def plant(a):
        a[[5, 37, 70]] *= 15

    assert 0.95 < _error_with_and_without(plant) < 1.05


def test_rotated_product_is_the_oracles_bit_for_bit():
    a, b = _normal(16, 137), _normal(137, 8, seed=1)
    np.testing.assert_array_equal(
        _product(a, b, rotate=True), oracle.quantized_product(a, b, rotate=True)
    )


@pytest.mark.parametrize("size", [0, 3, 12, -32])
def test_hadamard_rejects_size(size):
    with pytest.raises(ValueError, match=f"hadamard.*{size}.*power of two"):
        ah.hadamard(jnp.ones((3, 40), jnp.float32), size=size)


@pytest.mark.parametrize("axis", [2, -3])
def test_hadamard_rejects_axis(axis):
    with pytest.raises(ValueError, match=f"hadamard.*axis {axis}"):
        ah.hadamard(jnp.ones((3, 40), jnp.float32), axis=axis)
