"""HALO in MXFP4 against its formula in float64, operands quantized by the oracle."""

import jax.numpy as jnp
import numpy as np
import pytest

import adahop_jax as ah
from tests import oracle
from tests.train.recipes.products import assert_near, float64, results, seeds, shapes, tensors
from train.recipes import halo


def q(t, axis):
    return oracle.quantize(t, axis=axis).dequantize()


def h(t, axis):
    return oracle.hadamard(oracle.to_float32(t), axis=axis, size=32)


def halo_by_hand(x, w, dy):
    x, w, dy = (np.asarray(t).astype(np.float32) for t in (x, w, dy))
    y = q(h(x, 1), 1) @ q(h(w, 0), 0) / 32
    turned_dx = q(h(dy, 0), 1) @ q(w, 1).T
    turned_dw = q(h(x, 1), 0).T @ q(dy, 0)
    matrix = oracle.hadamard(np.eye(32, dtype=np.float32), axis=0, size=32).astype(np.float64)

    def back(t):
        return np.concatenate([matrix.T @ t[i : i + 32] for i in range(0, len(t), 32)]) / 32

    return y, back(turned_dx)[: len(x)], back(turned_dw)[: len(w)]


@pytest.mark.parametrize("shape", shapes.values(), ids=shapes)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_products_against_the_definition(shape, dtype):
    x, w, dy = tensors(shape, dtype)
    got = results(halo.product, x, w, dy, seeds(0))
    for ours, want in zip(got, halo_by_hand(x, w, dy), strict=True):
        assert_near(ours, want, dtype)


def test_forward_is_that_of_iht():
    x, w, dy = tensors(shapes["odd"])
    got = results(halo.product, x, w, dy, seeds(0))[0]
    assert_near(got, float64(ah.matmul(x, w, "iht"))[0])


def test_rows_of_dy_are_spread_over_tokens():
    """What the outer transform does: a token 1,000 times larger shares its error with its block."""
    x, w, dy = tensors((64, 32, 64))
    dy = dy.at[3].multiply(1000.0)
    _, dx, _ = results(halo.product, x, w, dy, seeds(0))
    want = float64(dy)[0] @ float64(w)[0].T
    error = np.linalg.norm(float64(dx)[0] - want, axis=1)
    others = np.delete(error[:32], 3)
    assert others.min() > 3 * error[32:].max() and others.max() < 6 * others.min()
