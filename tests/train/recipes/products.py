"""What the tests of recipes with a product of their own share: tensors, and what is drawn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from adahop_jax.reference.hadamard import random_signs
from tests import oracle
from tests.dense import jit_fast

EVEN, ODD = (64, 96, 32), (41, 75, 66)  # tokens, in, out
shapes = {"even": EVEN, "odd": ODD}


def tensors(shape, dtype=jnp.float32, seed=0):
    """x, w and dy with rows and columns of very different size, all of them bfloat16 values."""
    tokens, width, out = shape
    rng = np.random.default_rng(seed)

    def one(rows, columns):
        t = rng.standard_normal((rows, columns)) * np.exp(rng.standard_normal((rows, 1)))
        t = jnp.asarray(t * np.exp(rng.standard_normal((1, columns))), jnp.bfloat16)
        return t.astype(dtype)

    return one(tokens, width), one(width, out), one(tokens, out)


def seeds(count, seed=0):
    return jax.random.bits(jax.random.key(seed), (count, 2), jnp.uint32)


@functools.partial(jit_fast, static_argnums=0)
def results(product, x, w, dy, drawn):
    """Y, dX and dW."""
    y, pullback = jax.vjp(lambda x, w: product(x, w, drawn), x, w)
    return y, *pullback(dy)


def float64(*arrays):
    return tuple(np.asarray(a).astype(np.float64) for a in arrays)


def noise(shape, seed):
    """Uniform in [0, 1), from the oracle's own Philox."""
    words = oracle.random_words(shape, np.asarray(seed))
    return (words >> np.uint64(8)).astype(np.float64) * 2.0**-24


def signs(size, seed):
    drawn = np.asarray(random_signs(size, jnp.asarray(seed)))
    assert set(np.unique(drawn)) <= {-1.0, 1.0}
    return drawn.astype(np.float64)


def padded(t, *multiples):
    return np.pad(t, [(0, -n % m) for n, m in zip(t.shape, multiples, strict=True)])


def rotation(length, size):
    """The normalized Sylvester-Hadamard matrix of blocks of `size`, block-diagonal."""
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return np.kron(np.eye(length // size), h / np.sqrt(size))


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest(v):
    """By looking at every element; of two equally near ones that of the even code."""
    distance = np.abs(np.minimum(np.abs(v), 6)[..., None] - E2M1)
    order = np.argsort(distance + 1e-9 * (np.arange(8) % 2), axis=-1)
    return np.sign(v) * E2M1[order[..., 0]]


def stochastic(v, u):
    """Up to the next element iff u is under the way there."""
    a = np.minimum(np.abs(v), 6)
    low = np.clip(np.searchsorted(E2M1, a, side="right") - 1, 0, 6)
    share = (a - E2M1[low]) / (E2M1[low + 1] - E2M1[low])
    return np.sign(v) * np.where(u < share, E2M1[low + 1], E2M1[low])


def unbiased_mxfp4(v, u):
    """Algorithm 2 of Tseng et al. along the last axis: floor scale, 3/4, stochastic, 4/3."""
    blocks = v.reshape(*v.shape[:-1], -1, 32)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    scale = 2.0 ** (np.floor(np.log2(np.where(largest > 0, largest, 1))) - 2)
    elements = stochastic(0.75 * blocks / scale, u.reshape(blocks.shape))
    return (elements * scale * 4 / 3).reshape(v.shape)


def assert_near(got, want, dtype=jnp.float32):
    """Up to float32's accumulation, or one rounding to `dtype`."""
    assert got.dtype == dtype and got.shape == want.shape
    got = np.asarray(got).astype(np.float64)
    unit = 2.0**-8 if dtype == jnp.bfloat16 else 0
    np.testing.assert_array_less(
        np.abs(got - want), unit * np.abs(want) + 2e-6 * np.abs(want).max() + 1e-30
    )
