"""`explain`: what runs, why, and the share of multiply-adds in `dtype`, worked out by hand."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import adahop_jax as ah
from tests.dense import backend

LAYERS = (
    ah.LayerInfo(path="a", tokens=1000, in_features=100, out_features=200),
    ah.LayerInfo(path="b", tokens=1000, in_features=200, out_features=50),
)


def _plan(fwd, dgrad, wgrad):
    layer = ah.LayerPlan(fwd=fwd, dgrad=dgrad, wgrad=wgrad)
    return ah.Plan(default=layer)


@pytest.mark.parametrize(
    "product, outliers, k, share",
    [
        # Of layer "a": rows or columns taken, over the size of that side of the result.
        ("fwd", "x", 10, 10 / 1000),
        ("fwd", "w", 10, 10 / 200),
        ("dgrad", "dy", 10, 10 / 1000),
        ("dgrad", "w", 10, 10 / 100),
        ("wgrad", "x", 10, 10 / 100),
        ("wgrad", "dy", 10, 10 / 200),
        ("fwd", "x", None, 15 / 1000),  # 1000 // 64
        ("fwd", "w", None, 3 / 200),
        ("wgrad", "x", None, 1 / 100),
        ("wgrad", "x", 500, 1.0),  # no more than there are
    ],
)
def test_share_of_an_extraction(product, outliers, k, share):
    iht = ah.ProductPlan.iht()
    products = {name: iht for name in ("fwd", "dgrad", "wgrad")}
    products[product] = ah.ProductPlan.iht(outliers=outliers, k=k)
    explanation = ah.explain(_plan(**products), LAYERS[:1])
    (row,) = [row for row in explanation.rows if row.product == product]
    assert row.share_in_dtype == pytest.approx(share)
    assert row.strategy == f"iht+oe({outliers})"
    assert explanation.share_in_dtype == pytest.approx(share / 3)


def test_total_share_is_weighted_by_multiply_adds():
    full, iht = ah.ProductPlan.full(), ah.ProductPlan.iht()
    plan = ah.Plan(
        layers=(("a", ah.LayerPlan.uniform(iht)), ("b", ah.LayerPlan.uniform(full))),
    )
    explanation = ah.explain(plan, LAYERS)
    assert explanation.share_in_dtype == pytest.approx(200 * 50 / (100 * 200 + 200 * 50))
    assert {row.backend for row in explanation.rows if row.path == "b"} == {""}
    assert {row.backend for row in explanation.rows if row.path == "a"} == {backend()}


def test_text_says_what_runs_and_why():
    patterns = ah.Patterns(x=ah.Pattern.COLUMN, w=ah.Pattern.ROW, dy=ah.Pattern.ROW)
    full, oe = ah.ProductPlan.full(), ah.ProductPlan.iht(outliers="x", k=5)
    layer = ah.LayerPlan(fwd=full, dgrad=ah.ProductPlan.mxfp4(), wgrad=oe, patterns=patterns)
    lines = str(ah.explain(ah.Plan(layers=(("a", layer),)), LAYERS[:1])).splitlines()
    cells = [line.split() for line in lines[1:4]]
    assert [line[:-1] for line in cells] == [
        # Keys in the authors' orientation: X - opp(W), dY - W, opp(dY) - X.
        ["a", "fwd", "full", "column-column", "-", "dtype", "100.0%"],
        ["a", "dgrad", "mxfp4", "row-row", "-", backend(), "0.0%"],
        ["a", "wgrad", "iht+oe(x)", "column-column", "5", backend(), "5.0%"],
    ]
    # Only kernels are expected to take any particular time.
    speedups = [line[-1] != "-" for line in cells]
    assert speedups == [False, *[backend().endswith(":fp8")] * 2]
    assert lines[4] == "multiply-adds in dtype: 35.00%"


def test_stacked_layers_count_as_often_as_they_are_there():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return ah.Dense(32, name="dense")(x), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = ah.Dense(32, name="first")(x)
            stack = nn.scan(
                Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=9
            )
            return stack(name="stack")(x, None)[0]

    x = jnp.ones((16, 32))
    variables = Model().init(jax.random.key(0), x)
    layers = ah.layers(Model().apply, variables, x)
    assert [(layer.path, layer.copies) for layer in layers] == [("first", 1), ("stack/dense", 9)]
    full, iht = (ah.LayerPlan.uniform(ah.ProductPlan.named(n)) for n in ("full", "iht"))
    plan = ah.Plan(layers=(("first", full), ("stack/dense", iht)))
    assert ah.explain(plan, layers).share_in_dtype == pytest.approx(0.1)


def test_plan_of_another_model_is_refused_by_name():
    plan = ah.Plan(layers=(("a", ah.LayerPlan.uniform(ah.ProductPlan.iht())),))
    with pytest.raises(ah.PlanError, match="layers without an entry: b"):
        ah.explain(plan, LAYERS)
    with pytest.raises(ah.PlanError, match="entries that no layer uses: a"):
        ah.explain(plan, [])


def test_named_backend_that_is_not_there_is_refused():
    with pytest.raises(NotImplementedError, match="'nope' is unknown"):
        ah.explain(ah.Plan.uniform("iht"), LAYERS, backend="nope")
