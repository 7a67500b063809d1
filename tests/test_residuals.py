"""What the backward pass is handed, array by array: X packed, parameters, and nothing else.

Read off the leaves of `jax.vjp`'s closure; nothing is computed.
"""

import collections
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import adahop_jax as ah
from adahop_jax import _strategy
from tests.dense import PLANS, assert_near, jit_fast, layer_plan, normal
from tests.jaxprs import equations

TOKENS, IN, OUT = 96, 160, 64
KERNEL = [("float32", (IN, OUT))]
PACKED_X = [("uint8", (IN, TOKENS // 2)), ("uint8", (IN, TOKENS // 32))]
SIX_BITS = [("uint8", (IN, TOKENS * 6 // 8)), ("uint8", (IN, TOKENS // 32))]
SR = PLANS["iht"].with_stochastic_dy()
# Column-column in fwd and wgrad.
PATTERNS = ah.Patterns(x=ah.Pattern.COLUMN, w=ah.Pattern.ROW, dy=ah.Pattern.ROW)
LEVEL_3 = _strategy.layer_plan(PATTERNS, level=3, in_features=IN, out_features=OUT)


def _kept(function, *args):
    """(dtype, shape) of every array that is kept for the backward pass, but for empty ones."""
    pullback = jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *args)
    return sorted(
        (leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(pullback) if math.prod(leaf.shape)
    )


def _bytes(kept):
    return sum(jnp.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in kept)


def _apply(model):
    return lambda variables, x: model.apply(variables, x, rngs={"quantize": jax.random.key(0)})


def _residuals(plan, dtype):
    """Of a layer."""
    layer = ah.Dense(OUT, plan=plan, dtype=dtype)
    x = jax.ShapeDtypeStruct((2, TOKENS // 2, IN), dtype)
    variables = jax.eval_shape(ah.Dense(OUT, dtype=dtype).init, jax.random.key(0), x)
    return _kept(_apply(layer), variables, x)


class TestLayer:
    """X is kept packed, quantized along tokens; W is the parameter; nothing else."""

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
    @pytest.mark.parametrize("plan", ["mxfp4", "iht", "oe-rhs", "mixed"])
    def test_packed(self, plan, dtype):
        assert _residuals(PLANS[plan], dtype) == sorted(PACKED_X + KERNEL)

    def test_stochastic_rounding_adds_its_seeds(self):
        seeds = [("uint32", (2,))] * 2  # of dY in dgrad and wgrad
        assert _residuals(SR, jnp.float32) == sorted(PACKED_X + KERNEL + seeds)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_extracted_columns_of_x(self, dtype):
        columns = [("int32", (2,)), (dtype, (TOKENS, 2))]
        want = sorted(PACKED_X + KERNEL + columns)
        assert _residuals(PLANS["oe-lhs"], jnp.dtype(dtype)) == want

    def test_mxfp6_takes_six_bits(self):
        spec = ah.OperandSpec(format="mxfp6", hadamard=32)
        plan = ah.Plan.uniform(ah.ProductPlan(lhs=spec, rhs=spec))
        assert _residuals(plan, jnp.bfloat16) == sorted(SIX_BITS + KERNEL)

    def test_column_column_at_level_3(self):
        """6.25 bits of a number, and no columns beside."""
        kept = _residuals(ah.Plan(default=LEVEL_3), jnp.bfloat16)
        assert kept == sorted(SIX_BITS + KERNEL)
        assert _bytes(kept) - _bytes(KERNEL) == TOKENS * IN * 25 // 32

    def test_wgrad_in_full_keeps_x(self):
        plan = ah.Plan(default=layer_plan("iht", "iht", "full"))
        want = sorted([("bfloat16", (2, TOKENS // 2, IN)), *KERNEL])
        assert _residuals(plan, jnp.bfloat16) == want

    def test_bytes(self):
        """4.25 bits of a number, and of 2 columns 16 bits more, with a word for each index."""
        of_iht, of_oe = (_residuals(PLANS[name], jnp.bfloat16) for name in ("iht", "oe-lhs"))
        assert _bytes(of_iht) - _bytes(KERNEL) == TOKENS * IN * 17 // 32
        assert _bytes(of_oe) - _bytes(of_iht) == 2 * (TOKENS * 2 + 4)


class Qkv(nn.Module):
    """Three layers of one input, whose paths plans name."""

    plan: ah.Plan
    together: bool = True
    backend: str | None = None

    @nn.compact
    def __call__(self, x):
        options = {"plan": self.plan, "dtype": jnp.bfloat16, "use_bias": False}
        options["backend"] = self.backend
        layers = [ah.Dense(OUT, name=name, **options) for name in ("query", "key", "value")]
        if self.together:
            return ah.dense_group(x, *layers)
        return tuple(layer(x) for layer in layers)


class TestGroup:
    """What several layers want is there once."""

    X = jax.ShapeDtypeStruct((TOKENS, IN), jnp.bfloat16)

    def _kept_of_x(self, *plans, together=True):
        layers = tuple(zip(("query", "key", "value"), plans, strict=True))
        variables = jax.eval_shape(Qkv(ah.Plan.full()).init, jax.random.key(0), self.X)
        found = _kept(_apply(Qkv(ah.Plan(layers=layers), together)), variables, self.X)
        for _ in plans:
            found.remove(*KERNEL)
        return found

    IHT = layer_plan("iht", "iht", "iht")
    COLUMNS = [("int32", (2,)), ("bfloat16", (TOKENS, 2))]

    def test_equal_plans_keep_one_x(self):
        assert self._kept_of_x(*[self.IHT] * 3) == sorted(PACKED_X)
        assert self._kept_of_x(*[self.IHT] * 3, together=False) == sorted(PACKED_X * 3)

    def test_codes_are_shared_whoever_extracts(self):
        """Extracted columns too, if there are as many."""
        oe_x, oe_dy = layer_plan("iht", "iht", "oe(x)"), layer_plan("iht", "iht", "oe(dy)")
        assert self._kept_of_x(oe_x, self.IHT, oe_dy) == sorted(PACKED_X + self.COLUMNS)
        assert self._kept_of_x(oe_x, oe_x, oe_dy) == sorted(PACKED_X + self.COLUMNS)
        other_k = ah.LayerPlan(
            fwd=oe_x.fwd, dgrad=oe_x.dgrad, wgrad=ah.ProductPlan.iht(outliers="x", k=3)
        )
        more = [("int32", (3,)), ("bfloat16", (TOKENS, 3))]
        assert self._kept_of_x(oe_x, other_k, oe_x) == sorted(PACKED_X + self.COLUMNS + more)

    def test_another_view_is_kept_beside(self):
        mxfp4 = layer_plan("iht", "iht", "mxfp4")
        assert self._kept_of_x(self.IHT, mxfp4, self.IHT) == sorted(PACKED_X * 2)
        assert self._kept_of_x(self.IHT, LEVEL_3, LEVEL_3) == sorted(PACKED_X + SIX_BITS)

    def test_wgrads_in_full_keep_one_x(self):
        full = layer_plan("iht", "iht", "full")
        x = [("bfloat16", (TOKENS, IN))]
        assert self._kept_of_x(full, full, self.IHT) == sorted(PACKED_X + x)

    def test_quantized_once_for_fwd_and_once_for_wgrad(self):
        """Counted in plain JAX: X along both axes, and each W."""
        variables = jax.eval_shape(Qkv(ah.Plan.full()).init, jax.random.key(0), self.X)

        def quantizers(together):
            apply = Qkv(ah.Plan.uniform("iht"), together, "reference").apply
            forward = jax.make_jaxpr(lambda *args: jax.vjp(apply, *args)[0])
            return _quantizers(forward(variables, self.X))

        assert quantizers(True) == {"operand": 1 + 3, "residual": 1}
        assert quantizers(False) == {"operand": 3 + 3, "residual": 3}


def _quantizers(jaxpr):
    """How often the reference makes an operand and a residual."""
    names = (e.params["name"] for e in equations(jaxpr.jaxpr) if e.primitive.name == "jit")
    found = collections.Counter(names)
    return {name: found[name] for name in ("operand", "residual")}


class Block(nn.Module):
    """An MLP with a residual stream, as nn.scan takes it."""

    plan: ah.Plan
    backend: str | None = None

    @nn.compact
    def __call__(self, x, _=None):
        options = {"plan": self.plan, "dtype": jnp.bfloat16, "use_bias": False}
        options["backend"] = self.backend
        gate, up = ah.dense_group(
            x, ah.Dense(OUT, name="gate", **options), ah.Dense(OUT, name="up", **options)
        )
        return x + ah.Dense(IN, name="down", **options)(nn.silu(gate) * up), None


SPLIT = {"params": True, "quantize": True}
DEPTH = 3


class Stack(nn.Module):
    """Blocks in nn.scan, each in nn.remat under a policy unless it is None."""

    plan: ah.Plan
    policy: object = None
    backend: str | None = None

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, policy=self.policy) if self.policy else Block
        block = nn.scan(block, variable_axes={"params": 0}, split_rngs=SPLIT, length=DEPTH)
        return block(self.plan, self.backend, name="block")(x, None)[0]


def _stacked(*kept, length=DEPTH):
    return [(dtype, (length, *shape)) for dtype, shape in kept]


PACKED_H = [("uint8", (OUT, TOKENS // 2)), ("uint8", (OUT, TOKENS // 32))]
KERNELS = [("float32", (IN, OUT)), ("float32", (IN, OUT)), ("float32", (OUT, IN))]
OE_X = ah.Plan(default=layer_plan("iht", "iht", "oe(x)"))
COLUMNS = [("int32", (2,)), ("bfloat16", (TOKENS, 2))]


def _block_variables():
    x = jax.ShapeDtypeStruct((TOKENS, IN), jnp.bfloat16)
    return jax.eval_shape(Stack(ah.Plan.full()).init, jax.random.key(0), x), x


class TestTransformations:
    def test_vmap(self):
        """Over inputs with one kernel."""
        x = jax.ShapeDtypeStruct((TOKENS, IN), jnp.bfloat16)
        full, layer = (
            ah.Dense(OUT, plan=plan, dtype=jnp.bfloat16, use_bias=False)
            for plan in (ah.Plan.full(), OE_X)
        )
        variables = jax.eval_shape(full.init, jax.random.key(0), x)
        xs = jax.ShapeDtypeStruct((4, TOKENS, IN), jnp.bfloat16)
        mapped = jax.vmap(_apply(layer), in_axes=(None, 0))
        want = sorted(_stacked(*PACKED_X, *COLUMNS, length=4) + KERNEL)
        assert _kept(mapped, variables, xs) == want

    def test_nn_scan_over_layers(self):
        """Packed X of every layer, and what silu and its product keep."""
        variables, x = _block_variables()
        kept = _kept(_apply(Stack(OE_X)), variables, x)
        for part in _stacked(*PACKED_X, *PACKED_H, *COLUMNS, *COLUMNS, *KERNELS):
            kept.remove(part)
        hidden = ("bfloat16", (DEPTH, TOKENS, OUT))
        assert {part for part in kept if math.prod(part[1]) > 2} == {hidden}

    @pytest.mark.parametrize("plan", [PLANS["iht"], OE_X, SR], ids=["iht", "oe", "stochastic"])
    def test_nn_remat_with_the_policy_keeps_what_is_packed(self, plan):
        """And the input of each block, which remat always keeps; no hidden activation."""
        variables, x = _block_variables()
        kept = _kept(_apply(Stack(plan, ah.save_quantized)), variables, x)
        columns = COLUMNS * 2 if plan is OE_X else []
        inputs = [("bfloat16", (TOKENS, IN))]
        want = _stacked(*PACKED_X, *PACKED_H, *columns, *KERNELS, *inputs)
        keys = [part for part in kept if part[0].startswith(("key", "uint32"))]
        assert sorted(set(kept) - set(keys)) == sorted(set(want))
        assert len(kept) - len(keys) == len(want)

    def test_remat_without_the_policy_keeps_inputs_alone(self):
        variables, x = _block_variables()
        policy = jax.checkpoint_policies.nothing_saveable
        kept = _kept(_apply(Stack(PLANS["iht"], policy)), variables, x)
        want = _stacked(*KERNELS, ("bfloat16", (TOKENS, IN)))
        assert [part for part in kept if not part[0].startswith("key")] == sorted(want)

    def test_scan_over_micro_batches_keeps_nothing(self):
        """The gradient is taken inside the scan; what it holds is one micro-batch's."""
        variables, x = _block_variables()
        apply = _apply(Stack(OE_X, ah.save_quantized))

        def accumulated(variables, xs):
            def body(total, x):
                gradient = jax.grad(lambda v: jnp.sum(apply(v, x).astype(jnp.float32)))(variables)
                return jax.tree.map(jnp.add, total, gradient), None

            return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, variables), xs)[0]

        xs = jax.ShapeDtypeStruct((4, *x.shape), x.dtype)
        jaxpr = jax.make_jaxpr(accumulated)(variables, xs)
        (outer,) = (e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan")
        layers = [e for e in equations(outer.params["jaxpr"].jaxpr) if e.primitive.name == "scan"]
        assert len(layers) == 2  # forward and backward
        made = sorted(
            (v.aval.dtype.name, v.aval.shape)
            for v in layers[0].outvars
            if v.aval.shape[:1] == (DEPTH,)
        )
        want = _stacked(*PACKED_X, *PACKED_H, *COLUMNS, *COLUMNS, ("bfloat16", (TOKENS, IN)))
        assert [part for part in made if not part[0].startswith(("key", "uint32"))] == sorted(want)


class TestPolicy:
    def _counts(self, policy):
        """Quantizers and products of the backward pass."""
        block = Block(PLANS["iht"], "reference")
        x = jax.ShapeDtypeStruct((TOKENS, IN), jnp.bfloat16)
        variables = jax.eval_shape(block.init, jax.random.key(0), x)

        def apply(v, x):
            return block.apply(v, x)[0]

        checkpointed = jax.checkpoint(apply, policy=policy)
        y, pullback = jax.eval_shape(lambda *args: jax.vjp(checkpointed, *args), variables, x)
        backward = jax.make_jaxpr(lambda pullback, dy: pullback(dy))(pullback, y)
        found = collections.Counter(e.primitive.name for e in equations(backward.jaxpr))
        return _quantizers(backward) | {"products": found["dot_general"]}

    def test_what_is_computed_again(self):
        """gate and up, whose results silu's derivative reads, from X and two W; no X for wgrad."""
        policies = jax.checkpoint_policies
        alone = {"operand": 3 * 2 + 3, "residual": 0, "products": 3 * 2}  # dY twice, W once
        again = {"operand": 1 + 2, "residual": 0, "products": 2}
        want = {name: alone[name] + again[name] for name in alone}
        assert self._counts(policies.everything_saveable) == alone
        assert self._counts(ah.save_quantized) == want
        # X of gate and up, and of down.
        assert self._counts(policies.nothing_saveable) == want | {"residual": 2}

    @pytest.mark.parametrize("plan", [OE_X, SR], ids=["oe", "stochastic"])
    def test_gradients_are_those_without_it(self, plan):
        x = normal(0, TOKENS, IN, dtype=jnp.bfloat16)
        variables = Stack(ah.Plan.full()).init(jax.random.key(0), x)

        def gradient(policy):
            apply = _apply(Stack(plan, policy))
            return jit_fast(jax.grad(lambda v: jnp.sum(jnp.sin(apply(v, x).astype(jnp.float32)))))(
                variables
            )

        assert_near(gradient(ah.save_quantized), gradient(None), 1e-2)
