"""Extraction at random, the control of outlier extraction: as much, but of any rows or columns.

Its products against float64 stand in test_product.py; here, what is drawn and how it is named.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adahop_jax as ah
from tests.dense import assert_same, backend, normal, run

TOKENS, IN, OUT, K = 128, 64, 96, 5
SIZES = {("fwd", "x"): TOKENS, ("fwd", "w"): OUT, ("dgrad", "dy"): TOKENS, ("dgrad", "w"): IN,
         ("wgrad", "x"): IN, ("wgrad", "dy"): OUT}  # fmt: skip
AXIS = {("fwd", "x"): 0, ("fwd", "w"): 1, ("dgrad", "dy"): 0, ("dgrad", "w"): 1,
        ("wgrad", "x"): 0, ("wgrad", "dy"): 1}  # fmt: skip


def random_product(tensor, k=K):
    rotated = ah.OperandSpec(hadamard=32)
    outliers = ah.OutlierSpec(tensor=tensor, k=k, norm="random")
    return ah.ProductPlan(lhs=rotated, rhs=rotated, outliers=outliers)


def planned(**products):
    iht = ah.ProductPlan.iht()
    return ah.Plan(default=ah.LayerPlan(**{"fwd": iht, "dgrad": iht, "wgrad": iht} | products))


def results(plan, seed):
    x, dy = normal(0, TOKENS, IN), normal(1, TOKENS, OUT)
    variables = {"params": {"kernel": normal(2, IN, OUT)}}
    layer = ah.Dense(OUT, use_bias=False, plan=plan)
    y, by_variables, dx = run(layer, variables, x, dy, {"quantize": jax.random.key(seed)})
    return {"fwd": y, "dgrad": dx, "wgrad": by_variables["params"]["kernel"]}


@functools.cache
def plain():
    return results(ah.Plan.uniform("iht"), 0)


@pytest.mark.parametrize("product, tensor", SIZES, ids="-".join)
def test_k_are_drawn_anew_for_each_key_and_all_alike(product, tensor):
    plan = planned(**{product: random_product(tensor)})
    size, axis = SIZES[product, tensor], AXIS[product, tensor]
    counts, calls = np.zeros(size, int), 40
    for seed in range(calls):
        got = results(plan, seed)
        changed = np.asarray(got[product] != plain()[product]).any(axis=1 - axis)
        assert changed.sum() == K
        counts += changed
        for other in {"fwd", "dgrad", "wgrad"} - {product}:
            np.testing.assert_array_equal(got[other], plain()[other])
    mean = calls * K / size
    # Nearly Poisson: six standard deviations above the mean, and few that were never drawn.
    assert counts.max() < mean + 6 * np.sqrt(mean)
    assert (counts > 0).mean() > 0.7 * (1 - np.exp(-mean))
    assert_same(results(plan, 3), results(plan, 3))


def test_without_replacement_up_to_all():
    """As many as there are give the product in full."""
    got = results(planned(fwd=random_product("x", k=10 * TOKENS)), 0)["fwd"]
    want = np.asarray(normal(0, TOKENS, IN), np.float64) @ np.asarray(normal(2, IN, OUT))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


def test_layers_of_a_group_draw_their_own():
    """And the same as one by one."""

    class Both(nn.Module):
        grouped: bool

        @nn.compact
        def __call__(self, x):
            plan = planned(fwd=random_product("x"), wgrad=random_product("x"))
            layers = [ah.Dense(OUT, use_bias=False, plan=plan, name=name) for name in "ab"]
            if self.grouped:
                return jnp.stack(ah.dense_group(x, *layers))
            return jnp.stack([layer(x) for layer in layers])

    x, dy = normal(0, TOKENS, IN), jnp.stack([normal(1, TOKENS, OUT)] * 2)
    w = {"kernel": normal(2, IN, OUT)}
    variables, rngs = {"params": {"a": w, "b": w}}, {"quantize": jax.random.key(0)}
    got = run(Both(grouped=True), variables, x, dy, rngs)
    assert_same(got, run(Both(grouped=False), variables, x, dy, rngs))
    a, b = got[0]
    rows = [np.flatnonzero((y != plain()["fwd"]).any(axis=1)).tolist() for y in (a, b)]
    assert len(rows[0]) == len(rows[1]) == K and rows[0] != rows[1]


def test_it_is_random_and_says_so():
    plan = planned(dgrad=random_product("w"))
    assert plan.default.is_random and not plan.default.fwd.is_random
    assert plan.default.dgrad.strategy == "iht+random(w)"
    assert ah.Plan.from_json(plan.to_json()) == plan
    assert '"norm": "random"' in plan.to_json()
    layers = [ah.LayerInfo(path="a", tokens=TOKENS, in_features=IN, out_features=OUT)]
    row = ah.explain(plan, layers).rows[1]
    assert (row.strategy, row.k, row.backend) == ("iht+random(w)", K, backend())
    assert row.share_in_dtype == pytest.approx(K / IN)


def test_needs_the_stream_of_random_bits():
    layer = ah.Dense(OUT, plan=planned(fwd=random_product("w")))
    with pytest.raises(ValueError, match="draws random bits"):
        layer.apply({"params": {"kernel": normal(2, IN, OUT), "bias": jnp.zeros(OUT)}},
                    normal(0, TOKENS, IN))  # fmt: skip
