"""What the tests of `Dense` share: plans by name, and a layer's result with its gradients.

And on which platform they run: that of JAX' default device, which `platform` in conftest.py sets.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import adahop_jax as ah
from adahop_jax._devices import default_device
from adahop_jax._dispatch import resolve

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


def layer_plan(fwd, dgrad, wgrad):
    """A plan for one layer from strategies: "full", "mxfp4", "iht", "oe(x)", "oe(w)", "oe(dy)"."""

    def product(strategy):
        if strategy.startswith("oe"):
            return ah.ProductPlan.iht(outliers=strategy[3:-1], k=2)
        return ah.ProductPlan.named(strategy)

    return ah.LayerPlan(fwd=product(fwd), dgrad=product(dgrad), wgrad=product(wgrad))


PLANS = {
    "full": ah.Plan.full(),
    "mxfp4": ah.Plan.uniform("mxfp4"),
    "iht": ah.Plan.uniform("iht"),
    "oe-lhs": ah.Plan(default=layer_plan("oe(x)", "oe(dy)", "oe(x)")),
    "oe-rhs": ah.Plan(default=layer_plan("oe(w)", "oe(w)", "oe(dy)")),
    "mixed": ah.Plan(default=layer_plan("full", "oe(w)", "iht")),
}
QUANTIZED = {name: plan for name, plan in PLANS.items() if name != "full"}

# What is compiled once runs once: the arithmetic is the same, and compiling takes most of the time.
COMPILER_OPTIONS = {
    "cpu": {"xla_backend_optimization_level": 0},
    "gpu": {"xla_gpu_autotune_level": 0},
}


def platform():
    """That of JAX' default device."""
    return default_device().platform


def backend():
    """The backend that quantized products take here."""
    return resolve(None)[0]


def jit_fast(function, **arguments):
    """`jax.jit`, with what makes compiling quick on the platform that it is called on."""
    compiled = {
        name: jax.jit(function, compiler_options=options, **arguments)
        for name, options in COMPILER_OPTIONS.items()
    }

    @functools.wraps(function)
    def call(*args, **kwargs):
        return compiled[platform()](*args, **kwargs)

    return call


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def products(layer, variables, x, dy, rngs=None):
    """Y, and the gradients by variables and x."""
    y, pullback = jax.vjp(lambda v, x: layer.apply(v, x, rngs=rngs), variables, x)
    return y, *pullback(dy)


_run = jit_fast(products, static_argnums=0)


def run(layer, variables, x, dy, rngs=None):
    """`products`, compiled."""
    return _run(layer, variables, x, dy, rngs)


def assert_same(got, want):
    """Equal trees of equal dtypes, bit for bit; a NaN equals a NaN."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_near(got, want, tolerance=1e-5):
    """Equal trees up to `tolerance` of each leaf's largest value: another order of summation."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = np.abs(b).max(initial=0)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)
