"""A compiled training step of `Dense`: which instructions it reaches, what it keeps, and that
transformations change nothing."""

import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adahop_jax as ah
from tests.dense import PLANS, assert_near, assert_same, backend, layer_plan, normal, products

pytestmark = pytest.mark.gpu

TOKENS, IN, OUT = 512, 256, 384
SIX = ah.OperandSpec(format="mxfp6", hadamard=32)


def _arguments():
    kernel = normal(0, IN, OUT)
    x, dy = (normal(i, TOKENS, n, dtype=jnp.bfloat16) for i, n in ((1, IN), (2, OUT)))
    return {"params": {"kernel": kernel}}, x, dy


def _layer(plan, features=OUT):
    return ah.Dense(features, plan=plan, use_bias=False, dtype=jnp.bfloat16)


def _compiled(plan):
    layer = _layer(plan)
    return jax.jit(lambda *a: products(layer, *a)).lower(*_arguments()).compile()


def kernels_in(hlo):
    """What jax-triton's calls carry in a serialized HLO module: PTX and metadata of each kernel.

    They are compressed in the attribute `opaque`, a string as MLIR prints it.
    """
    found = re.findall(rb'opaque = "((?:[^"\\]|\\.)*)"', hlo, re.DOTALL)
    return [zlib.decompress(_unescaped(text)) for text in found]


def _unescaped(text):
    def byte(match):
        return b"\\" if match[1] == b"\\" else bytes([int(match[1], 16)])

    return re.sub(rb"\\(\\|[0-9A-F]{2})", byte, text)


@pytest.mark.parametrize(
    "plan, elements, count",
    [
        (PLANS["full"], "e5m2.e5m2", 0),
        (PLANS["mxfp4"], "e5m2.e5m2", 3),
        (PLANS["iht"], "e5m2.e5m2", 3),
        (PLANS["oe-lhs"], "e5m2.e5m2", 3),
        (PLANS["oe-rhs"].with_stochastic_dy(), "e5m2.e5m2", 3),
        (ah.Plan(default=layer_plan("full", "oe(w)", "iht")), "e5m2.e5m2", 2),
        (ah.Plan.uniform(ah.ProductPlan(lhs=SIX, rhs=SIX)), "e4m3.e4m3", 3),
    ],
    ids=["full", "mxfp4", "iht", "oe-lhs", "oe-rhs-stochastic", "mixed", "mxfp6"],
)
def test_planned_products_reach_fp8_matrix_units(plan, elements, count):
    if not backend().endswith(":fp8"):
        pytest.skip(f"wgmma is Hopper's; products run on {backend()} here")
    layer, (variables, x, dy) = _layer(plan), _arguments()

    def step(variables, x, dy, key):
        return products(layer, variables, x, dy, {"quantize": key})

    compiled = jax.jit(step).lower(variables, x, dy, jax.random.key(0)).compile()
    (module,) = compiled.runtime_executable().hlo_modules()
    kernels = kernels_in(module.as_serialized_hlo_module_proto())
    wanted = f"wgmma.mma_async.sync.aligned.m64n[0-9]+k32.f32.{elements}".encode()
    assert sum(bool(re.search(wanted, kernel)) for kernel in kernels) == count
    # Besides, they only rotate.
    others = {m for kernel in kernels for m in re.findall(rb"wgmma\.mma_async\S*", kernel)}
    turning = b"wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
    assert all(m == turning or re.match(wanted, m) for m in others)
    assert bool(kernels) == bool(count)


@pytest.mark.parametrize("plan", ["mxfp4", "iht", "oe-rhs"])
def test_what_is_kept_of_x_is_packed(plan):
    layer, (variables, x, _) = _layer(PLANS[plan]), _arguments()
    pullback = jax.eval_shape(lambda v, x: jax.vjp(layer.apply, v, x)[1], variables, x)
    kept = {(leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(pullback) if leaf.size}
    assert kept == {
        ("float32", (IN, OUT)),  # the parameter itself
        ("uint8", (IN, TOKENS // 2)),
        ("uint8", (IN, TOKENS // 32)),
    }


@pytest.mark.parametrize("plan", ["iht", "oe-lhs", "oe-rhs"])
def test_a_step_repeats_itself(plan):
    """Also once XLA has captured it as a CUDA graph."""
    compiled = _compiled(PLANS[plan])
    arguments = _arguments()
    first = jax.tree.map(np.asarray, compiled(*arguments))
    for _ in range(5):
        assert_same(jax.tree.map(np.asarray, compiled(*arguments)), first)


class TestTransformations:
    """As a Python loop, bit for bit but for the order of float32 sums."""

    COUNT = 3
    PLAN = PLANS["oe-rhs"]

    def _loop(self, stacked):
        run = jax.jit(lambda *a: products(_layer(self.PLAN), *a))
        each = [run(*jax.tree.map(lambda leaf, i=i: leaf[i], stacked)) for i in range(self.COUNT)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

    def _stacked(self):
        def vary(leaf):
            factors = jnp.asarray([1, -2, 0.5], leaf.dtype)
            return jnp.stack([jnp.roll(leaf, i, axis=0) * factors[i] for i in range(self.COUNT)])

        return jax.tree.map(vary, _arguments())

    def test_vmap(self):
        stacked = self._stacked()
        mapped = jax.jit(jax.vmap(lambda *a: products(_layer(self.PLAN), *a)))
        assert_near(mapped(*stacked), self._loop(stacked), 1e-6)

    def test_scan(self):
        stacked = self._stacked()

        def body(carry, each):
            return carry, products(_layer(self.PLAN), *each)

        got = jax.jit(lambda stacked: jax.lax.scan(body, None, stacked)[1])(stacked)
        assert_near(got, self._loop(stacked), 1e-6)

    def test_grad_of_scan_and_remat(self):
        """Three square layers, one after the other."""
        kernels = {"params": {"kernel": normal(3, self.COUNT, IN, IN) / IN**0.5}}
        x, layer = _arguments()[1], _layer(self.PLAN, IN)

        def one(x, variables):
            return layer.apply(variables, x), None

        def scanned(variables, x, wrap):
            return jnp.sum(jax.lax.scan(wrap(one), x, variables)[0].astype(jnp.float32))

        def looped(variables, x):
            for i in range(self.COUNT):
                x, _ = one(x, jax.tree.map(lambda leaf, i=i: leaf[i], variables))
            return jnp.sum(x.astype(jnp.float32))

        want = jax.jit(jax.value_and_grad(looped, argnums=(0, 1)))(kernels, x)
        for wrap in (lambda f: f, jax.checkpoint):
            got = jax.jit(
                jax.value_and_grad(lambda v, x, w=wrap: scanned(v, x, w), argnums=(0, 1))
            )(kernels, x)
            assert_near(got, want, 1e-5)
