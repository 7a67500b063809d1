"""Plans made of plans: product by product, with another rounding, in another format."""

import pytest

import adahop_jax as ah

OE = ah.ProductPlan.iht(outliers="w", k=3)
PLAN = ah.Plan(
    layers=(
        ("a", ah.LayerPlan(fwd=OE, dgrad=ah.ProductPlan.iht(), wgrad=ah.ProductPlan.mxfp4())),
        ("b", ah.LayerPlan(fwd=ah.ProductPlan.full(), dgrad=OE, wgrad=ah.ProductPlan.iht())),
    ),
    default=ah.LayerPlan.uniform(ah.ProductPlan.mxfp4()),
    level=2,
)


def formats(plan, path, product):
    return {spec.format for spec in plan[path][product].specs}


def test_format_of_the_forward_products_alone():
    changed = PLAN.with_format("mxfp6")
    assert formats(changed, "a", "fwd") == formats(changed, "other", "fwd") == {"mxfp6"}
    assert changed["a"].fwd.strategy == "iht mxfp6+oe(w)"
    assert changed["b"].fwd.is_full
    for path in ("a", "b", "other"):
        for product in ("dgrad", "wgrad"):
            assert changed[path][product] == PLAN[path][product]
    assert changed.level == 2 and changed.paths == PLAN.paths
    assert changed.with_format("mxfp4") == PLAN
    assert ah.Plan.from_json(changed.to_json()) == changed


def test_format_of_named_products():
    changed = PLAN.with_format("mxfp6", products=("dgrad", "wgrad"))
    assert formats(changed, "a", "fwd") == {"mxfp4"}
    assert formats(changed, "a", "dgrad") == formats(changed, "b", "wgrad") == {"mxfp6"}


def test_format_goes_with_stochastic_dy_in_either_order():
    one = PLAN.with_format("mxfp6").with_stochastic_dy()
    assert one == PLAN.with_stochastic_dy().with_format("mxfp6")
    assert one["a"].dgrad.lhs.rounding == "stochastic" and one["a"].fwd.lhs.rounding == "nearest"


def test_every_product_is_changed_and_told_its_name():
    seen = []

    def change(name, plan):
        seen.append((name, plan.strategy))
        return ah.ProductPlan.full()

    assert PLAN.map_products(change).default == ah.LayerPlan.uniform(ah.ProductPlan.full())
    assert len(seen) == 9 and ("fwd", "iht+oe(w)") in seen


def test_unknown_formats_and_products_are_refused():
    with pytest.raises(ValueError, match="format 'int8' is unknown"):
        PLAN.with_format("int8")
    with pytest.raises(ValueError, match=r"products \['bwd'\] are unknown"):
        PLAN.with_format("mxfp6", products=("bwd",))
