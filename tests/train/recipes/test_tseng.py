"""Tseng et al. against their algorithms in float64, with the same random bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adahop_jax as ah
from adahop_jax._product import product_seeds
from tests.train.recipes.products import (
    float64,
    noise,
    padded,
    rotation,
    shapes,
    signs,
    tensors,
    unbiased_mxfp4,
)
from train.recipes import tseng

LAYER = tseng.PLAN.default


def layer_results(x, w, dy, key):
    """Y, dX, dW, and the seeds of the two products of the backward pass."""
    layer = ah.Dense(w.shape[1], use_bias=False, plan=tseng.PLAN)
    drawn = {}

    def noting(name, plan, key):
        drawn[name] = product_seeds(name, plan, key)
        return drawn[name]

    def apply(x, w, key):
        y, pullback = jax.vjp(
            lambda x, w: layer.apply({"params": {"kernel": w}}, x, rngs={"quantize": key}), x, w
        )
        return y, *pullback(dy), dict(drawn)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adahop_jax._dense.product_seeds", noting)
        return jax.jit(apply)(x, w, key)


def by_hand(a, b, drawn, a_stored, b_stored):
    """The product over the last axis of both, rotated by S H of 64, unbiased in MXFP4.

    An element's noise goes by its place in the tensor as it is stored: along the last axis, or not.
    """
    flip = signs(64, drawn["signs"])
    operands = []
    for t, (name, along_last) in ((a, a_stored), (b, b_stored)):
        t = padded(t, 1, 64)
        u = noise(t.shape if along_last else t.shape[::-1], drawn[name])
        turned = (t * np.tile(flip, t.shape[1] // 64)) @ rotation(t.shape[1], 64)
        operands.append(unbiased_mxfp4(turned, u if along_last else u.T))
    return operands[0] @ operands[1].T


@pytest.mark.parametrize("shape", shapes.values(), ids=shapes)
def test_products_against_the_definition(shape, key):
    x, w, dy = tensors(shape)
    y, dx, dw, drawn = layer_results(x, w, dy, key)
    x, w, dy = float64(x, w, dy)
    np.testing.assert_allclose(y, x @ w, rtol=0, atol=2e-6 * np.abs(x @ w).max())
    want_dx = by_hand(dy, w, drawn["dgrad"], ("dy", True), ("w", True))
    want_dw = by_hand(x.T, dy.T, drawn["wgrad"], ("x", False), ("dy", False))
    for got, want in ((dx, want_dx), (dw, want_dw)):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_mean_over_draws_is_the_product():
    """Of both gradients: 4/3 of each operand and the transform are undone."""
    x, w, dy = tensors((64, 64, 64))
    draws = 512
    keys = jax.random.split(jax.random.key(3), draws)
    layer = ah.Dense(64, use_bias=False, plan=tseng.PLAN)

    @jax.jit
    @jax.vmap
    def many(key):
        _, pullback = jax.vjp(
            lambda x, w: layer.apply({"params": {"kernel": w}}, x, rngs={"quantize": key}), x, w
        )
        return pullback(dy)

    x64, w64, dy64 = float64(x, w, dy)
    for got, want in zip(many(keys), (dy64 @ w64.T, x64.T @ dy64), strict=True):
        got = np.asarray(got, np.float64)
        z = (got.mean(axis=0) - want) / (got.std(axis=0, ddof=1) / np.sqrt(draws))
        assert np.abs(z).max() < 6 and 0.8 < np.square(z).mean() < 1.25


def test_powers_of_two_are_where_the_scale_rules_part():
    """A block of fours: `floor` takes scale 1, for an element of 3, and `ceil` 1/2, for 6."""
    v = np.full((1, 32), 4.0, np.float32)
    got = ah.quantize(jnp.asarray(0.75 * v), axis=1, scale_rule=tseng.OPERAND.scale_rule)
    assert np.asarray(got.scales)[0, 0] == 126
    np.testing.assert_array_equal(np.asarray(got.dequantize()), 3.0)
    np.testing.assert_array_equal(unbiased_mxfp4(v.astype(np.float64), np.zeros(v.shape)), 4.0)


def test_plan_says_what_the_paper_says():
    assert LAYER.fwd.is_full
    for product in (LAYER.dgrad, LAYER.wgrad):
        for spec in product.specs:
            assert (spec.hadamard, spec.signs, spec.pre_scale) == (64, "random", 0.75)
            assert (spec.format, spec.rounding) == ("mxfp4", "stochastic")
    assert ah.Plan.from_json(tseng.PLAN.to_json()) == tseng.PLAN
