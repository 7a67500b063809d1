"""How many products `Dense` runs, that steps compile once and learn, and how it is sharded."""

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import adahop_jax as ah
from tests.dense import PLANS, assert_near, assert_same, backend, jit_fast, normal, products, run
from tests.jaxprs import equations

TOKENS, IN, OUT = 96, 160, 64


def _product_of(equation):
    """ "dot_general", "kernel" or None."""
    if equation.primitive.name == "triton_kernel_call":
        module = equation.params["fn"].fn.__module__
        return "kernel" if module == "triton_kernels.matmul" else None
    return "dot_general" if equation.primitive.name == "dot_general" else None


@pytest.mark.parametrize(
    "plan, quantized, others",
    [("full", 0, 3), ("mxfp4", 3, 0), ("iht", 3, 0), ("oe-lhs", 3, 3), ("mixed", 2, 2)],
)
def test_products_of_a_gradient(plan, quantized, others):
    """fwd, dgrad and wgrad, and a side product for each that extracts outliers."""
    layer, x = ah.Dense(OUT, plan=PLANS[plan]), normal(0, TOKENS, IN)
    variables = layer.init(jax.random.key(0), x)
    jaxpr = jax.make_jaxpr(
        jax.grad(lambda v, x: jnp.sum(layer.apply(v, x)), argnums=(0, 1))
    )(variables, x)  # fmt: skip
    found = collections.Counter(_product_of(equation) for equation in equations(jaxpr.jaxpr))
    if backend().endswith(":fp8"):
        assert (found["kernel"], found["dot_general"]) == (quantized, others)
    else:
        assert (found["kernel"], found["dot_general"]) == (0, quantized + others)


@pytest.mark.standard_promotion  # optax.adam
def test_ten_steps_compile_once():
    """Although step, key and data change, and the model and an equal plan are made anew (B28)."""
    traces = []

    def model(plan):
        return nn.Sequential([ah.Dense(48, plan=plan), nn.relu, ah.Dense(40, plan=plan)])

    text = ah.Plan.uniform("iht").with_stochastic_dy().to_json()
    optimizer = optax.adam(1e-3)

    def step(plan, variables, state, x, key):
        traces.append(1)

        def loss(v):
            return jnp.mean((model(plan).apply(v, x, rngs={"quantize": key}) - x) ** 2)

        value, gradients = jax.value_and_grad(loss)(variables)
        updates, state = optimizer.update(gradients, state, variables)
        return optax.apply_updates(variables, updates), state, value

    jitted = jit_fast(step, static_argnums=0)
    x = normal(0, 33, 40)
    variables = model(ah.Plan.full()).init(jax.random.key(0), x)
    state = optimizer.init(variables)
    losses = []
    for i in range(10):
        plan = ah.Plan.from_json(text)
        key = jax.random.key(i)
        variables, state, value = jitted(plan, variables, state, normal(i, 33, 40), key)
        losses.append(float(value))
    assert len(traces) == 1
    assert losses[-1] < losses[0]


@pytest.mark.standard_promotion
@pytest.mark.parametrize("plan", ["mxfp4", "oe-lhs", "oe-rhs"])
def test_training_moves_every_kernel_and_learns(plan):
    """As in E46, where kernels never trained although the loss fell."""

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i, width in enumerate((64, 48, 16)):
                x = ah.Dense(width, plan=PLANS[plan], name=f"up_{i}")(nn.tanh(x))
            return x

    x, target = normal(0, 128, 32), normal(1, 128, 16)
    model, optimizer = Mlp(), optax.adam(1e-2)
    first = model.init(jax.random.key(0), x)

    def body(carry, _):
        variables, state = carry
        value, gradients = jax.value_and_grad(
            lambda v: jnp.mean((model.apply(v, x) - target) ** 2)
        )(variables)
        updates, state = optimizer.update(gradients, state, variables)
        return (optax.apply_updates(variables, updates), state), value

    train = jit_fast(lambda carry: jax.lax.scan(body, carry, None, length=50))
    (variables, _), losses = train((first, optimizer.init(first)))
    assert losses[-1] < 0.6 * losses[0]
    for before, after in zip(jax.tree.leaves(first), jax.tree.leaves(variables), strict=True):
        assert (np.asarray(before) != np.asarray(after)).mean() > 0.99


def _mesh(kind):
    return jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices("cpu"))


LAYOUTS = {  # x, kernel, bias, dY
    "data": (P("d", None), P(), P(), P("d", None)),
    "columns": (P(), P(None, "d"), P("d"), P(None, "d")),
    "rows": (P(None, "d"), P("d", None), P(), P()),
}


@pytest.mark.cpu_only("needs two devices")
class TestSharding:
    """Over two devices as on one; the shards of 48 and 72 are no whole blocks (F60)."""

    @pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
    @pytest.mark.parametrize("plan", ["oe-lhs", "oe-rhs", "stochastic"])
    def test_jit(self, plan, layout):
        plan = PLANS["iht"].with_stochastic_dy() if plan == "stochastic" else PLANS[plan]
        layer = ah.Dense(48, plan=plan)
        rngs = {"quantize": jax.random.key(0)}
        x, dy = normal(0, 40, 72), normal(1, 40, 48)
        variables = {"params": {"kernel": normal(2, 72, 48), "bias": normal(3, 48)}}
        want = run(layer, variables, x, dy, rngs)
        mesh = _mesh(AxisType.Auto)
        x_at, kernel_at, bias_at, dy_at = (NamedSharding(mesh, spec) for spec in layout)
        placed = {
            "params": {
                "kernel": jax.device_put(variables["params"]["kernel"], kernel_at),
                "bias": jax.device_put(variables["params"]["bias"], bias_at),
            }
        }
        got = run(layer, placed, jax.device_put(x, x_at), jax.device_put(dy, dy_at), rngs)
        assert_near(got, want)

    @pytest.mark.parametrize("axis", [0, 1])
    @pytest.mark.parametrize("spec", [P("d", None), P(None, "d")], ids=["rows", "columns"])
    def test_codes_are_those_of_one_device(self, spec, axis):
        x = normal(0, 48, 80)
        quantize = jit_fast(
            lambda x: ah.quantize(x, axis=axis, rounding="stochastic", key=jax.random.key(0))
        )
        placed = jax.device_put(x, NamedSharding(_mesh(AxisType.Auto), spec))
        assert_same(quantize(placed), quantize(x))

    @pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
    def test_shard_map(self, check):
        """Gradients of a replicated layer are summed over shards, each quantized by itself."""
        layer = ah.Dense(48, plan=PLANS["oe-rhs"])
        x, dy = normal(0, 66, 72), normal(1, 66, 48)
        variables = {"params": {"kernel": normal(2, 72, 48), "bias": normal(3, 48)}}

        def shard(variables, x, dy):
            y, gradients, dx = products(layer, variables, x, dy)
            return y, gradients if check else jax.lax.psum(gradients, "d"), dx

        got = jit_fast(
            jax.shard_map(
                shard,
                mesh=_mesh(AxisType.Auto),
                in_specs=(P(), P("d"), P("d")),
                out_specs=(P("d"), P(), P("d")),
                check_vma=check,
            )
        )(variables, x, dy)
        halves = [run(layer, variables, x[i : i + 33], dy[i : i + 33]) for i in (0, 33)]
        (y0, g0, dx0), (y1, g1, dx1) = halves
        want = (
            jnp.concatenate([y0, y1]),
            jax.tree.map(jnp.add, g0, g1),
            jnp.concatenate([dx0, dx1]),
        )
        assert_near(got, want)

    @pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
    @pytest.mark.parametrize("plan", ["full", "oe-rhs"])
    def test_explicit_axes(self, plan, layout):
        if layout is LAYOUTS["rows"]:
            pytest.skip("JAX itself asks for out_sharding= where the contracted dim is sharded")
        layer = ah.Dense(48, plan=PLANS[plan])
        x, dy = normal(0, 40, 72), normal(1, 40, 48)
        variables = {"params": {"kernel": normal(2, 72, 48), "bias": normal(3, 48)}}
        want = run(layer, variables, x, dy)
        with jax.set_mesh(_mesh(AxisType.Explicit)):
            x_at, kernel_at, bias_at, dy_at = layout
            placed = {
                "params": {
                    "kernel": jax.reshard(variables["params"]["kernel"], kernel_at),
                    "bias": jax.reshard(variables["params"]["bias"], bias_at),
                }
            }
            got = jit_fast(lambda *a: products(layer, *a))(
                placed, jax.reshard(x, x_at), jax.reshard(dy, dy_at)
            )
        assert_near(got, want)
