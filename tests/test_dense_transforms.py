"""`Dense` under JAX' and Flax' transformations, against loops over plain calls."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import adahop_jax as ah
from tests.dense import PLANS, assert_near, assert_same, jit_fast, normal, products, run

SR = PLANS["oe-rhs"].with_stochastic_dy()
LAYER = ah.Dense(24, plan=PLANS["oe-rhs"])
KERNEL = (40, 24)


def _variables(seed):
    return {"params": {"kernel": normal(seed, *KERNEL), "bias": normal(seed + 1, 24)}}


def _stacked(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _loop(variables, xs, dys, layer=LAYER):
    return _stacked([run(layer, v, x, dy) for v, x, dy in zip(variables, xs, dys, strict=True)])


class TestVmap:
    """Results are those of a loop up to the order of summation."""

    COUNT = 3

    def _data(self):
        xs = [normal(10 + i, 33, 40) for i in range(self.COUNT)]
        dys = [normal(20 + i, 33, 24) for i in range(self.COUNT)]
        return [_variables(30 + 2 * i) for i in range(self.COUNT)], xs, dys

    @pytest.mark.parametrize("axes", [(None, 0), (0, None), (0, 0)], ids=["x", "w", "both"])
    def test_over(self, axes):
        variables, xs, dys = self._data()
        variables = [variables[0]] * self.COUNT if axes[0] is None else variables
        xs = [xs[0]] * self.COUNT if axes[1] is None else xs
        want = _loop(variables, xs, dys)
        given = (
            variables[0] if axes[0] is None else _stacked(variables),
            xs[0] if axes[1] is None else jnp.stack(xs),
            jnp.stack(dys),
        )
        mapped = jax.vmap(lambda *a: products(LAYER, *a), in_axes=(*axes, 0))
        assert_near(jit_fast(mapped)(*given), want)

    def test_nested(self):
        variables, xs, dys = self._data()
        each_x = jax.vmap(lambda *a: products(LAYER, *a), in_axes=(None, 0, 0))
        got = jit_fast(jax.vmap(each_x, in_axes=(0, None, None)))(
            _stacked(variables), jnp.stack(xs), jnp.stack(dys)
        )
        assert_near(got, _stacked([_loop([v] * self.COUNT, xs, dys) for v in variables]))

    def test_last_axis(self):
        variables, xs, dys = self._data()
        mapped = jax.vmap(lambda *a: products(LAYER, *a), in_axes=(None, 2, 2))
        got = jit_fast(mapped)(variables[0], jnp.stack(xs, 2), jnp.stack(dys, 2))
        assert_near(got, _loop([variables[0]] * self.COUNT, xs, dys))

    def test_keys(self):
        """One key for all: the same bits for each; a key for each: its own bits."""
        layer = ah.Dense(24, plan=SR)
        x, dy = normal(0, 33, 40), normal(1, 33, 24)

        def dw(key, dy):
            _, gradients, _ = products(layer, _variables(3), x, dy, {"quantize": key})
            return gradients["params"]["kernel"]

        keys = jax.random.split(jax.random.key(0), 2)
        twice = jnp.stack([dy, dy])
        same = jit_fast(jax.vmap(dw, in_axes=(None, 0)))(keys[0], twice)
        np.testing.assert_array_equal(same[0], same[1])
        differ = jit_fast(jax.vmap(dw))(keys, twice)
        assert (np.asarray(differ[0]) != np.asarray(differ[1])).any()


class Block(nn.Module):
    """A residual layer, as nn.scan takes it."""

    plan: ah.Plan

    @nn.compact
    def __call__(self, x, _=None):
        return x + ah.Dense(x.shape[-1], plan=self.plan, name="mix")(nn.silu(x)), None


SPLIT = {"params": True, "quantize": True}


class Stack(nn.Module):
    """Three blocks: "loop", "scan", "remat" or "scan-remat"."""

    plan: ah.Plan
    kind: str = "loop"

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block) if "remat" in self.kind else Block
        if "scan" in self.kind:
            block = nn.scan(block, variable_axes={"params": 0}, split_rngs=SPLIT, length=3)
            return block(self.plan, name="block")(x, None)[0]
        for i in range(3):
            x, _ = block(self.plan, name=f"block_{i}")(x)
        return x


@pytest.fixture(scope="module")
def stacked(platform):
    """Variables of three blocks as the loop has them and as the scan has them, and a batch."""
    x = normal(0, 33, 40)
    looped = Stack(ah.Plan.full()).init(jax.random.key(0), x)["params"]
    blocks = [looped[f"block_{i}"] for i in range(3)]
    return {"params": looped}, {"params": {"block": _stacked(blocks)}}, x


def _gradients(model, variables, x, rngs=None):
    def loss(variables, x):
        return jnp.sum(jnp.sin(model.apply(variables, x, rngs=rngs)))

    return jit_fast(jax.value_and_grad(loss, argnums=(0, 1)))(variables, x)


def test_nn_scan_and_remat_are_the_loop(stacked):
    looped, scanned, x = stacked
    plan = PLANS["oe-rhs"]
    value, (dv, dx) = _gradients(Stack(plan), looped, x)
    want = value, dx, _stacked([dv["params"][f"block_{i}"] for i in range(3)])
    for kind in ("scan", "scan-remat"):
        value, (dv, dx) = _gradients(Stack(plan, kind), scanned, x)
        assert_near((value, dx, dv["params"]["block"]), want)
    value, (dv, dx) = _gradients(Stack(plan, "remat"), looped, x)
    assert_near((value, dx, _stacked([dv["params"][f"block_{i}"] for i in range(3)])), want)


def test_stochastic_bits_are_those_without_remat(stacked):
    """What is computed again in the backward pass is what was computed (C29)."""
    looped, scanned, x = stacked
    rngs = {"quantize": jax.random.key(7)}
    for plain, again, variables in (("loop", "remat", looped), ("scan", "scan-remat", scanned)):
        assert_near(
            _gradients(Stack(SR, again), variables, x, rngs),
            _gradients(Stack(SR, plain), variables, x, rngs),
            1e-6,
        )


def test_stochastic_bits_differ_from_layer_to_layer_of_a_scan():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            def body(dense, carry, x):
                return carry, dense(x)

            scanned = nn.scan(body, variable_axes={"params": 0}, split_rngs=SPLIT)
            return scanned(ah.Dense(24, plan=SR, name="d"), None, x)[1]

    x = jnp.stack([normal(0, 33, 40)] * 2)
    variables = {"params": {"d": _stacked([_variables(3)["params"]] * 2)}}

    def dx(x):
        y, pullback = jax.vjp(
            lambda x: Twice().apply(variables, x, rngs={"quantize": jax.random.key(0)}), x
        )
        return pullback(jnp.stack([normal(1, 33, 24)] * 2))[0]

    first, second = np.asarray(jit_fast(dx)(x))
    assert (first != second).any()


def test_nn_vmap():
    """A kernel for each example."""

    class Experts(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.vmap(ah.Dense, variable_axes={"params": 0}, split_rngs=SPLIT)
            return dense(24, plan=PLANS["oe-rhs"], name="experts")(x)

    variables = [_variables(30), _variables(40)]
    xs, dys = [normal(1, 33, 40), normal(2, 33, 40)], [normal(3, 33, 24), normal(4, 33, 24)]
    given = {"params": {"experts": _stacked(variables)["params"]}}
    y, gradients, dx = run(Experts(), given, jnp.stack(xs), jnp.stack(dys))
    assert_near((y, {"params": gradients["params"]["experts"]}, dx), _loop(variables, xs, dys))


def test_lax_scan_and_checkpoint():
    square = [
        {"params": {"kernel": normal(i, 40, 40), "bias": normal(i + 9, 40)}} for i in range(2)
    ]
    layer = ah.Dense(40, plan=PLANS["oe-rhs"])
    x = normal(0, 33, 40)

    def looped(variables, x):
        for i in range(2):
            x = jnp.tanh(layer.apply(jax.tree.map(lambda v, i=i: v[i], variables), x))
        return jnp.sum(x)

    def scanned(variables, x):
        def body(x, v):
            return jax.checkpoint(lambda v, x: jnp.tanh(layer.apply(v, x)))(v, x), None

        return jnp.sum(lax.scan(body, x, variables)[0])

    got, want = (
        jit_fast(jax.value_and_grad(loss, argnums=(0, 1)))(_stacked(square), x)
        for loss in (scanned, looped)
    )
    assert_near(got, want)


@pytest.mark.parametrize(
    "keys", [jax.random.key, jax.random.PRNGKey, None], ids=["typed", "raw", "none"]
)
def test_no_tracer_leaks(keys):
    layer = ah.Dense(24, plan=LAYER.plan if keys is None else SR)
    rngs = None if keys is None else {"quantize": keys(0)}
    with jax.checking_leaks():
        y, gradients, dx = jax.jit(lambda v, x: _losses(layer, v, x, rngs))(
            _variables(3), normal(0, 8, 40)
        )
    assert np.isfinite(y)
    assert jax.tree.structure(gradients) == jax.tree.structure(_variables(3))


def _losses(layer, variables, x, rngs):
    value, (dv, dx) = jax.value_and_grad(
        lambda v, x: jnp.sum(layer.apply(v, x, rngs=rngs) ** 2), argnums=(0, 1)
    )(variables, x)
    return value, dv, dx


def test_the_kind_of_key_does_not_matter():
    layer = ah.Dense(24, plan=SR)
    args = (_variables(3), normal(0, 33, 40), normal(1, 33, 24))
    assert_same(
        run(layer, *args, {"quantize": jax.random.key(5)}),
        run(layer, *args, {"quantize": jax.random.PRNGKey(5)}),
    )


def test_donated_arguments():
    x = normal(0, 33, 40)

    def step(variables, x):
        gradients = jax.grad(lambda v: jnp.sum(LAYER.apply(v, x) ** 2))(variables)
        return jax.tree.map(lambda v, g: v - 0.01 * g, variables, gradients)

    want = jit_fast(step)(_variables(3), x)
    got = jit_fast(step, donate_argnums=0)(_variables(3), x)
    assert_same(got, want)


class TestRefused:
    """Derivatives that rounding does not have are an error, not a zero."""

    def _loss(self, x):
        return jnp.sum(LAYER.apply(_variables(3), x) ** 2)

    def test_forward_mode(self):
        x = normal(0, 8, 40)
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(self._loss, (x,), (x,))

    @pytest.mark.parametrize("outer", [jax.grad, jax.jacfwd], ids=["grad", "jacfwd"])
    def test_higher_order(self, outer):
        x = normal(0, 8, 40)
        with pytest.raises(TypeError, match="no derivative of its own"):
            outer(lambda x: jnp.sum(jax.grad(self._loss)(x) ** 2))(x)

    @pytest.mark.parametrize("mode", [jax.grad, jax.jacfwd], ids=["grad", "jacfwd"])
    def test_matmul(self, mode):
        a, b = normal(0, 8, 40), normal(1, 40, 8)
        with pytest.raises(TypeError, match="no derivative of its own"):
            mode(lambda a: jnp.sum(ah.matmul(a, b, "iht")))(a)


@pytest.mark.parametrize("tensor", ["x", "w", "dy"])
def test_scan_in_bfloat16_with_several_outliers(tensor):
    """XLA on CPUs has no bfloat16 product with a float32 result in every layout that scan makes."""
    iht, oe = ah.ProductPlan.iht(), ah.ProductPlan.iht(outliers=tensor, k=3)
    layer_plan = ah.LayerPlan(
        fwd=iht if tensor == "dy" else oe,
        dgrad=iht if tensor == "x" else oe,
        wgrad=iht if tensor == "w" else oe,
    )
    layer = ah.Dense(128, dtype=jnp.bfloat16, plan=ah.Plan(default=layer_plan))
    x = jax.random.normal(jax.random.key(0), (64, 128), jnp.bfloat16)
    variables = layer.init(jax.random.key(1), x)

    def loss(variables, steps):
        def body(x, _):
            return layer.apply(variables, x), None

        y = jax.lax.scan(body, x, None, length=steps)[0] if steps else layer.apply(variables, x)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    grad = jax.jit(jax.grad(loss), static_argnums=1)
    once, direct = grad(variables, 1), grad(variables, 0)
    for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(direct), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2 * float(jnp.abs(b).max()))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(grad(variables, 3)))
