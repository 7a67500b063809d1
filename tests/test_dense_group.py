"""`dense_group`: bit for bit what its layers return one by one, whatever they are and under it."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import adahop_jax as ah
from tests.dense import assert_near, assert_same, jit_fast, layer_plan, normal, products, run

# Compiling takes the time: one plan stands for many wherever it can.

NAMES = ("query", "key", "value")
FEATURES = {"query": 48, "key": 16, "value": 16}
IN = 72

OE_X = layer_plan("oe(x)", "oe(dy)", "oe(x)")
OE_W = layer_plan("oe(w)", "oe(w)", "oe(dy)")
IHT = layer_plan("iht", "iht", "iht")
FULL = layer_plan("full", "full", "full")
STOCHASTIC_X = dataclasses.replace(
    ah.ProductPlan.iht(),
    lhs=ah.OperandSpec(hadamard=32, rounding="stochastic", scale_rule="ceil"),
)


def planned(*plans):
    """A plan for query, key and value."""
    return ah.Plan(layers=tuple(zip(NAMES, plans, strict=True)))


PLANS = {
    "full": ah.Plan.full(),
    "iht": ah.Plan.uniform("iht"),
    "oe-x": planned(OE_X, OE_X, OE_X),
    "different": planned(OE_X, OE_W, layer_plan("mxfp4", "iht", "full")),
    "some-extract": planned(IHT, OE_X, IHT),
    "one-full": planned(IHT, FULL, OE_W),
    "stochastic-dy": planned(OE_X, OE_W, IHT).with_stochastic_dy(),
    "stochastic-x": ah.Plan(default=ah.LayerPlan.uniform(STOCHASTIC_X)),
}
MANY = PLANS["different"].with_stochastic_dy()
each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


class Projections(nn.Module):
    """Query, key and value of one input, as a group or one by one."""

    plan: ah.Plan = ah.Plan.full()
    together: bool = True
    options: Any = dataclasses.field(default_factory=lambda: {name: {} for name in NAMES})

    @nn.compact
    def __call__(self, x):
        layers = [
            ah.Dense(FEATURES[name], plan=self.plan, name=name, **self.options[name])
            for name in NAMES
        ]
        if self.together:
            return ah.dense_group(x, *layers)
        return tuple(layer(x) for layer in layers)

    def __hash__(self):
        return id(self)


def _data(x_dtype=jnp.float32, dtype=jnp.float32, tokens=40, seed=0):
    x = normal(seed, 2, tokens // 2, IN, dtype=x_dtype)
    dys = tuple(
        normal(seed + 1 + i, 2, tokens // 2, FEATURES[name], dtype=dtype)
        for i, name in enumerate(NAMES)
    )
    params = {
        name: {
            "kernel": normal(seed + 10 + i, IN, FEATURES[name]),
            "bias": normal(seed + 20 + i, FEATURES[name]),
        }
        for i, name in enumerate(NAMES)
    }
    return {"params": params}, x, dys


RNGS = {"quantize": jax.random.key(0)}


def _both(plan, options=None, **data):
    """Results as a group and one by one."""
    variables, x, dys = _data(**data)
    arguments = {} if options is None else {"options": options}
    return [
        run(Projections(plan, together, **arguments), variables, x, dys, RNGS)
        for together in (True, False)
    ]


class TestOneByOne:
    """Outputs, dX, every dW and bias' gradient are equal bit for bit."""

    @each_plan
    def test_plans(self, plan):
        assert_same(*_both(plan))

    @pytest.mark.parametrize("x", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
    def test_bfloat16(self, x):
        options = {name: {"dtype": jnp.bfloat16} for name in NAMES}
        plan = planned(OE_X, FULL, OE_W)
        assert_same(*_both(plan, options, x_dtype=x, dtype=jnp.bfloat16))

    def _double(*arrays, dtype=None, inexact=True):
        return tuple(None if a is None else a * 2 for a in arrays)

    def test_layers_of_different_options(self):
        """Up to the order of three summands: a custom `promote_dtype` reads X before the others."""
        options = {
            "query": {"use_bias": False, "precision": "highest"},
            "key": {"promote_dtype": TestOneByOne._double},
            "value": {"backend": "reference"},
        }
        variables, x, dys = _data()
        del variables["params"]["query"]["bias"]
        got, want = (
            run(Projections(PLANS["some-extract"], together, options), variables, x, dys)
            for together in (True, False)
        )
        assert_same(got[:2], want[:2])
        assert_near(got[2], want[2])

    def test_layers_of_different_dtypes(self):
        options = {"query": {}, "key": {"dtype": jnp.bfloat16}, "value": {"dtype": jnp.float32}}
        variables, x, dys = _data()
        dys = dys[0], dys[1].astype(jnp.bfloat16), dys[2]
        got, want = (
            run(Projections(PLANS["iht"], together, options), variables, x, dys)
            for together in (True, False)
        )
        assert_same(got, want)

    @each_plan
    def test_parameters(self, plan):
        x = normal(0, 8, IN)
        got, want = (
            Projections(plan, together).init(jax.random.key(3), x) for together in (True, False)
        )
        assert_same(got, want)

    def test_empty_batch(self):
        assert_same(*_both(PLANS["different"], tokens=0))

    def test_layers_from_setup(self):
        class Setup(nn.Module):
            def setup(self):
                self.query = ah.Dense(48, plan=PLANS["different"])
                self.key = ah.Dense(16, plan=PLANS["different"])

            def __call__(self, x):
                return ah.dense_group(x, self.query, self.key)

        variables, x, dys = _data()
        y, gradients, _ = run(Setup(), variables, x, dys[:2])
        want, theirs, _ = run(Projections(PLANS["different"], False), variables, x, dys)
        assert_same(y, want[:2])
        del gradients["params"]["value"], theirs["params"]["value"]
        assert_same(gradients, theirs)

    def test_one_layer_twice(self):
        class Twice(nn.Module):
            together: bool

            @nn.compact
            def __call__(self, x):
                layer = ah.Dense(48, plan=MANY, name="query")
                return ah.dense_group(x, layer, layer) if self.together else (layer(x), layer(x))

        variables, x, dys = _data()
        variables = {"params": {"query": variables["params"]["query"]}}
        got, want = (run(Twice(t), variables, x, (dys[0], dys[0]), RNGS) for t in (True, False))
        assert_same(got, want)


class TestTransformations:
    """As the layers one by one under the same transformation."""

    def _compare(self, function, *args):
        """function(model, *args) for a group and one by one."""
        got, want = (
            jit_fast(functools.partial(function, Projections(MANY, together)))(*args)
            for together in (True, False)
        )
        assert_near(got, want, 1e-6)

    def test_vmap(self):
        variables, x, dys = _data()
        xs, dyss = jnp.stack([x, 2 * x]), tuple(jnp.stack([dy, dy]) for dy in dys)
        self._compare(
            lambda m, v, x, dy: jax.vmap(lambda x, dy: products(m, v, x, dy, RNGS))(x, dy),
            *(variables, xs, dyss),
        )

    def test_scan_over_micro_batches_with_checkpoint(self):
        variables, x, dys = _data()

        def function(m, v, x, dys):
            def loss(v, x):
                apply = jax.checkpoint(lambda v, x: m.apply(v, x, rngs=RNGS))
                return sum(jnp.sum(jnp.sin(y)) for y in apply(v, x))

            def body(total, x):
                return jax.tree.map(jnp.add, total, jax.grad(loss)(v, x)), None

            return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, v), x)[0]

        self._compare(function, variables, jnp.stack([x, -x]), dys)

    def test_nn_scan_and_remat(self):
        """Over layers whose kernels are stacked."""
        variables, x, _ = _data()
        stacked = jax.tree.map(lambda v: jnp.stack([v, v + 1]), variables["params"])

        def function(m, params, x):
            class Body(nn.Module):
                @nn.compact
                def __call__(self, x, _):
                    q, k, v = Projections(m.plan, m.together, name="projections")(x)
                    return jnp.tanh(x + jnp.concatenate([q, k[..., :8], v], -1)), None

            scanned = nn.scan(
                nn.remat(Body),
                variable_axes={"params": 0},
                split_rngs={"params": True, "quantize": True},
                length=2,
            )

            def loss(params, x):
                variables = {"params": {"projections": params}}
                return jnp.sum(scanned().apply(variables, x, None, rngs=RNGS)[0])

            return jax.value_and_grad(loss, argnums=(0, 1))(params, x)

        layers = tuple((f"projections/{path}", layer) for path, layer in MANY)
        got, want = (
            jit_fast(functools.partial(function, Projections(ah.Plan(layers=layers), together)))(
                stacked, x
            )
            for together in (True, False)
        )
        assert_near(got, want, 1e-6)

    @pytest.mark.cpu_only("needs two devices")
    def test_shard_map(self):
        variables, x, dys = _data()
        mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu"))

        def function(m, v, x, dys):
            def shard(v, x, dys):
                return products(m, v, x, dys, RNGS)

            specs = {"in_specs": (P(), P("d"), P("d")), "out_specs": (P("d"), P(), P("d"))}
            return jax.shard_map(shard, mesh=mesh, **specs)(v, x, dys)

        self._compare(function, variables, x, dys)

    @pytest.mark.cpu_only("needs two devices")
    def test_shard_map_with_one_kernel_in_shards(self):
        """Results that do not vary over the axis stay so."""
        variables, x, dys = _data()
        mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu"))
        at = jax.tree.map(lambda v: P(), variables)
        at["params"]["key"] = {"kernel": P(None, "d"), "bias": P("d")}
        dys_at = P(), P(None, None, "d"), P()
        halved = {**FEATURES, "key": 8}

        class Halved(nn.Module):
            together: bool

            @nn.compact
            def __call__(self, x):
                layers = [ah.Dense(halved[n], plan=PLANS["oe-x"], name=n) for n in NAMES]
                if self.together:
                    return ah.dense_group(x, *layers)
                return tuple(layer(x) for layer in layers)

        got, want = (
            jit_fast(
                jax.shard_map(
                    functools.partial(products, Halved(together)),
                    mesh=mesh,
                    in_specs=(at, P(), dys_at),
                    out_specs=(dys_at, at, P()),
                )
            )(variables, x, dys)
            for together in (True, False)
        )
        assert_near(got, want, 1e-6)

    @pytest.mark.cpu_only("needs two devices")
    def test_explicit_axes(self):
        variables, x, dys = _data()
        want = run(Projections(PLANS["different"], False), variables, x, dys)
        mesh = jax.make_mesh(
            (2,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")
        )
        with jax.set_mesh(mesh):
            placed = jax.tree.map(lambda v: jax.reshard(v, P()), variables)
            placed["params"]["key"] = {
                "kernel": jax.reshard(variables["params"]["key"]["kernel"], P(None, "d")),
                "bias": jax.reshard(variables["params"]["key"]["bias"], P("d")),
            }
            dys = tuple(
                jax.reshard(dy, P(None, None, "d" if name == "key" else None))
                for name, dy in zip(NAMES, dys, strict=True)
            )
            got = jit_fast(lambda *a: products(Projections(PLANS["different"]), *a))(
                placed, jax.reshard(x, P()), dys
            )
        assert_near(got, want)


def test_calibration_sees_every_layer():
    variables, x, _ = _data()
    x = x.at[..., 5].multiply(50)

    def loss_fn(together):
        model = Projections(together=together)
        return lambda v, x: sum(jnp.sum(jnp.sin(y)) for y in model.apply(v, x))

    got, want = (loss_fn(together) for together in (True, False))
    assert ah.layers(got, variables, x) == ah.layers(want, variables, x)
    assert [layer.path for layer in ah.layers(got, variables, x)] == list(NAMES)
    assert_same(ah.observe(got)(variables, x), ah.observe(want)(variables, x))
    plan = ah.calibrate(got, variables, [x], steps=1)
    assert plan == ah.calibrate(want, variables, [x], steps=1)
    assert {layer.patterns.x for _, layer in plan} == {ah.Pattern.COLUMN}


def test_a_group_in_full_has_all_derivatives():
    variables, x, _ = _data(tokens=2)

    def of(together):
        model = Projections(together=together)

        def loss(x):
            return sum(jnp.sum(y**3) for y in model.apply(variables, x))

        return jax.jvp(loss, (x,), (x,)), jax.grad(lambda x: jnp.sum(jax.grad(loss)(x)))(x)

    assert_same(of(True), of(False))


def test_faults_stay_with_their_layer():
    """A NaN in one kernel leaves the other layers' results and gradients alone."""
    variables, x, dys = _data()
    kernel = variables["params"]["key"]["kernel"]
    variables["params"]["key"]["kernel"] = kernel.at[3, 4].set(np.nan)
    y, gradients, dx = run(Projections(PLANS["oe-x"]), variables, x, dys)
    finite = [bool(np.isfinite(one).all()) for one in y]
    assert finite == [True, False, True]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    assert not np.isfinite(dx).all()
