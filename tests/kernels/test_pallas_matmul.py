"""The Pallas product under JAX's own interpreter of GPU kernels, which looks for races too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from adahop_jax._view import View
from pallas_kernels.matmul import SLOTS, TILE, matmul

RACES = plgpu.InterpretGPUParams(detect_races=True)


@pytest.fixture(autouse=True)
def _interpreted():
    with plgpu.force_gpu_interpret_mode(RACES):
        yield


def _operand(rng, rows, length, dtype):
    values = jnp.asarray(rng.standard_normal((rows, length)), jnp.dtype(dtype))
    return View(values, None, jnp.asarray(rng.integers(110, 145, rows), jnp.uint8), None)


def _values(operand):
    values, refs = (np.asarray(a.astype(jnp.float32), np.float64) for a in operand[::2])
    return values * 2.0 ** (refs - 127)[:, None]


@pytest.mark.parametrize(
    "down, across, steps, processors, chunk, operand, dtype",
    [
        (1, 1, 1, 1, 2048, "float8_e5m2", "bfloat16"),
        (1, 2, 3, 1, 2048, "float8_e4m3fn", "float32"),
        (3, 2, 2, 5, 2048, "float8_e5m2", "float16"),  # more tiles than one for some
        (2, 5, 1, 1, 2048, "float8_e5m2", "bfloat16"),  # one after the other
        (1, 3, SLOTS + 2, 2, 2048, "float8_e5m2", "float32"),  # the ring comes round
        (1, 3, 5, 1, 256, "float8_e5m2", "float32"),  # sums that are broken off
        (2, 1, 4, 7, 512, "float8_e5m2", "bfloat16"),  # and processors with nothing to do
    ],
)
def test_product_is_that_of_the_values(down, across, steps, processors, chunk, operand, dtype):
    rng = np.random.default_rng(down + 10 * across + 100 * steps)
    a = _operand(rng, down * TILE, steps * TILE, operand)
    b = _operand(rng, across * TILE, steps * TILE, operand)
    got = matmul(
        *(a, b),
        scale=1 / 32,
        chunk=chunk,
        dtype=jnp.dtype(dtype),
        processors=processors,
    )
    want = _values(a) @ _values(b).T / 32
    size = np.abs(_values(a)) @ np.abs(_values(b)).T / 32
    assert got.dtype == jnp.dtype(dtype)
    allowed = jnp.finfo(dtype).eps * np.abs(want) + steps * TILE * 2.0**-24 * size
    if dtype == "float16":
        allowed += 2.0**-24
        want = np.where(np.abs(want) > 65504, np.inf * np.sign(want), want)
        np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
        got = np.where(np.isinf(want), 0, got)
        want = np.where(np.isinf(want), 0, want)
    assert (np.abs(np.asarray(got, np.float64) - want) <= allowed).all()


def test_exponents_far_apart_meet_in_range():
    """Rows divided by 2^-120 and columns by 2^110, and the other way round."""
    refs = jnp.asarray(np.where(np.arange(TILE) % 2, 7, 237), jnp.uint8)
    side = View(jnp.full((TILE, TILE), 1.5, jnp.float8_e5m2), None, refs, None)
    got = matmul(
        *(side, side),
        scale=1.0,
        chunk=2048,
        dtype=jnp.dtype(jnp.float32),
        processors=1,
    )
    mixed = np.asarray(got)[::2, 1::2]
    np.testing.assert_array_equal(mixed, 2.25 * TILE * 2.0 ** (7 + 237 - 254))


def test_vmap_is_a_loop():
    rng = np.random.default_rng(3)
    a, b = _operand(rng, 2 * TILE, TILE, "float8_e5m2"), _operand(rng, TILE, TILE, "float8_e5m2")

    def product(a):
        return matmul(
            *(a, b),
            scale=1.0,
            chunk=2048,
            dtype=jnp.dtype(jnp.float32),
            processors=1,
        )

    halves = jax.tree.map(lambda v: v.reshape(2, TILE, *v.shape[1:]), a)
    np.testing.assert_array_equal(jax.vmap(product)(halves).reshape(2 * TILE, TILE), product(a))
