"""Bad input to the library: one error that says where, what was found, what was wanted."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import adahop_jax as ah

X = jnp.ones((8, 64), jnp.float32)
W = jnp.ones((64, 16), jnp.float32)
IHT = ah.ProductPlan.iht()
STOCHASTIC = ah.OperandSpec(rounding="stochastic", scale_rule="ceil")


def _dense(x=X, features=16, rngs=None, **options):
    layer = ah.Dense(features, name="lost", **options)
    return jax.eval_shape(lambda: layer.init_with_output(jax.random.key(0), x))


def _apply(plan, x=X, rngs=None, **options):
    layer = ah.Dense(16, plan=plan, **options)
    variables = ah.Dense(16).init(jax.random.key(0), x)
    return layer.apply(variables, x, rngs=rngs)


def _for_kernel(in_features, out_features):
    layer = dataclasses.replace(
        ah.LayerPlan.uniform(IHT), in_features=in_features, out_features=out_features
    )
    return ah.Plan(default=layer)


def _calibrate(loss_fn=lambda v, x: jnp.mean(ah.Dense(16).apply(v, x)), batches=(X,), **options):
    variables = ah.Dense(16).init(jax.random.key(0), X)
    return ah.calibrate(loss_fn, variables, batches, **{"steps": 1, **options})


def _group(*layers):
    class Lost(nn.Module):
        @nn.compact
        def __call__(self, x):
            return ah.dense_group(x, *(layer() for layer in layers))

    return jax.eval_shape(lambda: Lost().init_with_output(jax.random.key(0), X))


CASES = {
    # quantize
    "quantize-integers": (
        lambda: ah.quantize(jnp.ones((4, 32), jnp.int32)),
        TypeError,
        "quantize: dtype int32",
        "float32",
    ),
    "quantize-axis": (
        lambda: ah.quantize(X, axis=2),
        ValueError,
        "quantize: axis 2 is out of range for shape (8, 64)",
        "wanted -2 <= axis < 2",
    ),
    "quantize-scalar": (lambda: ah.quantize(jnp.float32(1)), ValueError, "out of range", "()"),
    "quantize-format-name": (
        lambda: ah.quantize(X, format="mxfp4"),
        ValueError,
        "format 'mxfp4' is unknown",
        "adahop_jax.MXFP4",
    ),
    "quantize-rule": (
        lambda: ah.quantize(X, scale_rule="round"),
        ValueError,
        "scale_rule 'round' is unknown",
        "'even', 'floor', 'ceil'",
    ),
    "quantize-rounding": (
        lambda: ah.quantize(X, rounding="up"),
        ValueError,
        "rounding 'up' is unknown",
        "'stochastic'",
    ),
    "quantize-no-key": (
        lambda: ah.quantize(X, rounding="stochastic"),
        ValueError,
        "needs a random key",
        "pass key=",
    ),
    "quantize-clipping-rule": (
        lambda: ah.quantize(X, rounding="stochastic", scale_rule="even", key=jax.random.key(0)),
        ValueError,
        "biases stochastic rounding",
        "scale_rule='ceil'",
    ),
    "quantize-backend": (
        lambda: ah.quantize(X, backend="cuda"),
        NotImplementedError,
        "backend 'cuda' is unknown",
        "'reference'",
    ),
    # hadamard, classify
    "hadamard-size": (
        lambda: ah.hadamard(X, size=48),
        ValueError,
        "size 48 is no power of two",
        "32",
    ),
    "hadamard-axis": (
        lambda: ah.hadamard(X, axis=-3),
        ValueError,
        "hadamard: axis -3 is out of range",
    ),
    "classify-scalar": (
        lambda: ah.classify(jnp.float32(1)),
        ValueError,
        "x is a scalar",
        "wanted a matrix",
    ),
    "classify-traced": (
        lambda: jax.jit(lambda x: len(ah.classify(x)))(X),
        ValueError,
        "being traced",
        "outside jit",
    ),
    # matmul
    "matmul-strategy": (
        lambda: ah.matmul(X, W, "fp4"),
        ValueError,
        "strategy 'fp4' is unknown",
        "'mxfp4'",
    ),
    "matmul-plan": (
        lambda: ah.matmul(X, W, ah.Plan.full()),
        TypeError,
        "strategy is a Plan",
        "ProductPlan",
    ),
    "matmul-dims": (
        lambda: ah.matmul(X, X, "iht"),
        ValueError,
        "a (8, 64) and b (8, 64) do not contract",
        "(..., M, K) and (K, N)",
    ),
    "matmul-dtypes": (
        lambda: ah.matmul(X, W.astype(jnp.bfloat16), "iht"),
        TypeError,
        "a is float32 and b is bfloat16",
        "cast",
    ),
    "matmul-dy": (
        lambda: ah.matmul(X, W, ah.ProductPlan.iht(outliers="dy")),
        ValueError,
        "'dy', which is no operand",
        "choose 'x'",
    ),
    "matmul-no-key": (
        lambda: ah.matmul(X, W, ah.ProductPlan(lhs=STOCHASTIC, rhs=STOCHASTIC)),
        ValueError,
        "draws random bits",
        "pass key=",
    ),
    "matmul-gradient": (
        lambda: jax.grad(lambda a: jnp.sum(ah.matmul(a, W, "iht")))(X),
        TypeError,
        "has no derivative",
        "adahop_jax.Dense",
    ),
    # specs and plans
    "spec-format": (
        lambda: ah.OperandSpec(format="mxfp5"),
        ValueError,
        "format 'mxfp5' is unknown",
        "'mxfp4'",
    ),
    "spec-hadamard": (
        lambda: ah.OperandSpec(hadamard=31),
        ValueError,
        "hadamard must be 0 or a power of two",
        "31",
    ),
    "spec-huge-hadamard": (lambda: ah.OperandSpec(hadamard=2**40), ValueError, "up to 1024"),
    "spec-pre-scale": (
        lambda: ah.OperandSpec(pre_scale=0.0),
        ValueError,
        "pre_scale must be between",
        "0.0",
    ),
    "spec-signs": (
        lambda: ah.OperandSpec(signs="random"),
        ValueError,
        "needs a transform",
        "set hadamard",
    ),
    "product-half": (
        lambda: ah.ProductPlan(lhs=ah.OperandSpec()),
        ValueError,
        "both be quantized or both be None",
    ),
    "product-transforms": (
        lambda: ah.ProductPlan(lhs=ah.OperandSpec(hadamard=32), rhs=ah.OperandSpec()),
        ValueError,
        "does not cancel",
        "32",
    ),
    "product-full-with-outliers": (
        lambda: ah.ProductPlan(outliers=ah.OutlierSpec(tensor="x")),
        ValueError,
        "drop `outliers`",
    ),
    "outliers-tensor": (
        lambda: ah.OutlierSpec(tensor="y"),
        ValueError,
        "tensor 'y' is unknown",
        "'dy'",
    ),
    "outliers-k": (
        lambda: ah.OutlierSpec(tensor="x", k=0),
        ValueError,
        "k must be a positive integer or None, got 0",
    ),
    "layer-operand": (
        lambda: ah.LayerPlan(fwd=ah.ProductPlan.iht(outliers="dy"), dgrad=IHT, wgrad=IHT),
        ValueError,
        "fwd: extracts 'dy', which is no operand",
        "'x', 'w'",
    ),
    "layer-type": (
        lambda: ah.LayerPlan(fwd="iht", dgrad=IHT, wgrad=IHT),
        TypeError,
        "fwd is a str",
        "ProductPlan",
    ),
    "plan-layers": (lambda: ah.Plan(layers={"a": IHT}), TypeError, "layers is a dict", "tuple"),
    "plan-default": (
        lambda: ah.Plan(default=IHT),
        TypeError,
        "default is a ProductPlan",
        "LayerPlan",
    ),
    "plan-strategy": (
        lambda: ah.Plan.uniform("adahop"),
        ValueError,
        "strategy 'adahop' is unknown",
        "'iht'",
    ),
    "plan-no-folder": (
        lambda: ah.Plan.full().save("/no/such/folder/p.json"),
        ah.PlanError,
        "cannot write",
        "check the path",
    ),
    "plan-no-file": (
        lambda: ah.Plan.load("/no/such/plan.json"),
        ah.PlanError,
        "/no/such/plan.json: cannot read",
        "check the path",
    ),
    "plan-path": (lambda: ah.Plan.load("a\0b"), ah.PlanError, "cannot read the plan"),
    "plan-nested-too-deep": (lambda: ah.Plan.from_json("[" * 100_000), ah.PlanError, "not JSON"),
    # Dense
    "dense-plan-type": (
        lambda: _dense(plan="iht"),
        TypeError,
        "Dense ''",
        "plan is a str",
        "Plan.uniform('iht')",
    ),
    "dense-scalar": (
        lambda: _dense(x=jnp.float32(1)),
        ValueError,
        "the input is a scalar",
        "(..., in_features)",
    ),
    "dense-no-features": (
        lambda: _dense(features=0),
        ValueError,
        "features is 0",
        "positive integer",
    ),
    "dense-half-features": (
        lambda: _dense(features=3.5),
        ValueError,
        "features is 3.5",
        "positive integer",
    ),
    "dense-backend": (
        lambda: _dense(backend="nope"),
        NotImplementedError,
        "backend 'nope' is unknown",
        "'reference'",
    ),
    "dense-missing": (
        lambda: _apply(ah.Plan()),
        ah.PlanError,
        "no entry for layer ''",
        "calibrate this model",
    ),
    "dense-in-features": (
        lambda: _apply(_for_kernel(32, 16)),
        ah.PlanError,
        "in_features is 64, and its plan was made for 32",
    ),
    "dense-out-features": (
        lambda: _apply(_for_kernel(64, 17)),
        ah.PlanError,
        "features is 16, and its plan was made for 17",
    ),
    "dense-no-rng": (
        lambda: _apply(ah.Plan.uniform("iht").with_stochastic_dy()),
        ValueError,
        "no RNG stream 'quantize'",
        "rngs={'quantize': key}",
    ),
    "dense-complex": (
        lambda: _apply(ah.Plan.uniform("iht"), dtype=jnp.complex64),
        TypeError,
        "dtype complex64 is not supported",
        "bfloat16",
    ),
    "dense-forward-mode": (
        lambda: jax.jvp(lambda x: _apply(ah.Plan.uniform("iht"), x=x), (X,), (X,)),
        TypeError,
        "forward-mode",
        "custom_vjp",
    ),
    # dense_group
    "group-empty": (lambda: _group(), ValueError, "dense_group: no layers", "pass the layers"),
    "group-nn-dense": (
        lambda: _group(lambda: ah.Dense(4, name="up"), lambda: nn.Dense(4, name="gate")),
        TypeError,
        "layer 1 is a Dense of flax.linen",
        "adahop_jax.Dense",
    ),
    "group-outputs": (
        lambda: _group(lambda: ah.Dense(4)(X)),
        TypeError,
        "layer 0 is a",
        "not yet called",
    ),
    "group-transformed": (
        lambda: _group(lambda: nn.remat(ah.Dense)(4, name="up")),
        TypeError,
        "'up', has a __call__ of its own",
        "transform the module that calls the group",
    ),
    "group-missing": (
        lambda: _group(
            lambda: ah.Dense(4, name="up"), lambda: ah.Dense(4, plan=ah.Plan(), name="gate")
        ),
        ah.PlanError,
        "Dense 'gate': plan: no entry for layer 'gate'",
    ),
    # calibrate
    "calibrate-steps": (lambda: _calibrate(steps=0), ValueError, "steps 0", "wanted at least 1"),
    "calibrate-level": (lambda: _calibrate(level=4), ValueError, "level 4 is unknown", "1, 2 or 3"),
    "calibrate-format": (
        lambda: _calibrate(fwd="mxfp8"),
        ValueError,
        "fwd 'mxfp8' is unknown",
        "mxfp4 or mxfp6",
    ),
    "calibrate-batches": (
        lambda: _calibrate(steps=2),
        ValueError,
        "ran out in step 2 of 2",
        "lower steps",
    ),
    "calibrate-no-layers": (
        lambda: _calibrate(lambda v, x: jnp.mean(x)),
        ah.PlanError,
        "calls no adahop_jax.Dense",
        "in place of nn.Dense",
    ),
    "calibrate-params": (
        lambda: ah.calibrate(lambda v, x: jnp.mean(x), {"kernel": W}, [X], steps=1),
        ah.PlanError,
        "no collection 'params'",
        "model.init",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_error_says_where_what_and_what_to_do(name):
    call, kind, *parts = CASES[name]
    with pytest.raises(kind) as raised:
        call()
    assert [part for part in parts if part not in str(raised.value)] == [], raised.value
