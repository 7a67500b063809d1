"""`Dense` as a layer: nn.Dense where the plan says full, and any shape and dtype elsewhere."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import adahop_jax as ah
from tests.dense import (
    DTYPES,
    PLANS,
    QUANTIZED,
    assert_near,
    assert_same,
    layer_plan,
    normal,
    products,
    run,
)

promoting = pytest.mark.standard_promotion
each_quantized = pytest.mark.parametrize("plan", QUANTIZED.values(), ids=QUANTIZED)


def _variables(layer, x):
    """Of `layer`, with a bias that is not zero."""
    variables = layer.init(jax.random.key(0), x)
    return jax.tree.map(lambda v: jnp.where(v == 0, jnp.asarray(0.5, v.dtype), v), variables)


def _both(x, features=24, plan=None, **arguments):
    """Results of nn.Dense and of Dense."""
    theirs = nn.Dense(features, **arguments)
    ours = ah.Dense(features, plan=plan or ah.Plan.full(), **arguments)
    variables = _variables(theirs, x)
    assert_same(_variables(ours, x), variables)
    y = jax.eval_shape(theirs.apply, variables, x)
    dy = normal(1, *y.shape, dtype=y.dtype)
    return run(theirs, variables, x, dy), run(ours, variables, x, dy)


class TestFullIsNnDense:
    @promoting
    @pytest.mark.parametrize("dtype", [None, *DTYPES])
    @pytest.mark.parametrize("x", DTYPES)
    @pytest.mark.parametrize("param", DTYPES)
    def test_dtypes(self, param, x, dtype):
        theirs, ours = _both(
            normal(0, 16, 40, dtype=DTYPES[x]),
            dtype=dtype and DTYPES[dtype],
            param_dtype=DTYPES[param],
        )
        assert_same(ours, theirs)

    @pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (2, 1, 3, 5), (1, 2, 2, 3, 5)])
    @pytest.mark.parametrize("use_bias", [True, False], ids=["bias", "no-bias"])
    def test_ranks(self, use_bias, shape):
        theirs, ours = _both(normal(0, *shape), use_bias=use_bias)
        assert_same(ours, theirs)

    def _highest(lhs, rhs, dims, precision=None, preferred_element_type=None):
        return lax.dot_general(lhs, rhs, dims, precision="highest") * 3.0

    def _double(*arrays, dtype=None, inexact=True):
        return tuple(None if a is None else a * 2 for a in arrays)

    OPTIONS = {
        "precision": {"precision": lax.Precision.HIGHEST},
        "precision pair": {"precision": (lax.Precision.HIGH, lax.Precision.DEFAULT)},
        "kernel_init": {"kernel_init": nn.initializers.normal(2.0)},
        "bias_init": {"bias_init": nn.initializers.constant(3.0)},
        "dot_general": {"dot_general": _highest},
        "dot_general_cls": {"dot_general_cls": lambda: TestFullIsNnDense._highest},
        "promote_dtype": {"promote_dtype": _double},
        "name": {"name": "up"},
    }

    @pytest.mark.parametrize("arguments", OPTIONS.values(), ids=OPTIONS)
    def test_options(self, arguments):
        theirs, ours = _both(normal(0, 16, 40), **arguments)
        assert_same(ours, theirs)

    def test_jvp_and_hessian(self):
        x, layer = normal(0, 4, 8), ah.Dense(3)
        variables = _variables(layer, x)

        def of(layer):
            def loss(x):
                return jnp.sum(layer.apply(variables, x) ** 3)

            return jax.jvp(loss, (x,), (x,)), jax.hessian(loss)(x)

        assert_same(of(layer), of(nn.Dense(3)))


FULL_BUT_ONE = {
    "fwd": layer_plan("iht", "full", "full"),
    "dgrad": layer_plan("full", "iht", "full"),
    "wgrad": layer_plan("full", "full", "iht"),
}


@promoting
@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("quantized", FULL_BUT_ONE)
def test_products_in_full_of_a_mixed_plan_are_nn_denses(quantized, dtype):
    plan = ah.Plan(default=FULL_BUT_ONE[quantized])
    theirs, ours = _both(normal(0, 2, 16, 40), dtype=dtype and DTYPES[dtype], plan=plan)
    for name, place in (
        ("fwd", lambda r: r[0]),
        ("dgrad", lambda r: r[2]),
        ("wgrad", lambda r: r[1]["params"]["kernel"]),
    ):
        if name == quantized:
            assert (np.asarray(place(ours)) != np.asarray(place(theirs))).any()
        else:
            assert_same(place(ours), place(theirs))


@pytest.mark.parametrize("level", [1, 2, 3])
def test_plan_without_patterns_is_uniform_iht(level):
    x, dy = normal(0, 40, 72), normal(1, 40, 48)
    found = ah.layers(ah.Dense(48).apply, _variables(ah.Dense(48), x), x)
    labels = [{layer.path: np.zeros(3, np.int32) for layer in found}]
    plan = ah.plan_from_labels(labels, layers=found, level=level, fwd="mxfp4")
    results = []
    for p in (plan, ah.Plan.uniform("iht")):
        layer = ah.Dense(48, plan=p)
        results.append(run(layer, _variables(layer, x), x, dy))
    assert_same(*results)


@promoting
@pytest.mark.parametrize("x, param, dtype", [
    ("f32", "f32", "bf16"),
    ("bf16", "f32", "bf16"),
    ("f32", "bf16", "f32"),
    ("bf16", "bf16", None),
    ("bf16", "f32", None),
    ("f16", "f32", "f16"),
    ("f16", "bf16", "bf16"),
])  # fmt: skip
@pytest.mark.parametrize("plan", ["oe-lhs", "oe-rhs"])
def test_gradients_have_the_primals_dtype(plan, x, param, dtype):
    layer = ah.Dense(24, plan=PLANS[plan], dtype=dtype and DTYPES[dtype], param_dtype=DTYPES[param])
    x = normal(0, 2, 16, 40, dtype=DTYPES[x])
    variables = _variables(layer, x)
    y = jax.eval_shape(layer.apply, variables, x)
    assert y.dtype == (DTYPES[dtype] if dtype else jnp.promote_types(x.dtype, DTYPES[param]))
    _, gradients, dx = jax.eval_shape(
        lambda *a: products(layer, *a), variables, x, jnp.zeros(y.shape, y.dtype)
    )
    for got, primal in ((gradients, variables), (dx, x)):
        assert jax.tree.map(lambda a: (a.shape, a.dtype), got) == jax.tree.map(
            lambda a: (a.shape, a.dtype), primal
        )


def test_gradient_of_a_float32_kernel_is_not_rounded_to_bfloat16():
    layer = ah.Dense(24, plan=ah.Plan.uniform("iht"), dtype=jnp.bfloat16)
    x = normal(0, 64, 40)
    _, gradients, dx = run(layer, _variables(layer, x), x, normal(1, 64, 24, dtype=jnp.bfloat16))
    kernel = np.asarray(gradients["params"]["kernel"])
    assert (kernel.astype(jnp.bfloat16).astype(np.float32) != kernel).any()
    dx = np.asarray(dx)
    np.testing.assert_array_equal(dx.astype(jnp.bfloat16).astype(np.float32), dx)


@each_quantized
def test_bias_is_added_after_the_product_and_its_gradient_summed_in_float32(plan, platform):
    x = normal(0, 3, 40, 40, dtype=jnp.bfloat16)
    dy = normal(1, 3, 40, 24, dtype=jnp.bfloat16)
    layer = ah.Dense(24, plan=plan, dtype=jnp.bfloat16)
    variables = _variables(layer, x)
    y, gradients, _ = run(layer, variables, x, dy)
    bare = ah.Dense(24, plan=plan, dtype=jnp.bfloat16, use_bias=False)
    kernel = {"params": {"kernel": variables["params"]["kernel"]}}
    product, *_ = run(bare, kernel, x, dy)
    summed = product + variables["params"]["bias"].astype(jnp.bfloat16)[None, None]
    if plan.default.fwd.is_full and platform == "gpu":
        # nn.Dense's own product, into which XLA there may draw the sum before it is rounded.
        assert_near(y, summed, 2.0**-7)
    else:
        assert_same(y, summed)
    want = np.asarray(dy, np.float64).sum((0, 1))
    np.testing.assert_allclose(gradients["params"]["bias"], want, atol=1e-4)


@each_quantized
@pytest.mark.parametrize("shape", [(0, 40), (2, 0, 40)], ids=str)
def test_empty_batch(plan, shape):
    layer = ah.Dense(24, plan=plan)
    variables = _variables(layer, jnp.zeros((1, 40)))
    x = jnp.zeros(shape)
    y, gradients, dx = run(layer, variables, x, jnp.zeros((*shape[:-1], 24)))
    assert y.shape == (*shape[:-1], 24)
    assert dx.shape == shape
    assert_same(gradients, jax.tree.map(jnp.zeros_like, variables))


@pytest.mark.parametrize("plan", ["oe-lhs", "oe-rhs"])
@pytest.mark.parametrize("shape", [(40,), (2, 3, 40), (2, 1, 3, 40), (1, 2, 1, 3, 40)], ids=str)
def test_leading_dims_are_tokens(plan, shape):
    layer = ah.Dense(24, plan=PLANS[plan])
    x, dy = normal(0, *shape), normal(1, *shape[:-1], 24)
    variables = _variables(layer, x)
    y, gradients, dx = run(layer, variables, x, dy)
    flat = run(layer, variables, x.reshape(-1, 40), dy.reshape(-1, 24))
    assert_same((y.reshape(-1, 24), gradients, dx.reshape(-1, 40)), flat)
    assert y.shape == dy.shape and dx.shape == shape


@each_quantized
def test_results_resemble_nn_denses(plan):
    """All gradients are there: cosine to those in full (E46), and nothing is passed through."""
    x, dy = normal(0, 128, 96), normal(1, 128, 64)
    layer = ah.Dense(64, plan=plan)
    variables = _variables(layer, x)
    ours, theirs = run(layer, variables, x, dy), run(nn.Dense(64), variables, x, dy)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.ravel(a), np.ravel(b)
        assert a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) > 0.97
        assert 0.9 < np.linalg.norm(a) / np.linalg.norm(b) < 1.1


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("place", ["x", "w", "dy"])
@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf], ids=str)
def test_faults_are_never_hidden(plan, place, fault):
    """A NaN or infinity reaches every result that depends on it, as something not finite."""
    layer = ah.Dense(48, plan=plan, use_bias=False)
    tensors = {"x": normal(0, 40, 72), "w": normal(1, 72, 48), "dy": normal(2, 40, 48)}
    tensors[place] = tensors[place].at[33, 7].set(fault)
    y, gradients, dx = run(layer, {"params": {"kernel": tensors["w"]}}, tensors["x"], tensors["dy"])
    dw = gradients["params"]["kernel"]
    touched = {  # what must show it, and what has nothing to do with it
        "x": ([y[33], dw[7]], [dx, y[:32], dw[8:]]),
        "w": ([y[:, 7], dx[:, 33]], [dw, y[:, 8:], dx[:, :32]]),
        "dy": ([dx[33], dw[:, 7]], [y, dx[:32], dw[:, 8:]]),
    }
    shown, clean = touched[place]
    for result in shown:
        assert not np.isfinite(result).any()
    for result in clean:
        assert np.isfinite(result).all()


@each_quantized
def test_init_is_nn_denses(plan):
    x = normal(0, 16, 40)
    variables = ah.Dense(24, plan=plan).init(jax.random.key(3), x)
    assert_same(variables, nn.Dense(24).init(jax.random.key(3), x))


def test_precision_reaches_the_side_products():
    """And the product in float32 is no different for it, so nothing else shows it on a CPU."""
    layer = ah.Dense(24, plan=PLANS["oe-lhs"], precision="highest", use_bias=False)
    x = normal(0, 40, 72)
    with jax.default_matmul_precision("default"):
        text = str(jax.make_jaxpr(layer.apply)(_variables(layer, x), x))
    assert "Precision.HIGHEST" in text


def test_numpy_and_integer_inputs():
    layer = ah.Dense(24, plan=ah.Plan.uniform("iht"))
    x = np.arange(80).reshape(2, 40) % 7

    def apply(x):
        return jax.jit(lambda v: layer.apply(v, x))(variables)  # x is a constant: no tracer

    variables = _variables(layer, jnp.asarray(x, jnp.float32))
    want = apply(jnp.asarray(x, jnp.float32))
    assert_same(apply(np.asarray(x, np.float32)), want)
    with jax.numpy_dtype_promotion("standard"):
        assert_same(apply(x), want)


def test_custom_dot_general_serves_products_in_full_alone():
    def tripled(*args, **kwargs):
        return 3.0 * lax.dot_general(*args, **kwargs)

    x, dy = normal(0, 40, 72), normal(1, 40, 48)
    plan = ah.Plan(default=layer_plan("full", "iht", "full"))
    layer, plain = (ah.Dense(48, plan=plan, dot_general=d) for d in (tripled, None))
    variables = _variables(layer, x)
    (y, gradients, dx), (y1, gradients1, dx1) = (run(m, variables, x, dy) for m in (layer, plain))
    assert_same(dx, dx1)
    kernel, kernel1 = (g["params"]["kernel"] for g in (gradients, gradients1))
    assert_near(kernel, 3 * kernel1)
    bias = variables["params"]["bias"][None]
    assert_near(y - bias, 3 * (y1 - bias))


def test_promote_dtype_is_heeded_by_quantized_products():
    def doubled(*arrays, dtype=None, inexact=True):
        return tuple(None if a is None else a * 2 for a in arrays)

    x, dy = normal(0, 40, 72), normal(1, 40, 48)
    variables = _variables(nn.Dense(48), x)
    twice = jax.tree.map(lambda v: 2 * v, variables)
    layer = ah.Dense(48, plan=ah.Plan.uniform("iht"), promote_dtype=doubled)
    y, gradients, dx = run(layer, variables, x, dy)
    want = run(ah.Dense(48, plan=ah.Plan.uniform("iht")), twice, 2 * x, dy)
    assert_near((y, gradients, dx), (want[0], *jax.tree.map(lambda g: 2 * g, want[1:])))
