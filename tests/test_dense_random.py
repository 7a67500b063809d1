"""Stochastic rounding of dY: on in every strategy and product, and right on average (C29-C31)."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adahop_jax as ah
from tests import oracle_product as op
from tests.dense import QUANTIZED, assert_same, jit_fast, platform, products

each_plan = pytest.mark.parametrize("plan", QUANTIZED.values(), ids=QUANTIZED)
TOKENS, IN, OUT = 64, 96, 64
KEYS = 64


@functools.cache
def _tensors():
    rng = np.random.default_rng(5)
    x, w, dy = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((TOKENS, IN), (IN, OUT), (TOKENS, OUT))
    )
    return {"x": x, "w": w, "dy": dy}


def _over_keys(plan):
    return _over_keys_on(platform(), plan)


@functools.cache
def _over_keys_on(_, plan):
    """dX and dW of a layer for many keys, the first of them twice."""
    layer = ah.Dense(OUT, plan=plan.with_stochastic_dy(), use_bias=False)
    t = _tensors()

    def one(key):
        variables = {"params": {"kernel": t["w"]}}
        y, dv, dx = products(layer, variables, t["x"], t["dy"], {"quantize": key})
        return y, dx, dv["params"]["kernel"]

    keys = jax.random.split(jax.random.key(0), KEYS)
    keys = jnp.concatenate([keys, keys[:1]])
    y, dx, dw = jit_fast(lambda keys: jax.lax.map(one, keys))(keys)
    return np.asarray(y), {"dgrad": np.asarray(dx), "wgrad": np.asarray(dw)}


def _stochastic(plan):
    """The products of `plan` into which a rounded dY goes."""
    return [name for name in ("dgrad", "wgrad") if not plan.default[name].is_full]


def _touched(plan, name):
    """Where dY's rounding shows: not in what is extracted of dY itself."""
    shape = {"dgrad": (TOKENS, IN), "wgrad": (IN, OUT)}[name]
    touched = np.ones(shape, bool)
    oe = plan.default[name].outliers
    if oe is not None:
        side = op.OPERANDS[name].index(oe.tensor)
        index = op.largest(
            _tensors()[oe.tensor], axis=1 - op.CONTRACT[name][side], k=oe.count(10**6)
        )
        touched[(index, slice(None)) if side == 0 else (slice(None), index)] = False
    return touched


@each_plan
def test_two_keys_differ_and_one_key_repeats(plan):
    _, results = _over_keys(plan)
    assert _stochastic(plan)
    for name in _stochastic(plan):
        got = results[name]
        np.testing.assert_array_equal(got[0], got[-1])
        differs = got[0] != got[1]
        touched = _touched(plan, name)
        assert differs[touched].mean() > 0.9
        assert not differs[~touched].any()


@each_plan
def test_forward_draws_nothing(plan):
    y, _ = _over_keys(plan)
    assert (y == y[:1]).all()


@each_plan
def test_mean_over_keys_is_the_product_of_the_unrounded_dy(plan):
    """The error of a mean over n keys is 1/sqrt(n) of one key's: what is left is no bias."""
    _, results = _over_keys(plan)
    tensors = _tensors()
    for name in _stochastic(plan):
        product = plan.default[name]
        other, side = ("w", 1) if name == "dgrad" else ("x", 0)
        exact = op.operand(tensors[other], axis=op.CONTRACT[name][side], spec=product.specs[side])
        dy = op.rotated(
            tensors["dy"], axis=op.CONTRACT[name][1 - side], spec=product.specs[1 - side]
        )
        pair = (dy, exact) if name == "dgrad" else (exact, dy)
        want = op.contract(*pair, op.CONTRACT[name]) / max(product.lhs.hadamard, 1)
        touched = _touched(plan, name)
        single = np.linalg.norm((results[name][:KEYS] - want)[:, touched], axis=1).mean()
        mean = np.linalg.norm((results[name][:KEYS].mean(0) - want)[touched])
        assert 0.85 < mean * np.sqrt(KEYS) / single < 1.15
        assert 0.05 < single / np.linalg.norm(want[touched]) < 0.4


def test_nearest_is_biased_where_stochastic_is_not():
    """All of dY a quarter of the way between two codes: nearest loses it, the mean keeps it."""
    plan = ah.Plan.uniform("mxfp4")
    dy = np.full((TOKENS, OUT), 1.125, np.float32)
    dy[:, ::32] = 6
    w = np.ones((IN, OUT), np.float32)
    args = {"params": {"kernel": jnp.asarray(w)}}, _tensors()["x"], jnp.asarray(dy)
    means = {}
    for name, p in (("nearest", plan), ("stochastic", plan.with_stochastic_dy())):
        layer = ah.Dense(OUT, plan=p, use_bias=False)
        _, _, dx = jit_fast(lambda k, m=layer: products(m, *args, {"quantize": k}))(
            jax.random.key(1)
        )
        means[name] = float(np.mean(np.asarray(dx)))
    want = dy[0].sum()
    assert abs(means["stochastic"] - want) / want < 0.02
    assert (want - means["nearest"]) / want > 0.05


def test_layers_of_one_model_draw_different_bits():
    class Model(nn.Module):
        plan: ah.Plan

        @nn.compact
        def __call__(self, x):
            return [ah.Dense(OUT, use_bias=False, plan=self.plan, name=n)(x) for n in ("a", "b")]

    t = _tensors()
    model = Model(ah.Plan.uniform("iht").with_stochastic_dy())
    variables = {"params": {n: {"kernel": t["w"]} for n in ("a", "b")}}

    def dw(key):
        _, pullback = jax.vjp(lambda v: model.apply(v, t["x"], rngs={"quantize": key}), variables)
        return pullback([t["dy"], t["dy"]])[0]["params"]

    got = jit_fast(dw)(jax.random.key(0))
    assert (np.asarray(got["a"]["kernel"]) != np.asarray(got["b"]["kernel"])).any()


@pytest.mark.parametrize("rngs", [None, {}, {"params": 0, "dropout": 1}], ids=str)
def test_missing_stream(rngs):
    plan = ah.Plan.uniform("iht").with_stochastic_dy()
    layer = ah.Dense(4, plan=plan)
    x = jnp.ones((2, 8))
    variables = layer.init(jax.random.key(0), x)
    rngs = rngs and {name: jax.random.key(seed) for name, seed in rngs.items()}
    with pytest.raises(ValueError) as error:
        layer.apply(variables, x, rngs=rngs)
    for part in ("Dense ''", "random bits", "'quantize'", "rngs={'quantize': key}"):
        assert part in str(error.value)


def test_random_signs_need_the_stream_too():
    spec = ah.OperandSpec(hadamard=32, signs="random")
    layer = ah.Dense(4, plan=ah.Plan.uniform(ah.ProductPlan(lhs=spec, rhs=spec)))
    x = jnp.ones((2, 8))
    variables = layer.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="'quantize'"):
        layer.apply(variables, x)


def test_an_unused_stream_changes_nothing():
    layer = ah.Dense(OUT, plan=ah.Plan.uniform("iht"), use_bias=False)
    t = _tensors()
    args = {"params": {"kernel": t["w"]}}, t["x"], t["dy"]
    run = jit_fast(lambda rngs: products(layer, *args, rngs))
    assert_same(run({"quantize": jax.random.key(0)}), run(None))
